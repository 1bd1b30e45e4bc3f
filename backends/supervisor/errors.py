# SPDX-License-Identifier: Apache-2.0
"""Errors outside our code, each with a hint on how to fix it. Standard library only: set-up runs before pip does."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str], None]
"""Shows one line of progress."""


class SetupError(Exception):
    """Something a person can fix: `message` is what happened, `hint` is what to do about it."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(f"{message}\n  Workaround: {hint}")
        self.message = message
        self.hint = hint


def report(text: str) -> None:
    """Print one line of progress at once, also into a pipe."""
    print(text, flush=True)
