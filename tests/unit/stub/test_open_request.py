# SPDX-License-Identifier: Apache-2.0
"""A stage takes an Open only from its own server's orchestrator: every other one is refused, naming the input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.records import InstanceRecord, write_record
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


def test_a_tcp_address_must_be_one_that_a_record_names(tmp_path: Path) -> None:
    """A client may know the port, or have a listener of its own; it cannot know what is in the records."""
    genuine = f"token:{tmp_path}/toy_0.1.sock|tcp://10.0.0.5:7400"
    identity: dict[str, Any] = {"pid": 1, "start_time": 1, "state": "ready", "instance": "0"}
    write_record(tmp_path, InstanceRecord(model="toy", role="orchestrator", address=genuine, **identity))
    message = msg.OpenMessage(**(GENUINE | {"reply": genuine}))
    assert read_open(msg.encode(message), load("toy"), "frames", tmp_path, False) == message
    for forged in (
        "tcp://10.0.0.5:7400",
        f"token:{tmp_path}/toy_0.1.sock|tcp://10.0.0.6:7400",
        f"{tmp_path}/toy_0.1.sock|tcp://10.0.0.5:7400",
        f"token:{tmp_path}/toy_0.1.sock",
    ):
        message = msg.OpenMessage(**(GENUINE | {"reply": forged}))
        with pytest.raises(BadRequest, match="belongs to the orchestrator"):
            read_open(msg.encode(message), load("toy"), "frames", tmp_path, False)
