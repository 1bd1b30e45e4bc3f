# SPDX-License-Identifier: Apache-2.0
"""The cure for a torchvision built for another torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from triton_omni.backends.supervisor.setup import torchvision_hook

REGISTRATIONS = """
@register_meta("roi_align")
def meta_roi_align(input): ...
@torch.library.register_fake("torchvision::nms")
def meta_nms(dets): ...
"""


def test_operator_names_come_from_torchvisions_own_files(tmp_path: Path) -> None:
    (tmp_path / "_meta_registrations.py").write_text(REGISTRATIONS)
    assert torchvision_hook.operator_names(tmp_path) == ["nms", "roi_align"]
    assert torchvision_hook.operator_names(tmp_path / "none") == []


def fake_torchvision(folder: Path) -> None:
    """A torchvision whose extension does not load and which needs its operators at import, as the real one."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "_C.so").write_bytes(b"no library")
    (package / "_meta_registrations.py").write_text(REGISTRATIONS)
    (package / "__init__.py").write_text("import torch\nassert torch.defined == ['nms', 'roi_align'], torch.defined\n")


FAKE_TORCH = """
from types import SimpleNamespace
defined = []
class Library:
    def __init__(self, name, kind):
        assert (name, kind) == ("torchvision", "DEF")
    def define(self, schema):
        defined.append(schema.split("(")[0])
def load(path):
    if b"library" in open(path, "rb").read():
        raise OSError(path)
ops = SimpleNamespace(load_library=load)
library = SimpleNamespace(Library=Library)
"""


def run(folder: Path, code: str) -> str:
    lines = [
        "import sys",
        f"sys.path.insert(0, {str(folder)!r})",
        "from triton_omni.backends.supervisor.setup import torchvision_hook as h",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, code])], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_missing_operators_are_declared_when_torchvision_is_imported(tmp_path: Path) -> None:
    fake_torchvision(tmp_path)
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    code = "h.install(); assert 'torch' not in sys.modules; import torchvision; print(len(h._KEEP), len(sys.meta_path))"
    kept, finders = run(tmp_path, code).split()
    assert kept == "1"
    assert finders == run(tmp_path, "print(len(sys.meta_path))").strip()  # it takes itself out again


def test_nothing_is_declared_where_the_extension_loads(tmp_path: Path) -> None:
    fake_torchvision(tmp_path)
    (tmp_path / "torchvision" / "_C.so").write_bytes(b"good")
    (tmp_path / "torchvision" / "__init__.py").write_text("import torch\nassert torch.defined == []\n")
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    assert run(tmp_path, "h.install(); import torchvision; print(len(h._KEEP))").strip() == "0"


def test_installing_twice_is_once(tmp_path: Path) -> None:
    code = "n = len(sys.meta_path); h.install(); h.install(); print(len(sys.meta_path) - n)"
    assert run(tmp_path, code).strip() == "1"
