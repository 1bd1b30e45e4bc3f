# SPDX-License-Identifier: Apache-2.0
"""The public model as Triton clients see it: generate, generate_stream, gRPC, bad input, abort, shared memory."""

from __future__ import annotations

import json
import queue
import socket
import threading

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.utils.shared_memory as shm

from tests.kit.load_generator import Plan, body, run_many, run_one, send
from tests.kit.server_calls import generate, generate_stream, health, metrics, wait_until_idle
from tests.kit.triton_server import RunningServer, wait_for
from triton_omni.backends.control import messages as msg

pytestmark = pytest.mark.triton


def test_generate_answers_with_exactly_one_response(toy: RunningServer) -> None:
    status, answer = generate(toy, text_input="hello there", max_tokens=4)
    assert status == 200
    assert answer["text_output"] == "w0 w1 w2 w3 "
    assert answer["event"]["type"] == "end"
    assert answer["event"]["finish_reason"] == "length"
    assert answer["event"]["usage"] == {"prompt_tokens": 2.0, "completion_tokens": 4.0}


def test_generate_stream_sends_pieces_and_one_end(toy: RunningServer) -> None:
    answers = generate_stream(toy, text_input="hi", stream=True, max_tokens=3)
    assert [a["event"]["type"] for a in answers] == ["text", "text", "text", "end"]
    assert [a["event"].get("index", 0) for a in answers[:3]] == [0, 1, 2]
    assert "".join(a.get("text_output", "") for a in answers) == "w0 w1 w2 "


@pytest.mark.parametrize("given", [{"text_input": "hi", "stages": '{"tokens": {"hold_after": 0}}'},
                                   {"request": json.dumps(body(5, tokens={"hold_after": 0}))}])  # fmt: skip
def test_a_killed_client_of_generate_stream_is_noticed_while_a_stage_is_silent(
    toy: RunningServer, given: dict[str, str]
) -> None:
    data = json.dumps({**given, "stream": True}).encode()
    head = f"POST /v2/models/toy/generate_stream HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", toy.http_port)) as client:
        client.sendall(head.encode() + data)
        wait_for(lambda: health(toy)["stages"]["tokens"]["live"] == 1, 10, "the request is in its stage")
    wait_until_idle(toy, timeout_s=10.0)  # its own deadline would be 120 s


def test_a_silent_stream_says_after_a_second_that_it_was_accepted(toy: RunningServer) -> None:
    slow = body(1, ("text",), tokens={"delay_s": 0.0, "hold_after": 0})
    responses: queue.SimpleQueue = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(toy.grpc) as client:
        client.start_stream(lambda result, error: responses.put(result))
        send(client, Plan(slow))
        event = json.loads(responses.get(timeout=10).as_numpy("event")[0])
        client.stop_stream(cancel_requests=True)
    assert event["type"] == "accepted" and event["request_id"]
    wait_until_idle(toy)


def test_streamed_pieces_joined_equal_the_whole(toy: RunningServer) -> None:
    _, whole = generate(toy, text_input="hi", max_tokens=20, modalities="text,audio")
    pieces = generate_stream(toy, text_input="hi", stream=True, max_tokens=20, modalities="text,audio")
    assert "".join(p.get("text_output", "") for p in pieces) == whole["text_output"]
    streamed = [x for p in pieces for x in p.get("audio", [])]
    assert len(streamed) == 20 * 2 * 240
    assert streamed == whole["audio"]


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({}, "request"),
        ({"stream": True}, "request"),
        ({"text_input": "x", "request": "{}"}, "request"),
        ({"text_input": "x", "foo": 1}, "foo"),
        ({"text_input": "x", "max_tokens": 0}, "sampling.max_tokens"),
        ({"text_input": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"text_input": "x", "temperature": 9.0}, "sampling.temperature"),
        ({"text_input": "x", "voice": "unknown"}, "speech.voice"),
        ({"text_input": "x", "language": "xx"}, "speech.language"),
        ({"text_input": "x", "modalities": "smell"}, "modalities"),
        ({"text_input": "x", "operation": "dance"}, "operation"),
        ({"text_input": " ", "operation": "speech"}, "input"),
        ({"text_input": "x", "stages": "{"}, "stages"),
        ({"text_input": "x", "id": "a" * 300}, "id"),
        ({"text_input": "x", "id": "a\nb"}, "id"),
        ({"request": "nope"}, "request"),
        ({"request": "[]"}, "request"),
        ({"request": '{"operation": "chat"}'}, "messages"),
        ({"request": '{"messages": [{"role": "king", "content": "x"}]}'}, "messages[0].role"),
        ({"request": '{"messages": [{"role": "user", "content": "x"}], "deadlines": {"total_s": -1}}'},
         "deadlines.total_s"),
        ({"request": '{"messages": [{"role": "user", "content": [{"type": "audio", "length": 9}]}]}'},
         "messages[0].content[0]"),
        ({"request": json.dumps({"messages": [{"role": "user", "content": "x"}], "stages": {"cellar": {}}})},
         "stages.cellar"),
        ({"request": json.dumps({"messages": [{"role": "user", "content": "x" * (1 << 20)}]})}, "request"),
    ],
)  # fmt: skip
def test_bad_input_names_the_field_before_any_stage_works(toy: RunningServer, sent: dict, field: str) -> None:
    before = metrics(toy).get('omni_stage_runs_opened_total{pipeline="toy",stage="tokens"}', 0)
    status, answer = generate(toy, **sent)
    assert status == 400
    assert answer["error"].startswith(f"[bad_request:{field}]"), answer
    assert metrics(toy).get('omni_stage_runs_opened_total{pipeline="toy",stage="tokens"}', 0) == before


