# SPDX-License-Identifier: Apache-2.0
"""The most memory that torch held at one time on the CPU while something was computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes over what was held before; what `work` returns counts."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        kept = work()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events: list[Any] = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del kept
    return most
