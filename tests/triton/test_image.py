# SPDX-License-Identifier: Apache-2.0
"""Images through a real server: the acceptance of the embedded model, and what clients see on the way."""

from __future__ import annotations

import base64
import io
import json
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from PIL import Image

from tests.kit.load_generator import body
from tests.kit.proxy_server import proxy_process
from tests.kit.server_calls import generate, health, wait_until_idle
from tests.kit.triton_server import REPO, TOY_REPOSITORY, RunningServer, running_server
from triton_omni.backends.tools.digits import data

pytestmark = [pytest.mark.triton, pytest.mark.models, pytest.mark.timeout(600)]

ANSWER_S = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server([REPO / "model_repository" / "image", TOY_REPOSITORY]) as running:
        yield running


@pytest.fixture(scope="module")
def reader() -> data.Reader:
    return data.held_out_reader()


class Stream:
    """One gRPC stream; several requests may be in flight on it."""

    def __init__(self, server: RunningServer) -> None:
        self._answers = queue.SimpleQueue[Any]()
        self._client = grpcclient.InferenceServerClient(server.grpc)
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def ask(self, request_id: str, prompt: str, **options: Any) -> None:
        self.send("image", request_id, {"operation": "image", "input": prompt, "stages": {"denoiser": options}})

    def send(self, model: str, request_id: str, request: dict[str, Any], **parameters: str) -> None:
        tensor = grpcclient.InferInput("request", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([json.dumps(request).encode()], object))
        self._client.async_stream_infer(model, [tensor], request_id=request_id, parameters=parameters or None)

    def next(self) -> tuple[dict[str, Any], Any]:
        """The next event but `accepted`, and the image if it carries one."""
        event = {"type": "accepted"}
        while event["type"] == "accepted":
            result, error = self._answers.get(timeout=ANSWER_S)
            assert error is None, error.message()
            event = json.loads(result.as_numpy("event")[0])
        return event, result.as_numpy("image") if event["type"] == "image" else None

    def until_end(self) -> list[tuple[dict[str, Any], Any]]:
        """All answers up to the next end."""
        answers = [self.next()]
        while answers[-1][0]["type"] != "end":
            answers.append(self.next())
        return answers

    def close(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


@pytest.fixture
def stream(server: RunningServer) -> Iterator[Stream]:
    opened = Stream(server)
    yield opened
    opened.close()


@pytest.mark.parametrize(("width", "height"), [(64, 64), (96, 64), (128, 128)])
def test_two_hundred_images_are_what_was_asked_for(
    stream: Stream, reader: data.Reader, width: int, height: int
) -> None:
    cases = data.evaluation_set(200)
    seen: dict[int, data.Reading] = {}
    for start in range(0, len(cases), 40):  # well within the public model's limits
        for number in range(start, start + 40):
            stream.ask(str(number), cases[number][0], width=width, height=height, seed=number)
        ends = 0
        while ends < 40:
            event, image = stream.next()
            ends += event["type"] == "end"
            if image is not None:
                assert image.shape == (height, width, 3)
                seen[int(event["request_id"])] = reader.read(image)
    assert len(seen) == len(cases)
    digits = np.mean([seen[i].digit == want.digit for i, (_, want) in enumerate(cases)])
    colors = np.mean([seen[i][1:] == want[1:] for i, (_, want) in enumerate(cases)])
    assert digits >= 0.95, f"digits {digits}"
    assert colors >= 0.98, f"colors {colors}"


def test_progress_previews_image_end(stream: Stream) -> None:
    stream.ask("a", "a red 7 on a yellow background", seed=1, partial_images=2)
    answers = stream.until_end()
    kinds = [event["type"] for event, _ in answers]
    assert kinds.count("image") == 3 and kinds.count("progress") == 12 and kinds[-1] == "end"
    assert [event["piece"].get("partial", False) for event, _ in answers if event["type"] == "image"] == [
        True,
        True,
        False,
    ]
    end = answers[-1][0]
    assert (end["output"], end["stage"], end["outcome"]) == ("image", "denoiser", "completed")
    assert end["usage"]["images"] == 1


def test_generate_answers_with_the_image_alone(server: RunningServer, reader: data.Reader) -> None:
    asked = {"stages": json.dumps({"denoiser": {"seed": 3}}), "operation": "image"}
    status, answer = generate(server, "image", text_input="a red 7 on a yellow background", **asked)
    assert status == 200, answer
    assert answer["event"]["type"] == "end"
    image = np.array(answer["image"], np.uint8).reshape(64, 64, 3)
    assert reader.read(image) == data.Reading(7, "red", "yellow")


def test_a_chat_draws(server: RunningServer) -> None:
    """Through the SDK: without modalities a pipeline makes what it can; choices have seeds of their own."""
    messages: Any = [{"role": "user", "content": data.evaluation_set(1)[0][0]}]
    with proxy_process("--triton", server.grpc) as proxy, proxy.sdk() as sdk:
        answer = sdk.chat.completions.create(
            model="image", messages=messages, seed=5, n=2, extra_body={"size": "96x64"}
        )  # fmt: skip
        images = [image_at(choice.message.images[0]["image_url"]["url"]) for choice in answer.choices]  # type: ignore[attr-defined]
        assert [p.shape for p in images] == [(64, 96, 3)] * 2 and not np.array_equal(*images)
        with sdk.chat.completions.stream(
            model="image", messages=messages, seed=6, modalities=["image"],  # type: ignore[list-item]
            extra_body={"size": "96x64"},
        ) as stream:  # fmt: skip
            stream.until_done()
            (streamed,) = stream.get_final_completion().choices[0].message.images  # type: ignore[attr-defined]
    assert np.array_equal(image_at(streamed["image_url"]["url"]), images[1])


def image_at(url: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))


