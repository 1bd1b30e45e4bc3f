# SPDX-License-Identifier: Apache-2.0
"""Packages import what the table allows; what a thin stub imports is light; model names stay in their folders."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ROOT / "backends"
ENGINES = frozenset({"ar", "codec", "diffusion"})
MAY_IMPORT = {
    "core": frozenset[str](),
    "wire": frozenset({"core"}),
    "telemetry": frozenset({"core"}),
    "connectors": frozenset({"core"}),
    "control": frozenset({"core", "connectors"}),
    "config": frozenset({"core"}),
    "child_process": frozenset[str](),
    "cuda_graphs": frozenset[str](),
    "ar": frozenset({"child_process", "core", "cuda_graphs"}),
    "codec": frozenset({"core", "cuda_graphs"}),
    "diffusion": frozenset({"child_process", "core", "telemetry"}),
    "pipelines": frozenset({"core", "config"}) | ENGINES,
    "worker": frozenset({"child_process", "core", "telemetry", "connectors", "control", "pipelines"}),
    "orchestrator": frozenset({"core", "telemetry", "control", "config"}),
    "stub": frozenset({"child_process", "core", "wire", "control", "config", "connectors"}),
    "triton": frozenset({"core", "telemetry", "wire", "control", "config", "orchestrator", "stub", "pipelines"}),
    "deploy": frozenset({"core", "config"}),
    "repository": frozenset({"core", "wire", "config", "deploy", "pipelines"}),
    "supervisor": frozenset({"child_process", "config", "control", "deploy", "repository"}),
    "tools": frozenset({"diffusion"}),
    "scale": frozenset[str](),
}
"""Package → packages that it may import; a permission that nothing uses fails the test."""
HEAVY = {
    "torch": ENGINES | {"cuda_graphs", "pipelines", "tools"},
    "vllm": frozenset({"ar", "pipelines"}),
    "transformers": ENGINES | {"pipelines", "tools"},
    "diffusers": frozenset({"diffusion", "pipelines", "tools"}),
    "ray": frozenset({"scale"}),
    "onnxruntime": ENGINES | {"pipelines"},
    "triton_python_backend_utils": frozenset({"triton"}),
}
HEAVY_EXCEPTIONS = {
    "core/chunk.py": frozenset({"torch"}),  # in two methods that only engines call
    "supervisor/setup/torchvision_hook.py": frozenset({"torch"}),  # lives in the engine's environment
}
MODEL_NAMES = re.compile(r"smollm|hibari|whisper|qwen|minimax|flux\.?1|sdxl|llama-?\d", re.IGNORECASE)


def package_of(path: Path) -> str:
    return path.relative_to(BACKENDS).parts[0].removesuffix(".py")


PACKAGES = ("triton_omni", "triton_omni.backends")


def imports(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [node.module or ""]
            if node.module in PACKAGES:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name) for name in names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return found


SOURCES = sorted(path for path in BACKENDS.rglob("*.py") if "__pycache__" not in path.parts)
OURS = "triton_omni.backends."


def ours(path: Path) -> list[tuple[int, str]]:
    """Line and package of everything that a file imports from our backends."""
    return [(line, name.removeprefix(OURS).partition(".")[0]) for line, name in imports(path) if name.startswith(OURS)]


def test_every_package_has_its_line_in_the_table():
    assert {package_of(path) for path in SOURCES} - {"__init__"} == set(MAY_IMPORT)


def test_packages_import_downwards():
    wrong: list[str] = []
    used: set[tuple[str, str]] = set()
    for path in SOURCES:
        package, name_in_backends = package_of(path), str(path.relative_to(BACKENDS))
        if package == "__init__":
            continue
        for line, target in ours(path):
            if target != package:
                used.add((package, target))
                if target not in MAY_IMPORT[package]:
                    wrong.append(f"{name_in_backends}:{line}: {package} -> {target}")
        for line, name in imports(path):
            head = name.partition(".")[0]
            if head in HEAVY and package not in HEAVY[head] and head not in HEAVY_EXCEPTIONS.get(name_in_backends, ()):
                wrong.append(f"{name_in_backends}:{line}: {package} -> {head}")
            if name.startswith("triton_omni") and not name.startswith("triton_omni.backends"):
                wrong.append(f"{name_in_backends}:{line}: {package} -> client ({name})")
    assert not wrong, "\n".join(wrong)
    unused = sorted((p, t) for p, targets in MAY_IMPORT.items() for t in targets if (p, t) not in used)
    assert not unused, f"permissions that nothing uses: {unused}"


STARTERS = ("client/cli.py", "client/omni.py")  # they start servers


def test_the_client_knows_wire_and_telemetry_and_nothing_else_of_the_backends():
    wrong: list[str] = []
    for path in sorted((ROOT / "client").rglob("*.py")):
        name_in_repo = str(path.relative_to(ROOT))
        wrong += [
            f"{name_in_repo}:{line}: {target}"
            for line, target in ours(path)
            if target not in ("wire", "telemetry", *(("supervisor",) if name_in_repo in STARTERS else ()))
        ]
        wrong += [
            f"{name_in_repo}:{line}: {name}"
            for line, name in imports(path)
            if name.partition(".")[0] in ("torch", "vllm", "triton_python_backend_utils")
        ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_folders_by_their_bare_names():
    """`import backends` would work in a checkout only, and `import client` finds any client.py of a user."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in ("backends", "client", "model_repository", "perf", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in imports(path)
        if name.partition(".")[0] in ("backends", "client")
    ]
    assert not wrong, "\n".join(wrong)


