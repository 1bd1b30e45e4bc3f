# SPDX-License-Identifier: Apache-2.0
"""Instance records: one JSON file per model instance in the server's run folder, with identity, address and state.

Written by the instance's stub, read by the orchestrator (health) and the supervisor. The stub's loop touches the
file as a heartbeat: an old modification time means a stopped or stuck process. After kill -9 the file remains;
readers compare pid and start time.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Literal

import msgspec

Role = Literal["stage", "orchestrator"]
State = Literal["starting", "waiting", "ready", "restarting", "gave_up", "stuck"]
"""waiting: for a worker that is started by other means to join."""
SILENT_S = 1.5  # a record not touched for this long is reported as stuck, whatever its content


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
    gpu_paths: str = ""
    """How GPU tensors travel to the worker's peers, see Hub.gpu_paths."""
    placement: str = ""
    """Of a worker that the stub does not start itself: what starts it, where it was placed, or why it is not."""


def record_path(run_dir: Path, model: str, instance: str) -> Path:
    return run_dir / f"{model}#{instance}.json"


def write_record(run_dir: Path, record: InstanceRecord) -> None:
    """Replace the record atomically."""
    path = record_path(run_dir, record.model, record.instance)
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_bytes(msgspec.json.encode(record))
    fresh.replace(path)


def touch_record(run_dir: Path, model: str, instance: str) -> None:
    """Heartbeat: update the modification time. Does nothing if the record was removed."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(record_path(run_dir, model, instance))


def remove_record(run_dir: Path, model: str, instance: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        record_path(run_dir, model, instance).unlink()


def read_records(run_dir: Path) -> list[InstanceRecord]:
    """All records of a run folder. Files that vanish meanwhile or are not records are skipped."""
    records: list[InstanceRecord] = []
    for path in sorted(run_dir.glob("*#*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            record = msgspec.json.decode(path.read_bytes(), type=InstanceRecord)
            silent = time.time() - path.stat().st_mtime > SILENT_S
            records.append(msgspec.structs.replace(record, state="stuck") if silent else record)
    return records
