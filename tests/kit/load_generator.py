# SPDX-License-Identifier: Apache-2.0
"""A load of many gRPC streams against a running server; counts every end."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.kit.triton_server import OPERATOR_KEYS


@dataclass
class Life:
    """What a client saw of one request.

    final  (output, stage) that the end came under; outcome, pieces (its index), usage and timings are the end's too
    late   responses that came after the end
    """

    counts: Counter[str] = field(default_factory=Counter)
    ends: list[str] = field(default_factory=list)
    final: tuple[str, str] | None = None
    order_errors: int = 0
    late: int = 0
    first_s: float | None = None
    seconds: float = 0.0
    words: int = 0
    samples: int = 0
    outcome: str = ""
    pieces: int = 0
    usage: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)


@dataclass
class Plan:
    """One request to make.

    body            as JSON; bytes are sent as they are
    cancel_after    leave after so many responses
    cancel_after_s  leave after so many seconds, whatever came
    by_abort        leave by an abort of the id instead of closing the stream
    reading         called by the stream's reader before it takes a response; while it blocks, gRPC is not read
    key             the operator's key, for an abort without the request's token
    before          called just before the request is made
    """

    body: dict[str, Any] | bytes
    model: str = "toy"
    request_id: str = ""
    cancel_after: int | None = None
    cancel_after_s: float | None = None
    by_abort: bool = False
    timeout_s: float = 120.0
    reading: Callable[[], object] = lambda: None
    before: Callable[[], None] | None = None
    label: str = ""
    key: str = ""

    def leaves(self, life: Life, since_start_s: float) -> bool:
        """True if it is time to leave."""
        enough = self.cancel_after is not None and sum(life.counts.values()) >= self.cancel_after
        return enough or (self.cancel_after_s is not None and since_start_s >= self.cancel_after_s)


def run_one(url: str, plan: Plan) -> Life:
    """Make one request on a stream of its own; returns when it ended, was cancelled or timed out."""
    life, responses = Life(), queue.SimpleQueue[Any]()
    client = grpcclient.InferenceServerClient(url)
    started = time.monotonic()
    try:
        client.start_stream(lambda result, error: (plan.reading(), responses.put((result, error))))
        send(client, plan)
        _collect(life, plan, responses, started, url)
    except InferenceServerException as error:
        life.ends.append(f"lost {error.message()}")
    finally:
        # A stream that has ended is closed, not cancelled: docs/triton-versions.md says what that costs the server
        client.stop_stream(cancel_requests=life.ends in ([], ["cancelled here"], ["timeout"]))
        client.close()
    life.seconds = time.monotonic() - started
    while life.ends != ["cancelled here"] and not responses.empty():
        life.late += responses.get()[1] is None
    return life


def send(client: grpcclient.InferenceServerClient, plan: Plan) -> None:
    """Make a request on a client's started stream."""
    tensor = grpcclient.InferInput("request", [1], "BYTES")
    sent = plan.body if isinstance(plan.body, bytes) else json.dumps(plan.body).encode()
    tensor.set_data_from_numpy(np.array([sent], object))
    client.async_stream_infer(
        plan.model, [tensor], request_id=plan.request_id, enable_empty_final_response=True,
        parameters={"operator_key": plan.key} if plan.key else None,
    )  # fmt: skip


def abort(url: str, model: str, request_id: str) -> None:
    """End every request of this id, with the key of a server of this process; unknown and ended ids are fine."""
    plan = Plan({"operation": "abort", "target": request_id}, model, timeout_s=30, key=OPERATOR_KEYS[url])
    answer = run_one(url, plan)
    assert len(answer.ends) == 1, f"the answer to an abort ended so: {answer.ends}"


def _collect(life: Life, plan: Plan, responses: queue.SimpleQueue[Any], started: float, url: str) -> None:
    """Take responses until the last one, or until the plan says to leave."""
    leaving = plan.cancel_after is not None or plan.cancel_after_s is not None
    while True:
        since_s = time.monotonic() - started
        due_s = plan.timeout_s if not leaving or plan.cancel_after_s is None else plan.cancel_after_s
        try:
            result, error = responses.get(timeout=max(due_s - since_s, 0.001))
        except queue.Empty:
            if not leaving or plan.cancel_after_s is None:
                life.ends.append("timeout")
                return
        else:
            if error is not None:
                life.ends.append(f"error {error.message()}")
                return
            if _take(life, result, started):
                return
        if leaving and plan.leaves(life, time.monotonic() - started):
            if not plan.by_abort:
                life.ends.append("cancelled here")
                return
            leaving = False
            abort(url, plan.model, plan.request_id)


def _take(life: Life, result: Any, started: float) -> bool:
    """Note one response; True if it is the last."""
    raw, text, audio = (result.as_numpy(name) for name in ("event", "text_output", "audio"))
    if raw is not None:
        event = json.loads(raw[0])
        if event["type"] == "accepted":  # only says that the client is still served
            return False
        life.first_s = life.first_s or time.monotonic() - started
        life.words += 0 if text is None else len(text[0].split())
        life.samples += 0 if audio is None else audio.size
        if event["type"] == "end":
            life.ends.append(event["finish_reason"])
            life.final = (event.get("output", ""), event.get("stage", ""))
            life.outcome, life.pieces = event["outcome"], event.get("index", 0)
            life.usage, life.timings = event.get("usage", {}), event.get("timings", {})
        elif event["type"] != "progress":
            life.order_errors += event.get("index", 0) != life.counts[event["type"]]
            life.counts[event["type"]] += 1
    return result.get_response().parameters["triton_final_response"].bool_param


def run_many(url: str, plans: list[Plan], streams: int) -> list[Life]:
    """Run all plans, `streams` at a time."""
    todo, lives, lock = iter(enumerate(plans)), {}, threading.Lock()

    def work() -> None:
        while True:
            with lock:
                item = next(todo, None)
            if item is None:
                return
            if item[1].before is not None:
                item[1].before()
            lives[item[0]] = run_one(url, item[1])

    threads = [threading.Thread(target=work) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [lives[i] for i in range(len(plans))]


def body(count: int, modalities: tuple[str, ...] = ("text", "audio"), **stages: dict[str, Any]) -> dict[str, Any]:
    """A chat request of the toy pipeline."""
    return {
        "messages": [{"role": "user", "content": "go"}],
        "modalities": list(modalities),
        "sampling": {"max_tokens": count},
        "stages": stages,
    }
