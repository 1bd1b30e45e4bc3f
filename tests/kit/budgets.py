# SPDX-License-Identifier: Apache-2.0
"""What the product promises in seconds, and how much longer a loaded machine may take. Nothing else bounds time:
all other time-outs only end a test that hangs.
"""

from __future__ import annotations

import os

LOAD_VARIABLE = "TRITON_OMNI_TEST_LOAD"
"""Fixes the factor, e.g. 1 on a quiet machine."""
MAX_LOAD_FACTOR = 20.0

DEATH_SEEN_S = 2.0  # health shows a dead or stopped process, and the requests that need it have failed
SLOTS_FREE_S = 2.0  # after the end of a request no stage holds anything of it, unless an engine is inside a long step
RECOVERED_S = 60.0  # a toy worker that died is back and takes as much load as before


def load_factor() -> float:
    """Runnable processes per CPU over the last minute, from 1 to MAX_LOAD_FACTOR."""
    load = os.environ.get(LOAD_VARIABLE) or os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(1.0, float(load)), MAX_LOAD_FACTOR)


def within(promise_s: float) -> float:
    """The promise on this machine now."""
    return promise_s * load_factor()
