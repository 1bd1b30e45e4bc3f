# SPDX-License-Identifier: Apache-2.0
"""Instance records: what each stub says about itself in the run folder, one file per model instance."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from backends.supervisor import processes

PATTERN = "*#*.json"


class Instance(msgspec.Struct, frozen=True):
    """One Triton instance of ours. `start_time` belongs to `pid`, the stub; `address` is where a probe is answered."""

    model: str
    instance: str
    role: Literal["stage", "orchestrator"]
    pid: int
    start_time: int
    address: str
    state: Literal["starting", "ready", "restarting", "gave_up"]
    worker_pid: int = 0

    @property
    def name(self) -> str:
        return f"{self.model}#{self.instance}"

    def stub_is_alive(self) -> bool:
        """True if the stub that wrote this record still runs."""
        return processes.is_alive(self.pid, self.start_time)


def read_instances(run_dir: Path) -> list[Instance]:
    """All records in a run folder; a file that is no record of ours is left out until it is one."""
    found: list[Instance] = []
    for file in sorted(run_dir.glob(PATTERN)):
        try:
            found.append(msgspec.json.decode(file.read_bytes(), type=Instance))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def forget_instances(run_dir: Path) -> None:
    """Remove the records of a server that is gone."""
    for file in run_dir.glob(PATTERN):
        file.unlink(missing_ok=True)
