# SPDX-License-Identifier: Apache-2.0
"""What a server logs of failed requests: once each, as JSON where asked for, and nothing that clients sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.load_generator import Plan, body, run_one
from tests.kit.server_calls import wait_until_idle, wait_until_restarted
from tests.kit.triton_server import TOY_REPOSITORY, running_server

pytestmark = pytest.mark.triton
SECRET = "kumquat"
BEGIN = '{"time": '


def failing(stage: str, how: str) -> dict:
    """A spoken request that one stage fails."""
    request = body(5, ("text", "audio"), **{stage: {how: 2}})
    request["messages"][0]["content"] = SECRET
    return request


def json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Our lines of a log; tritonserver writes a line of its own in pieces, so ours may stand in the midst of it."""
    for line in text.splitlines():
        if BEGIN in line:
            yield json.JSONDecoder().raw_decode(line[line.index(BEGIN) :])[0]


def test_a_failed_request_is_one_json_line() -> None:
    with running_server([TOY_REPOSITORY], variables={"TRITON_OMNI_LOG_FORMAT": "json"}) as server:
        for stage in ("tokens", "frames", "wave"):
            run_one(server.grpc, Plan(failing(stage, "fail_after"), request_id=f"failed-{stage}"))
        run_one(server.grpc, Plan(failing("frames", "raise_after"), request_id="raised"))
        wait_until_restarted(server, "frames", 0)
        run_one(server.grpc, Plan(body(2, ("text",), tokens={"fail_after": 1}), "toy_tokens", "direct"))
        run_one(server.grpc, Plan(body(2), request_id="good"))
        run_one(server.grpc, Plan(body(2) | {"modalities": ["smell"]}, request_id="refused"))
        wait_until_idle(server, timeout_s=10)
        text = server.log.read_text()
    assert SECRET not in text
    lines = list(json_objects(text))
    ends = {line["request_id"]: line for line in lines if "code" in line}
    assert len(ends) == sum("code" in line for line in lines), "one line per failure"
    assert set(ends) == {"failed-tokens", "failed-frames", "failed-wave", "raised", "direct"}
    for stage in ("tokens", "frames", "wave"):
        end = ends[f"failed-{stage}"]
        assert (end["code"], end["where"], end["pipeline"], end["level"]) == ("stage_failed", stage, "toy", "warning")
    assert ends["direct"]["stage"] == "tokens"
    assert not any(f"failed-{stage}" in line.get("exception", "") for line in lines for stage in ("tokens", "wave"))
    [bug] = [line for line in lines if "exception" in line]
    assert (bug["stage"], bug["level"]) == ("frames", "error")
    mentions = [line for line in lines if "failed-wave" in line["message"]]
    assert len(mentions) == 1, mentions
    assert not [line for line in lines if "good" in line["message"] or "refused" in line["message"]]
