# SPDX-License-Identifier: Apache-2.0
"""Triton model repositories of the pipelines, written from their deploy files: one folder per pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import structs

from triton_omni.backends import wire
from triton_omni.backends.config.paths import Build
from triton_omni.backends.config.schema import CLUSTER, LINKS, Deploy, StageDeploy, to_parameters
from triton_omni.backends.core.chunk import TensorSpec
from triton_omni.backends.core.pipeline import Pipeline, Stage, accept_all
from triton_omni.backends.deploy.load import deploy_errors, load_deploy, read_deploy

TRITON_TYPES = {
    "bool": "TYPE_BOOL", "uint8": "TYPE_UINT8", "int8": "TYPE_INT8", "int16": "TYPE_INT16", "int32": "TYPE_INT32",
    "int64": "TYPE_INT64", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16", "float32": "TYPE_FP32",
    "float64": "TYPE_FP64", "bytes": "TYPE_STRING",
}  # fmt: skip
PUBLIC_INPUTS = (
    TensorSpec(wire.REQUEST, "bytes", (1,)),
    TensorSpec(wire.TEXT_INPUT, "bytes", (1,)),
    TensorSpec(wire.STREAM, "bool", (1,)),
    TensorSpec(wire.AUDIO, "float32", (-1,)),
    TensorSpec(wire.IMAGE, "uint8", (-1,)),
    TensorSpec(wire.VIDEO, "uint8", (-1,)),
)
PUBLIC_OUTPUTS = (
    TensorSpec(wire.EVENT, "bytes", (1,)),
    TensorSpec(wire.TEXT_OUTPUT, "bytes", (1,)),
    TensorSpec(wire.AUDIO, "float32", (-1,)),
    TensorSpec(wire.IMAGE, "uint8", (-1, -1, -1)),
)
MODEL_PY = '''# SPDX-License-Identifier: Apache-2.0
"""{title} Written by `make repository`."""

from triton_omni.backends.triton.{module} import TritonPythonModel  # noqa: F401
'''


def stage_inputs(stage: Stage) -> tuple[TensorSpec, ...]:
    """Inputs of a stage model: the orchestrator's Open, a direct call's request, and the stage's own tensors."""
    given = (TensorSpec(wire.OPEN, "uint8", (-1,)), *PUBLIC_INPUTS[:3])
    return given + tuple(s for s in stage.inputs if s.name not in {g.name for g in given})


def stage_outputs(stage: Stage) -> tuple[TensorSpec, ...]:
    """Outputs of a stage model when it is called directly."""
    return PUBLIC_OUTPUTS[:2] + stage.outputs


def repository_files(pipeline: Pipeline, deploy: Deploy) -> dict[str, str]:
    """Relative path → content of a pipeline's model repository."""
    files: dict[str, str] = {}
    sections = {LINKS: deploy.links, CLUSTER: deploy.cluster}
    links = {name: msgspec.json.encode(section).decode() for name, section in sections.items() if section is not None}
    for stage in pipeline.stages:
        own = deploy.stages[stage.name]
        parameters = {"pipeline": pipeline.name, "stage": stage.name} | links | to_parameters(own)
        model = pipeline.model(stage.name)
        files[f"{model}/config.pbtxt"] = _config(
            model, stage_inputs(stage), stage_outputs(stage), _instances(own), parameters
        )
        files[f"{model}/1/model.py"] = MODEL_PY.format(
            title=f"Stage `{stage.name}` of pipeline `{pipeline.name}`.", module="stage"
        )
    checked = {s.name: deploy.stages[s.name].engine for s in pipeline.stages if s.check is not accept_all}
    pools = {name: count for name, own in deploy.stages.items() if (count := own.workers) > 1}
    orchestrator = structs.replace(deploy.orchestrator, engine=checked, workers=pools)
    parameters = {"pipeline": pipeline.name} | links | to_parameters(orchestrator)
    instances = "instance_group [{ kind: KIND_CPU count: 1 }]"
    files[f"{pipeline.name}/config.pbtxt"] = _config(
        pipeline.name, PUBLIC_INPUTS, PUBLIC_OUTPUTS, instances, parameters
    )
    files[f"{pipeline.name}/1/model.py"] = MODEL_PY.format(
        title=f"The public model of pipeline `{pipeline.name}`: its orchestrator.", module="orchestrator"
    )
    return files


def _instances(deploy: StageDeploy) -> str:
    """One instance, whose stub starts all workers; one per GPU where the deploy file names none."""
    kind = {"cpu": "KIND_CPU", "cuda": "KIND_GPU", "auto": "KIND_AUTO"}[deploy.device]
    if deploy.place is not None:
        kind = "KIND_CPU"
    elif deploy.spans_gpus:
        kind = "KIND_MODEL"
    elif deploy.gpus:
        kind = f"KIND_GPU gpus: [ {deploy.gpus[0]} ]"
    return f"instance_group [{{ kind: {kind} count: 1 }}]"


def _config(
    name: str,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    instances: str,
    parameters: dict[str, str],
) -> str:
    lines = [
        "# SPDX-License-Identifier: Apache-2.0",
        "# Written by `make repository` from the pipeline and its deploy.yaml.",
        f'name: "{name}"',
        'backend: "python"',
        "max_batch_size: 0",
        "model_transaction_policy { decoupled: true }",
        instances,
    ]
    lines += [_tensor("input", spec, " optional: true") for spec in inputs]
    lines += [_tensor("output", spec, "") for spec in outputs]
    lines += [
        f'parameters {{ key: "{key}" value: {{ string_value: "{_escape(value)}" }} }}'
        for key, value in parameters.items()
    ]
    return "\n".join(lines) + "\n"


def _tensor(kind: str, spec: TensorSpec, suffix: str) -> str:
    dims = ", ".join(str(n) for n in spec.shape)
    return f'{kind} {{ name: "{spec.name}" data_type: {TRITON_TYPES[spec.dtype]} dims: [ {dims} ]{suffix} }}'


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def deploy_files(pipeline: str = "*") -> list[Path]:
    """The deploy.yaml of every pipeline, or of one."""
    return sorted((Path(__file__).parent / "pipelines").glob(f"{pipeline}/deploy.yaml"))


def check(deploy: Deploy) -> list[str]:
    """What is wrong with a deploy file's values for its pipeline. Raises LookupError for an unknown pipeline."""
    from triton_omni.backends.pipelines import load

    return deploy_errors(deploy, load(deploy.pipeline))


def write(out: Path, deploy_file: Path, platform: Build = "cpu") -> list[str]:
    """Write the repository of a deploy file's pipeline; returns the files that differed."""
    from triton_omni.backends.pipelines import load

    pipeline = load(read_deploy(deploy_file, platform).pipeline)
    files = repository_files(pipeline, load_deploy(deploy_file, pipeline, platform))
    target = out / pipeline.name
    written: list[str] = []
    for name, content in files.items():
        path = target / name
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            written.append(f"{pipeline.name}/{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    return written
