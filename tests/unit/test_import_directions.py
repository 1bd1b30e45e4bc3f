# SPDX-License-Identifier: Apache-2.0
"""Rooms import only the rooms that the table allows; what a thin stub imports is light; model names stay at home."""

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
FRAMEWORK = frozenset({"core", "wire", "connectors", "control", "config", "worker", "orchestrator", "pipelines"})
MAY_IMPORT = {
    "core": frozenset[str](),
    "wire": frozenset({"core"}),
    "connectors": frozenset({"core"}),
    "control": frozenset({"core", "connectors"}),
    "config": frozenset({"core"}),
    **{engine: frozenset({"core"}) for engine in ENGINES},
    "pipelines": frozenset({"core", "config"}) | ENGINES,
    "worker": frozenset({"core", "connectors", "control", "pipelines", "config"}),
    "orchestrator": frozenset({"core", "wire", "connectors", "control", "config"}),
    "triton": FRAMEWORK,
    "supervisor": frozenset({"core", "config", "control"}),
}
EXCEPTIONS = {
    # `python -m backends.config.repository` writes what pipelines and wire say; the rest of the room knows neither.
    "config/repository.py": frozenset({"wire", "pipelines"}),
    # set-up and self-check run the real things to see whether they work
    "supervisor": frozenset({"pipelines", "wire"}),
}
HEAVY = {
    "torch": ENGINES | {"pipelines"},
    "vllm": frozenset({"ar", "pipelines"}),
    "transformers": ENGINES | {"pipelines"},
    "diffusers": frozenset({"diffusion", "pipelines"}),
    "onnxruntime": ENGINES | {"pipelines"},
    "triton_python_backend_utils": frozenset({"triton"}),
    "client": frozenset[str](),
}
HEAVY_EXCEPTIONS = {"supervisor/torchvision_hook.py": frozenset({"torch"})}  # lives in the engine's environment
MODEL_NAMES = re.compile(r"smollm|hibari|whisper|qwen|minimax|flux\.?1|sdxl|llama-?\d", re.IGNORECASE)


def room_of(path: Path) -> str:
    return path.relative_to(BACKENDS).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [node.module or ""]
            if node.module == "backends":
                names = [f"backends.{alias.name}" for alias in node.names]
            found += [(node.lineno, name) for name in names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return found


SOURCES = sorted(path for path in BACKENDS.rglob("*.py") if "__pycache__" not in path.parts)


def test_every_room_has_its_line_in_the_table():
    rooms = {room_of(path) for path in SOURCES} - {"__init__"}
    assert rooms <= set(MAY_IMPORT), "a new room says here what it may import"


def test_rooms_import_downwards():
    wrong: list[str] = []
    for path in SOURCES:
        room, name_in_rooms = room_of(path), str(path.relative_to(BACKENDS))
        if room == "__init__":
            continue
        extra = EXCEPTIONS.get(name_in_rooms, EXCEPTIONS.get(room, frozenset()))
        for line, name in imports(path):
            head, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if head == "backends" and target and target != room and target not in MAY_IMPORT[room] | extra:
                wrong.append(f"{name_in_rooms}:{line}: {room} -> {target}")
            if head in HEAVY and room not in HEAVY[head] and head not in HEAVY_EXCEPTIONS.get(name_in_rooms, ()):
                wrong.append(f"{name_in_rooms}:{line}: {room} -> {head}")
    assert not wrong, "\n".join(wrong)


def test_the_client_knows_the_wire_and_nothing_else_of_ours():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "client").rglob("*.py"))
        for line, name in imports(path)
        if (name.startswith("backends") and name not in ("backends.wire", "backends"))
        or name.partition(".")[0] in ("torch", "vllm", "triton_python_backend_utils")
    ]
    assert not [w for w in wrong if not w.endswith("backends.supervisor")], "\n".join(wrong)


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
    run_blocked("".join(f"import backends.pipelines.{name}.pipeline\n" for name in PIPELINES), STUB_LACKS)


def test_what_a_stub_and_a_client_import_needs_no_numpy_two_and_no_server():
    modules = ("orchestrator.driver", "worker.keeper", "control.hub", "config.schema", "config.paths", "wire")
    run_blocked("".join(f"import backends.{name}\n" for name in modules), STUB_LACKS)
    run_blocked("import backends.wire\n", (*STUB_LACKS, "numpy"))


def test_the_package_called_backends_is_ours():
    import backends

    assert Path(backends.__file__).resolve().parent == BACKENDS


def without_upstream_names(path: Path, text: str) -> str:
    """Source without what it imports from a library: how a library calls its classes is not up to us."""
    if path.suffix != ".py":
        return text
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if isinstance(node, ast.ImportFrom) and (not module.startswith("backends") or module.endswith(".upstream")):
            names |= {module} | {alias.name for alias in node.names}
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, "")
    return text


def test_model_names_stay_in_their_folders():
    """Rooms know no model; a requirements file may name packages."""
    allowed = ("backends/pipelines/", "backends/supervisor/requirements")
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
