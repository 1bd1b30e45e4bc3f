# SPDX-License-Identifier: Apache-2.0
"""Makes `import torchvision` work where its compiled part was built for another torch.

Package indexes serve a CUDA build of torchvision beside a CPU build of torch: its extension cannot be loaded and the
import fails with "operator torchvision::nms does not exist", and with it every import of transformers' and diffusers'
image code. We only use torchvision's pure Python parts, so it is enough that the operators are *declared*; calling one
still fails with a clear error. Set-up copies this file into the engine environment and starts it from a `.pth` line,
because vLLM inspects models in subprocesses of its own; it costs nothing until torchvision is imported, and declares
nothing where the extension loads. Standard library only at import.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # every start of this environment's Python reads this file: typing and the like cost 10 ms
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from pathlib import Path
    from types import ModuleType

_NAMES = r"""register_meta\("(\w+)"\)|torchvision::(\w+)"""
_KEEP: list[object] = []  # a torch.library.Library takes its declarations back when it is collected


class TorchvisionFinder:
    """Finds torchvision once, after declaring its operators if they cannot be loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        from importlib.machinery import PathFinder
        from pathlib import Path

        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            declare_missing(Path(spec.origin).parent)
        return spec


def operator_names(folder: Path) -> list[str]:
    """Operators that torchvision's Python files expect of its extension."""
    import re

    names: set[str] = set()
    for file in ("_meta_registrations.py", "_autograd_registrations.py"):
        if (folder / file).is_file():
            for match in re.finditer(_NAMES, (folder / file).read_text()):
                names.add(match[1] or match[2])
    return sorted(names)


def declare_missing(folder: Path) -> bool:
    """Declare the operators of the torchvision in `folder` if its extension does not load; True if it was needed."""
    import torch

    if _loads(folder):
        return False
    library = torch.library.Library("torchvision", "DEF")
    for name in operator_names(folder):
        # these are never called, so any schema does; torch only needs the name
        library.define(f"{name}(Tensor a) -> Tensor")
    _KEEP.append(library)
    return True


def _loads(folder: Path) -> bool:
    import torch

    for extension in sorted(folder.glob("_C*.so")):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            return False
        return True
    return False


def install() -> None:
    """Watch for the import of torchvision; called by the `.pth` line."""
    if not any(isinstance(f, TorchvisionFinder) for f in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())