def test_init_files_run_nothing():
    for path in SOURCES:
        if path.name != "__init__.py" or path.parent == BACKENDS / "pipelines":
            continue  # pipelines/__init__ holds one function, checked below
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            export = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            assert docstring or export or isinstance(node, ast.ImportFrom), f"{path}:{node.lineno}"
    kinds = {type(n) for n in ast.parse((BACKENDS / "pipelines/__init__.py").read_text(encoding="utf-8")).body}
    assert kinds <= {ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef}


BLOCKER = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError("a thin stub has no " + name)

sys.meta_path.insert(0, Blocked())
"""
STUB_LACKS = (
    "torch", "vllm", "transformers", "diffusers", "onnxruntime", "yaml", "scipy", "safetensors", "PIL", "soundfile",
    "tritonclient", "starlette", "gguf", "tokenizers", "huggingface_hub",
)  # fmt: skip
PIPELINES = sorted(path.parent.name for path in BACKENDS.glob("pipelines/*/pipeline.py"))


def run_blocked(code: str, blocked: tuple[str, ...]) -> None:
    code = BLOCKER.replace("{blocked}", repr(set(blocked))) + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_pipelines_are_importable_by_a_thin_stub():
    """It has numpy and msgspec; a pipeline's heavy imports belong inside its functions."""
    run_blocked("".join(f"import triton_omni.backends.pipelines.{name}.pipeline\n" for name in PIPELINES), STUB_LACKS)


def test_what_a_stub_and_a_client_import_needs_no_numpy_two_and_no_server():
    modules = ("orchestrator.driver", "stub.worker_process", "control.hub", "config.schema", "config.paths", "wire")
    run_blocked("".join(f"import triton_omni.backends.{name}\n" for name in modules), STUB_LACKS)
    run_blocked("import triton_omni.backends.wire\n", (*STUB_LACKS, "numpy"))


def test_the_package_that_runs_is_this_checkout():
    from triton_omni import backends

    assert Path(backends.__file__).resolve().parent == BACKENDS


def without_upstream_names(path: Path, text: str) -> str:
    """Source without what it imports from a library: how a library calls its classes is not up to us."""
    if path.suffix != ".py":
        return text
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if isinstance(node, ast.ImportFrom) and (not module.startswith("triton_omni") or module.endswith(".upstream")):
            names |= {module} | {alias.name for alias in node.names}
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, "")
    return text


def test_model_names_stay_in_their_folders():
    """Shared packages name no model; a requirements file may name packages."""
    allowed = ("backends/pipelines/", "backends/tools/", "backends/supervisor/setup/requirements")
    wrong = []
    for folder in ("backends", "client"):
        for path in sorted((ROOT / folder).rglob("*")):
            name = str(path.relative_to(ROOT))
            if not path.is_file() or path.suffix in (".pyc", ".npz", ".safetensors") or name.startswith(allowed):
                continue
            text = without_upstream_names(path, path.read_text(encoding="utf-8"))
            for number, line in enumerate(text.splitlines(), 1):
                if MODEL_NAMES.search(line):
                    wrong.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(BACKENDS)))
def test_every_file_says_its_licence(path):
    text = path.read_text(encoding="utf-8")
    assert not text or text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
