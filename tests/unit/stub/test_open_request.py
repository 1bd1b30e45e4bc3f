# SPDX-License-Identifier: Apache-2.0
"""A stage takes an Open only from its own server's orchestrator: every other one is refused, naming the input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from triton_omni.backends.control import messages as msg
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.pipelines import load
from triton_omni.backends.stub.open_request import read_open

RUN_DIR = Path("/run/private")
GENUINE: dict[str, Any] = {
    "run": b"r" * 16,
    "request_id": "req",
    "request": b"{}",
    "reply": str(RUN_DIR / "toy_0.1.sock"),
    "upstream": ("tokens",),
    "consumers": ("wave",),
}


def read(data: bytes, has_inputs: bool = False) -> msg.OpenMessage:
    return read_open(data, load("toy"), "frames", RUN_DIR, has_inputs)


def test_the_orchestrators_open_is_taken() -> None:
    message = msg.OpenMessage(**GENUINE)
    assert read(msg.encode(message)) == message


@pytest.mark.parametrize("data", [b"", b"\x01\x02\x03", b"\xff" * 100, msg.encode(msg.StopMessage(b"r" * 16))])
def test_what_is_no_open_is_the_callers_fault(data: bytes) -> None:
    with pytest.raises(BadRequest, match="not an Open message") as caught:
        read(data)
    assert caught.value.where == "open"


@pytest.mark.parametrize(
    "forged",
    [
        {"reply": ""},
        {"reply": "/tmp/mine.sock"},
        {"reply": "/run/private/../mine.sock"},
        {"consumers": ("tokens",)},
        {"run": b""},
        {"run": b"r" * 5000},
        {"upstream": ("unknown",)},
        {"wanted": ("audio",)},
        {"direct": True},
        {"has_inputs": True},
        {"stall_s": -1.0},
        {"stall_s": float("nan")},
    ],
)
def test_a_forged_open_is_refused(forged: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="belongs to the orchestrator") as caught:
        read(msg.encode(msg.OpenMessage(**(GENUINE | forged))))
    assert caught.value.where == "open"
