# SPDX-License-Identifier: Apache-2.0
"""Processes that are not our children, by descriptors that no other process can get."""

from __future__ import annotations

import select


def is_gone(pidfd: int, within_s: float) -> bool:
    """Whether the process of this descriptor ends in time."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(within_s * 1000))