def test_text_alone_opens_no_speech_stage(toy: RunningServer) -> None:
    generate(toy, text_input="x", modalities="text,audio", max_tokens=1)  # makes every counter exist
    before = metrics(toy)
    generate(toy, text_input="x", max_tokens=2)
    after = metrics(toy)
    opened = {s: f'omni_stage_runs_opened_total{{pipeline="toy",stage="{s}"}}' for s in ("tokens", "frames", "wave")}
    assert after[opened["tokens"]] == before[opened["tokens"]] + 1
    assert after[opened["frames"]] == before[opened["frames"]]
    assert after[opened["wave"]] == before[opened["wave"]]


def test_stages_can_be_called_directly(toy: RunningServer) -> None:
    words = generate_stream(toy, "toy_tokens", text_input="x", max_tokens=2)
    assert [w.get("text_output") for w in words] == ["w0 ", "w1 ", None]
    frames = generate_stream(toy, "toy_frames", text_input="one two", operation="speech")
    assert [len(f.get("frames", [])) for f in frames] == [16, 16, 0, 0]
    life = _call_wave(toy, np.zeros((3, 8), np.float32))
    assert life == [720, "stop"]


def _call_wave(toy: RunningServer, frames: np.ndarray) -> list:
    """Call the last stage with a frames tensor over gRPC; returns samples and the finish reason."""
    answers: queue.SimpleQueue = queue.SimpleQueue()
    seen: list = []
    with grpcclient.InferenceServerClient(toy.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        tensor = grpcclient.InferInput("frames", list(frames.shape), "FP32")
        tensor.set_data_from_numpy(frames)
        client.async_stream_infer("toy_wave", [tensor])
        while True:
            result, error = answers.get(timeout=20)
            assert error is None, error
            event = json.loads(result.as_numpy("event")[0])
            if event["type"] == "end":
                return [*seen, event["finish_reason"]]
            seen.append(result.as_numpy("audio").size)


def test_a_stage_failure_is_one_error_and_names_the_stage(toy: RunningServer) -> None:
    for stage in ("tokens", "frames", "wave"):
        life = run_one(toy.grpc, Plan(body(10, **{stage: {"fail_after": 3}})))
        assert life.ends == [f"error [stage_failed:{stage}] failed on request"]
    status, answer = generate(toy, text_input="x", stages='{"tokens": {"refuse": true}}')
    assert (status, answer["error"]) == (400, "[bad_request:stages.tokens.refuse] refused on request")


def test_abort_by_id_ends_once_under_the_final_outputs_name(toy: RunningServer) -> None:
    held = body(10, ("text", "audio"), wave={"hold_after": 2})
    lives: list = []
    clients = [
        threading.Thread(target=lambda: lives.append(run_one(toy.grpc, Plan(held, request_id="abort-me"))))
        for _ in range(3)
    ]
    for client in clients:
        client.start()
    wait_for(lambda: health(toy)["stages"]["wave"]["live"] == 3, 10, "three requests running")
    request = json.dumps({"operation": "abort", "target": "abort-me"})
    assert generate(toy, request=request)[0] == 400, "an abort without token needs the operator's key"
    _, answer = generate(toy, request=request, operator_key=toy.operator_key)
    assert answer["event"]["aborted"] == 3
    for client in clients:
        client.join(10)
    assert [life.ends for life in lives] == [["abort"]] * 3
    _, again = generate(toy, request=request, operator_key=toy.operator_key)
    assert again["event"]["aborted"] == 0
    wait_until_idle(toy)


def test_deadlines_name_their_place(toy: RunningServer) -> None:
    cases = [
        (body(5, ("text",), tokens={"hold_after": 0}), {"first_output_s": 0.3}, "first output of tokens"),
        (body(5, ("text",), tokens={"hold_after": 2}), {"stall_s": 0.3}, "stall of tokens"),
        (body(5, ("text",), tokens={"hold_after": 2}), {"total_s": 0.3, "stall_s": 0}, "total"),
        (body(5, ("audio",), frames={"hold_after": 1}), {"stall_s": 1.0}, "frames->wave"),
    ]
    for request, deadlines, place in cases:
        life = run_one(toy.grpc, Plan(request | {"deadlines": deadlines}, timeout_s=20))
        assert len(life.ends) == 1
        assert "deadline_exceeded" in life.ends[0]
        assert place in life.ends[0]
    slow = body(10, ("text",), tokens={"delay_s": 0.3}) | {"deadlines": {"stall_s": 2.0}}
    assert run_one(toy.grpc, Plan(slow)).ends == ["length"], "longer than stall_s in all, but never silent for it"


def test_shared_memory_regions_carry_requests_and_answers(toy: RunningServer) -> None:
    request = json.dumps(body(4, ("text",)) | {"stream": False}).encode()
    packed = len(request).to_bytes(4, "little") + request
    region_in = shm.create_shared_memory_region("in", "/omni_test_in", len(packed))
    region_out = shm.create_shared_memory_region("out", "/omni_test_out", 4096)
    answers: queue.SimpleQueue = queue.SimpleQueue()
    try:
        shm.set_shared_memory_region(region_in, [np.frombuffer(packed, np.uint8)])
        with grpcclient.InferenceServerClient(toy.grpc) as client:
            client.register_system_shared_memory("in", "/omni_test_in", len(packed))
            client.register_system_shared_memory("out", "/omni_test_out", 4096)
            client.start_stream(lambda result, error: answers.put((result, error)))
            given = grpcclient.InferInput("request", [1], "BYTES")
            given.set_shared_memory("in", len(packed))
            wanted = grpcclient.InferRequestedOutput("text_output")
            wanted.set_shared_memory("out", 4096)
            client.async_stream_infer("toy", [given], outputs=[wanted])
            _, error = answers.get(timeout=20)
            assert error is None, error
            text = shm.get_contents_as_numpy(region_out, np.object_, [1])[0]
            assert text == b"w0 w1 w2 w3 "
            client.unregister_system_shared_memory()
    finally:
        shm.destroy_shared_memory_region(region_in)
        shm.destroy_shared_memory_region(region_out)


def test_over_the_limit_is_refused_and_none_hangs(toy: RunningServer) -> None:
    plans = [Plan(body(3, ("text",), tokens={"delay_s": 0.2}), timeout_s=60) for _ in range(400)]
    ends = [life.ends[0] for life in run_many(toy.grpc, plans, 400)]
    assert ends.count("length") >= 320  # 64 running and 256 waiting at any time
    assert all(end == "length" or "too_busy:queue" in end for end in ends)
    assert len(ends) == 400
    wait_until_idle(toy)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        msg.encode(
            msg.OpenMessage(b"r" * 16, "forged", json.dumps(body(2)).encode(), upstream=("tokens",), direct=True)
        ),
        msg.encode(msg.OpenMessage(b"r" * 16, "forged", json.dumps(body(2)).encode(), "/tmp/mine.sock")),
    ],
)
def test_an_open_that_is_not_the_orchestrators_is_refused(toy: RunningServer, message: bytes) -> None:
    tensor = grpcclient.InferInput("open", [len(message)], "UINT8")
    tensor.set_data_from_numpy(np.frombuffer(message, np.uint8))
    before = health(toy)["stages"]["frames"]["restarts"]
    assert "[bad_request:open]" in refusal(toy, "toy_frames", tensor)
    assert health(toy)["stages"]["frames"]["restarts"] == before


def test_a_stage_that_only_consumes_refuses_a_bare_request(toy: RunningServer) -> None:
    request = grpcclient.InferInput("request", [1], "BYTES")
    request.set_data_from_numpy(np.array([json.dumps(body(2)).encode()], np.object_))
    assert "[bad_request:frames]" in refusal(toy, "toy_wave", request)


def refusal(toy: RunningServer, model: str, tensor: grpcclient.InferInput) -> str:
    """The error that a model answers one input with."""
    answers: queue.SimpleQueue = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(toy.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, [tensor])
        _, error = answers.get(timeout=20)
    return str(error)
