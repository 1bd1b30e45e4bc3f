# SPDX-License-Identifier: Apache-2.0
"""The control vocabulary round trip, and records of instances on disk."""

from __future__ import annotations

import os
import typing

import msgspec
import pytest

from triton_omni.backends.control import messages
from triton_omni.backends.control.messages import (
    AcceptedMessage,
    ConnectMessage,
    FailedMessage,
    FinishedMessage,
    HelloMessage,
    OpenMessage,
    PingMessage,
    ProgressMessage,
    ReceivedMessage,
    ReleaseMessage,
    StopMessage,
)
from triton_omni.backends.control.records import (
    SILENT_S,
    InstanceRecord,
    read_records,
    record_path,
    remove_record,
    touch_record,
    write_record,
)
from triton_omni.backends.core.errors import ErrorInfo

RUN = bytes(range(16))
FULL = (
    HelloMessage(1, "chat/thinker", "GPU-1"),
    OpenMessage(RUN, "req", b"{}", "/a.sock", ("x", "y"), ("z",), ("text",), True, True, 1.5),
    ConnectMessage(RUN, "z", "/z.sock"),
    StopMessage(RUN),
    ReleaseMessage(RUN),
    ReceivedMessage(RUN),
    AcceptedMessage(RUN, "/w.sock"),
    ProgressMessage(RUN, 7, 50),
    FinishedMessage(RUN, "length", {"tokens": 3.0}),
    FailedMessage(RUN, ErrorInfo("stage_failed", "boom", "wave"), True),
    PingMessage("me", "failed", 2, "why", {"steps": 1.0}),
)
BARE = (
    OpenMessage(RUN, "", b""),
    AcceptedMessage(RUN),
    ProgressMessage(RUN, 1),
    FinishedMessage(RUN, ""),
    FailedMessage(RUN, ErrorInfo("", "")),
    PingMessage(),
)


@pytest.mark.parametrize("message", [*FULL, *BARE], ids=lambda m: type(m).__name__)
def test_round_trip(message):
    assert messages.decode(messages.encode(message)) == message


def test_the_examples_cover_the_vocabulary():
    assert {type(m) for m in FULL} == set(typing.get_args(messages.AnyMessage))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x90", msgspec.msgpack.encode(["stop"]), msgspec.msgpack.encode(["stop", "text"]),
     msgspec.msgpack.encode({"type": "stop"}), msgspec.msgpack.encode(["nothing", RUN])],
)  # fmt: skip
def test_anything_else_is_refused(data):
    with pytest.raises(msgspec.MsgspecError):
        messages.decode(data)


def _record(**change):
    fields = {"model": "toy_wave", "instance": "0_0", "role": "stage", "pid": 1, "start_time": 2, "state": "ready"}
    return InstanceRecord(**(fields | change))


def test_records_are_replaced_read_and_removed(tmp_path):
    write_record(tmp_path, _record(state="starting"))
    write_record(tmp_path, _record(restarts=3, worker_pid=9, address="/w.sock", ready_s=1.5, gpu_paths="so"))
    write_record(tmp_path, _record(instance="1_0"))
    write_record(tmp_path, _record(model="toy", role="orchestrator"))
    assert [(r.model, r.instance, r.restarts) for r in read_records(tmp_path)] == [
        ("toy", "0_0", 0), ("toy_wave", "0_0", 3), ("toy_wave", "1_0", 0)]  # fmt: skip
    assert len(os.listdir(tmp_path)) == 3, "no half-written file is left"
    remove_record(tmp_path, "toy", "0_0")
    remove_record(tmp_path, "toy", "0_0")
    assert len(read_records(tmp_path)) == 2


def test_files_that_are_not_records_are_left_out(tmp_path):
    write_record(tmp_path, _record())
    record_path(tmp_path, "torn", "0_0").write_bytes(b'{"model": "to')
    record_path(tmp_path, "other", "0_0").write_bytes(b'{"model": 5}')
    record_path(tmp_path, "folder", "0_0").mkdir()
    (tmp_path / "worker.log").write_bytes(b"x")
    assert [r.model for r in read_records(tmp_path)] == ["toy_wave"]
    assert read_records(tmp_path / "missing") == []


def test_an_untouched_record_is_stuck_until_it_is_touched(tmp_path):
    write_record(tmp_path, _record())
    path = record_path(tmp_path, "toy_wave", "0_0")
    written_s = path.stat().st_mtime
    os.utime(path, (written_s, written_s - SILENT_S - 1))
    assert [r.state for r in read_records(tmp_path)] == ["stuck"]
    touch_record(tmp_path, "toy_wave", "0_0")
    assert [r.state for r in read_records(tmp_path)] == ["ready"]
    remove_record(tmp_path, "toy_wave", "0_0")
    touch_record(tmp_path, "toy_wave", "0_0")
    assert read_records(tmp_path) == []
