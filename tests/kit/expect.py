# SPDX-License-Identifier: Apache-2.0
"""Assertions that several tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def accepts(check: Callable[..., Any], *arguments: Any) -> None:
    """Assert that a check raises nothing; names what it refused otherwise."""
    try:
        check(*arguments)
    except Exception as error:  # any exception is a refusal
        raise AssertionError(f"{check.__name__} refused {arguments}") from error
