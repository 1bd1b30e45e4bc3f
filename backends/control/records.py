# SPDX-License-Identifier: Apache-2.0
"""One small file per model instance in the server's run folder: who it is, where it listens, how it is.

Written by the instance's stub, read by the orchestrator (health) and the supervisor. A record whose process is
gone stays behind after kill -9; readers compare pid and start time.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal

import msgspec

State = Literal["starting", "ready", "restarting", "gave_up"]


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A model instance. `pid` and `start_time` are the stub's; `worker_pid` is 0 for an orchestrator."""

    model: str
    instance: str
    role: Literal["stage", "orchestrator"]
    pid: int
    start_time: int
    state: State
    worker_pid: int = 0
    address: str = ""
    restarts: int = 0
    ready_s: float = 0.0
    """Seconds the worker took to become ready."""
    text: str = ""


def record_path(run_dir: Path, model: str, instance: str) -> Path:
    return run_dir / f"{model}#{instance}.json"


def write_record(run_dir: Path, record: InstanceRecord) -> None:
    """Replace the record at once, so that no reader sees half of it."""
    path = record_path(run_dir, record.model, record.instance)
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_bytes(msgspec.json.encode(record))
    fresh.replace(path)


def remove_record(run_dir: Path, model: str, instance: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        record_path(run_dir, model, instance).unlink()


def read_records(run_dir: Path) -> list[InstanceRecord]:
    """All records of a run folder; files that vanish or are not records are left out."""
    found: list[InstanceRecord] = []
    for path in sorted(run_dir.glob("*#*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.append(msgspec.json.decode(path.read_bytes(), type=InstanceRecord))
    return found
