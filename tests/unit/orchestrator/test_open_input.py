# SPDX-License-Identifier: Apache-2.0
"""Text that a client adds to its request while that runs: on its way to the entry stage, refused, bounded, ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.orchestrator_harness import Client, Scene, scene
from triton_omni.backends.control.messages import OpenMessage
from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.errors import BadRequest, DeadlineExceeded, NotFound, OmniError, TooBusy
from triton_omni.backends.core.generate import Deadlines, GenerateRequest, decode_request
from triton_omni.backends.core.outputs import TextPiece
from triton_omni.backends.core.pipeline import CLIENT_EDGE
from triton_omni.backends.core.responses import Event
from triton_omni.backends.orchestrator.input_feed import MAX_WAITING_CHARS
from triton_omni.backends.pipelines.toy import pipeline as toy

MAX_BYTES = 1 << 20


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Scene]:
    with scene(tmp_path, toy.PIPELINE, max_request_bytes=MAX_BYTES) as made:
        yield made
        made.check_empty()


def speech(text: str = "", **more: object) -> GenerateRequest:
    return GenerateRequest("speech", input=text, open_input=True, **more)  # type: ignore[arg-type]


def accepted(client: Client) -> str:
    """The token of the first event."""
    first: Event = client.pieces[0].event
    assert first.type == "accepted" and first.token
    return first.token


def append(scene: Scene, token: str, text: str = "", ends: bool = False) -> OmniError | None:
    """Ask for an append; its error."""
    answer = scene.ask(GenerateRequest("append", input=text, token=token, ends_input=ends), "more")
    assert (answer.ended is None) == (answer.failed is not None)
    return answer.failed


def open_runs(scene: Scene) -> OpenMessage:
    scene.accept()
    return scene.accept()


def taken(scene: Scene) -> list[tuple[str, bool]]:
    """What the entry stage was sent, acknowledged."""
    frames = scene.stages["frames"]
    frames.read()
    chunks = [item for item in frames.got if isinstance(item, Chunk) and item.edge == CLIENT_EDGE]
    frames.got[:] = [item for item in frames.got if item not in chunks]
    assert frames.link is not None
    texts: list[tuple[str, bool]] = []
    for chunk in chunks:
        piece = chunk.piece_of(TextPiece)
        texts.append((piece.text if piece is not None else "", chunk.last))
        frames.link.release(chunk)
    scene.turn()
    return texts


def end(scene: Scene, run: bytes) -> None:
    for name in ("frames", "wave"):
        scene.finish(name, run)


def test_text_goes_to_the_entry_stage_as_it_comes(stage: Scene) -> None:
    client = stage.ask(speech("Hello "))
    token = accepted(client)
    message = open_runs(stage)
    assert message.upstream == (CLIENT_EDGE,)
    assert decode_request(message.request).input == "", "the stage takes all text from its edge"
    assert taken(stage) == [("Hello ", False)]
    assert append(stage, token, "there") is None
    assert taken(stage) == [("there", False)]
    assert append(stage, token, ", you.", ends=True) is None
    assert taken(stage) == [(", you.", True)]
    end(stage, message.run)
    assert client.ended is not None and client.ended.event.outcome == "completed"


def test_text_before_the_stage_is_open_waits_and_goes_as_one(stage: Scene) -> None:
    client = stage.ask(speech())
    token = accepted(client)
    for text in ("a ", "b ", "c"):
        assert append(stage, token, text) is None
    assert append(stage, token, ends=True) is None
    message = open_runs(stage)
    assert taken(stage) == [("a b c", True)]
    end(stage, message.run)


def test_input_that_ends_at_once_is_one_last_chunk(stage: Scene) -> None:
    client = stage.ask(speech("All of it.", ends_input=True))
    message = open_runs(stage)
    assert taken(stage) == [("All of it.", True)]
    error = append(stage, accepted(client), "more")
    assert isinstance(error, BadRequest) and error.where == "ends_input"
    end(stage, message.run)


def test_what_cannot_be_taken_is_refused_by_name(stage: Scene) -> None:
    client = stage.ask(speech())
    token = accepted(client)
    for wrong, kind in (("", BadRequest), ("0" * 16, NotFound), ("é", NotFound)):
        error = append(stage, wrong, "x")
        assert type(error) is kind and error.where == "token"
    assert append(stage, token, "x" * MAX_WAITING_CHARS) is None
    error = append(stage, token, "y")
    assert isinstance(error, TooBusy) and error.retry_after_s
    message = open_runs(stage)
    assert taken(stage) == [("x" * MAX_WAITING_CHARS, False)], "what was refused is not kept"
    error = append(stage, token, "z" * MAX_BYTES)
    assert isinstance(error, BadRequest) and error.where == "input" and "at most" in error.message
    assert append(stage, token, "y", ends=True) is None
    assert taken(stage) == [("y", True)]
    end(stage, message.run)
    assert isinstance(append(stage, token, "late"), NotFound)


@pytest.mark.parametrize(
    ("request_", "field"),
    [(speech("x", stream=False), "stream"), (GenerateRequest("completion", input="x", open_input=True),
      "open_input")],
)  # fmt: skip
def test_only_operations_that_stream_take_streams(stage: Scene, request_: GenerateRequest, field: str) -> None:
    client = stage.ask(request_)
    assert isinstance(client.failed, BadRequest) and client.failed.where == field and not client.pieces


def test_a_request_whose_input_came_whole_takes_no_more(stage: Scene) -> None:
    client = stage.ask(GenerateRequest("speech", input="x"))
    stage.pass_time(1.1)
    error = append(stage, accepted(client), "more")
    assert isinstance(error, BadRequest) and error.where == "token"
    message = open_runs(stage)
    assert message.upstream == ()
    end(stage, message.run)


def test_a_client_that_says_nothing_more_is_ended_and_one_that_does_is_not(stage: Scene) -> None:
    client = stage.ask(speech("x ", deadlines=Deadlines(stall_s=5, first_output_s=1)))
    token = accepted(client)
    message = open_runs(stage)
    assert taken(stage) == [("x ", False)]
    for _ in range(3):
        stage.pass_time(4)
        assert append(stage, token, "y ") is None
        assert client.failed is None
    taken(stage)
    stage.pass_time(5.5)
    assert isinstance(client.failed, DeadlineExceeded) and client.failed.where == "input"
    end(stage, message.run)


def test_a_client_that_leaves_ends_the_runs(stage: Scene) -> None:
    client = stage.ask(speech("x "))
    message = open_runs(stage)
    client.gone()
    stage.turn()
    assert stage.stages["frames"].stops == [message.run]
    assert isinstance(append(stage, accepted(client), "y"), NotFound)
    end(stage, message.run)


def test_text_for_a_worker_that_died_is_dropped(stage: Scene) -> None:
    client = stage.ask(speech("x "))
    message = open_runs(stage)
    stage.fail("frames", message.run, OmniError("dead"), worker_died=True)
    assert client.failed is not None
    stage.finish("wave", message.run)
    assert not stage.orchestrator._feeding
