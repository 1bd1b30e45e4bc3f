# SPDX-License-Identifier: Apache-2.0
"""An instance's record in the run folder, and the heartbeat that tells a live stub from a stuck one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from triton_omni.backends.config import paths
from triton_omni.backends.control.records import InstanceRecord, Role, State, remove_record, touch_record, write_record

HEARTBEAT_S = 0.25  # readers report a record older than records.SILENT_S as stuck


class InstanceHeartbeat:
    """One instance's record, updated by every turn of the stub's loop: a loop that hangs stops the heartbeat."""

    def __init__(self, *, run_dir: Path, model: str, instance: str, role: Role, address: str) -> None:
        pid = os.getpid()
        self._run_dir = run_dir
        self._written = False
        self._touched_s = 0.0
        self._record = InstanceRecord(
            model=model,
            instance=instance,
            role=role,
            pid=pid,
            start_time=paths.start_time(pid),
            state="starting",
            address=address,
        )

    def update(
        self,
        state: State,
        worker_pid: int = 0,
        restarts: int = 0,
        ready_s: float = 0.0,
        gpu_paths: str = "",
        address: str = "",
        placement: str = "",
    ) -> None:
        """Write the record if it changed; otherwise touch it every HEARTBEAT_S. `address`: if it is known only now."""
        now = time.monotonic()
        record = msgspec.structs.replace(
            self._record,
            state=state,
            worker_pid=worker_pid,
            restarts=restarts,
            ready_s=round(ready_s, 3),
            gpu_paths=gpu_paths,
            address=address or self._record.address,
            placement=placement,
        )
        if record != self._record or not self._written:
            self._record, self._written = record, True
            write_record(self._run_dir, record)
        elif now - self._touched_s >= HEARTBEAT_S:
            touch_record(self._run_dir, record.model, record.instance)
        else:
            return
        self._touched_s = now

    def remove(self) -> None:
        remove_record(self._run_dir, self._record.model, self._record.instance)
