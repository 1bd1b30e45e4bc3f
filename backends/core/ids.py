# SPDX-License-Identifier: Apache-2.0
"""Identities. A run id is made per attempt and never from a client's request id, so nothing late can be mistaken."""

from __future__ import annotations

import os
import uuid

RUN_ID_BYTES = 16


def new_run_id() -> bytes:
    """16 random bytes that name one attempt of one request in all processes."""
    return os.urandom(RUN_ID_BYTES)


def new_request_id(prefix: str = "req") -> str:
    """A request id for a client that sent none."""
    return f"{prefix}-{uuid.uuid4().hex}"


TRACEPARENT = "traceparent"
"""Request parameter and header of the W3C trace context."""
OPERATOR_KEY = "operator_key"
"""Request parameter with the operator's key."""