def test_what_cannot_be_drawn_is_refused_with_the_field(server: RunningServer) -> None:
    for options, field in (({"width": 70}, "width"), ({"steps": 1}, "steps"), ({"n": 11}, "n")):
        request = {"operation": "image", "input": "a 7", "stages": {"denoiser": options}}
        status, answer = generate(server, "image", request=json.dumps(request))
        assert status == 400
        assert f"[bad_request:stages.denoiser.{field}]" in answer["error"]
    request = {"operation": "image", "input": "red " * 1000}
    status, answer = generate(server, "image", request=json.dumps(request))
    assert status == 400 and "must be at most 512 tokens" in answer["error"]


def test_a_client_that_leaves_frees_its_place(server: RunningServer) -> None:
    leaving = Stream(server)
    leaving.ask("gone", "a red 7", width=512, height=512, steps=200)
    assert leaving.next()[0]["type"] == "progress"
    leaving.close()
    wait_until_idle(server, "image", timeout_s=10.0)


def test_a_flood_of_one_pipeline_leaves_another_alone(server: RunningServer, stream: Stream) -> None:
    flood = Stream(server)
    held = 64 + 256  # the toy's live limit and its queue
    for _ in range(held + 40):
        flood.send("toy", "flood", body(2, ("text",), tokens={"hold_after": 0}))
    for _ in range(40):
        with pytest.raises(AssertionError, match="too_busy:queue"):
            flood.next()
    stream.ask("one", "a red 7 on a yellow background")
    assert stream.until_end()[-1][0]["outcome"] == "completed"
    assert (health(server)["live"], health(server)["queued"]) == (64, 256), "the flood still stands"
    flood.send("toy", "", {"operation": "abort", "target": "flood"}, operator_key=server.operator_key)
    ends = [flood.next()[0] for _ in range(held + 1)]
    assert sum(end["outcome"] == "cancelled" for end in ends) == held
    flood.close()
    wait_until_idle(server, timeout_s=10)
