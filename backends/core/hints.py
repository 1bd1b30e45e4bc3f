# SPDX-License-Identifier: Apache-2.0
"""What to say beside msgspec's "unknown field": the known key that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_key(message: str, known: Iterable[str]) -> str:
    """`; did you mean '…'?` for a message of msgspec about an unknown field with a near known key, else ""."""
    if "unknown field" not in message:
        return ""
    near = difflib.get_close_matches(message.split("`")[1], sorted(set(known)), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""
