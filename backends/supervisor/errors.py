# SPDX-License-Identifier: Apache-2.0
"""What goes wrong outside our code, said with the way out. Standard library only: set-up runs before anything else."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]
"""Shows one line of progress."""


class Problem(Exception):
    """Something a person can put right: `what` happened and the `way_out`."""

    def __init__(self, what: str, way_out: str) -> None:
        super().__init__(f"{what}\n  Way out: {way_out}")
        self.what = what
        self.way_out = way_out
