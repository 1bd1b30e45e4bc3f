# SPDX-License-Identifier: Apache-2.0
"""Steps that run once: each leaves a stamp with a hash of its inputs, so a second set-up repeats only what changed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from triton_omni.backends.supervisor.errors import Report

Input = str | Path


@dataclass(frozen=True)
class Step:
    """One step of set-up.

    inputs   texts and files; a change of any makes the step run again
    results  paths that must exist for the stamp to count
    about    what it does and how long it takes, shown while it runs
    """

    name: str
    about: str
    run: Callable[[], None]
    inputs: Sequence[Input] = ()
    results: Sequence[Path] = ()

    def digest(self) -> str:
        """Hash of the inputs: texts as they are, files by content."""
        state = hashlib.sha256()
        for item in self.inputs:
            data = item.encode() if isinstance(item, str) else item.read_bytes()
            state.update(hashlib.sha256(data).digest())
        return state.hexdigest()


def is_done(step: Step, stamps: Path) -> bool:
    """True if the step's stamp matches its inputs and its results are there."""
    if not all(path.exists() for path in step.results):
        return False
    try:
        stamp = json.loads((stamps / f"{step.name}.json").read_text())
    except (OSError, ValueError):
        return False
    return stamp.get("inputs") == step.digest()


def run_steps(steps: Sequence[Step], stamps: Path, report: Report, again: frozenset[str] = frozenset()) -> None:
    """Run what is not done yet, in order, each with its number and its seconds. `again` names steps to repeat."""
    stamps.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(steps, 1):
        head = f"[{number}/{len(steps)}] {step.name}"
        if step.name not in again and is_done(step, stamps):
            report(f"{head}: done before")
            continue
        report(f"{head}: {step.about}")
        start = time.monotonic()
        stamp = stamps / f"{step.name}.json"
        stamp.unlink(missing_ok=True)
        step.run()
        stamp.write_text(json.dumps({"inputs": step.digest()}))
        report(f"{head}: done in {time.monotonic() - start:.1f} s")


@contextmanager
def only_one(lock: Path, report: Report) -> Iterator[None]:
    """Hold the set-up lock; a second set-up waits for the first. The kernel drops the lock of a process that died."""
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another set-up is running; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
