# SPDX-License-Identifier: Apache-2.0
"""One small file per model instance in the server's run folder: who it is, where it listens, how it is.

Written by the instance's stub, read by the orchestrator (health) and the supervisor. The stub's loop touches it: a
record that grew old belongs to a process that is stopped or stuck. One whose process is gone stays behind after
kill -9; readers compare pid and start time.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Literal

import msgspec

Role = Literal["stage", "orchestrator"]
State = Literal["starting", "ready", "restarting", "gave_up", "stuck"]
SILENT_S = 1.5  # a record not touched for so long is called stuck, whatever it says


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A model instance. `pid` and `start_time` are the stub's; `worker_pid` is 0 for an orchestrator."""

    model: str
    instance: str
    role: Role
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


def touch_record(run_dir: Path, model: str, instance: str) -> None:
    """A sign of life; never brings back a record that was removed."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(record_path(run_dir, model, instance))


def remove_record(run_dir: Path, model: str, instance: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        record_path(run_dir, model, instance).unlink()


def read_records(run_dir: Path) -> list[InstanceRecord]:
    """All records of a run folder; files that vanish or are not records are left out."""
    found: list[InstanceRecord] = []
    for path in sorted(run_dir.glob("*#*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            record = msgspec.json.decode(path.read_bytes(), type=InstanceRecord)
            silent = time.time() - path.stat().st_mtime > SILENT_S
            found.append(msgspec.structs.replace(record, state="stuck") if silent else record)
    return found
