# SPDX-License-Identifier: Apache-2.0
"""deploy.yaml → Deploy, checked against the pipeline it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from triton_omni.backends.config.paths import Build
from triton_omni.backends.config.schema import ConfigError, Deploy, OrchestratorDeploy, StageDeploy, convert
from triton_omni.backends.core.pipeline import Pipeline
from triton_omni.backends.deploy.gpu_memory import gpu_memory_errors
from triton_omni.backends.deploy.layers import read_layers, values_of


def read_deploy(path: Path, platform: Build = "cpu") -> Deploy:
    """The deploy file at `path` with all that it extends. Raises ConfigError with every error, file and key."""
    return to_deploy(values_of(read_layers(path, platform)[0]), path.name)


def to_deploy(values: Mapping[str, object], place: str) -> Deploy:
    """Merged values as a Deploy. Raises ConfigError with all errors of all sections, each on a line."""
    errors: list[str] = []

    def checked(convert_section: Callable[[], object]) -> None:
        try:
            convert_section()
        except ConfigError as error:
            errors.append(str(error))

    stages = values.get("stages", {})
    if isinstance(stages, dict):
        for name, stage in stages.items():
            checked(lambda name=name, stage=stage: convert(stage, StageDeploy, f"{place}: stage {name}"))
    orchestrator = values.get("orchestrator", {})
    checked(lambda: convert(orchestrator, OrchestratorDeploy, f"{place}: orchestrator"))
    shallow = {**values, "stages": {} if isinstance(stages, dict) else stages}
    shallow.pop("orchestrator", None)
    checked(lambda: convert(shallow, Deploy, place))
    if errors:
        raise ConfigError("\n".join(errors))
    return convert(values, Deploy, place)


def load_deploy(path: Path, pipeline: Pipeline, platform: Build = "cpu") -> Deploy:
    """The deploy file at `path` for `pipeline`. Raises ConfigError with all errors, each with file and key."""
    deploy = read_deploy(path, platform)
    if deploy.pipeline != pipeline.name:
        raise ConfigError(f"{path.name}: pipeline is '{deploy.pipeline}' but must be '{pipeline.name}'")
    if errors := deploy_errors(deploy, pipeline):
        raise ConfigError("\n".join(f"{path.name}: {error}" for error in errors))
    return deploy


def deploy_errors(deploy: Deploy, pipeline: Pipeline) -> list[str]:
    """What does not fit between a deploy file and its pipeline, or between its stages and their GPUs."""
    errors: list[str] = []
    names = [stage.name for stage in pipeline.stages]
    if missing := [name for name in names if name not in deploy.stages]:
        errors.append(f"stages of pipeline {pipeline.name} are missing: {', '.join(missing)}")
    if unknown := sorted(set(deploy.stages) - set(names)):
        errors.append(f"unknown stages: {', '.join(unknown)}; pipeline {pipeline.name} has {', '.join(names)}")
    placed = [name for name, stage in deploy.stages.items() if stage.place is not None]
    if placed and deploy.links is None:
        errors.append(f"stage {placed[0]}: place needs `links` with a key_file; see docs/many-hosts.md")
    by_ray = [name for name in placed if getattr(deploy.stages[name].place, "by", "") == "ray"]
    if by_ray and deploy.cluster is None:
        errors.append(
            f"stage {by_ray[0]}: place by ray needs `cluster` with address and python; see docs/many-hosts.md"
        )
    return errors + gpu_memory_errors(deploy.stages, deploy.gpu_bytes)
