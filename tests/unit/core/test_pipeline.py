# SPDX-License-Identifier: Apache-2.0
"""Pipeline graphs: what is needed for what, in which order, and graphs that make no sense."""

from __future__ import annotations

import itertools

import pytest

from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Message, Part, SpeechParams
from triton_omni.backends.core.pipeline import (
    Edge,
    EngineContext,
    Operation,
    Output,
    Pipeline,
    Stage,
    no_environment,
    whole_chunk,
)


def _no_engine(context):
    raise NotImplementedError


def stages(*names, **media):
    return tuple(Stage(name, _no_engine, media=media.get(name, "")) for name in names)


CHAT = Pipeline(
    "chat",
    stages("transcriber", "thinker", "talker", "voice", transcriber="audio"),
    (Edge("transcriber", "thinker"), Edge("thinker", "talker"), Edge("talker", "voice")),
    (Output("text", "thinker"), Output("audio", "voice")),
    (Operation("chat", "thinker", ("text", "audio")), Operation("speech", "talker", ("audio",))),
)


def ask(operation="chat", modalities=(), content="hi"):
    return GenerateRequest(operation, (Message("user", content),), modalities=modalities)


@pytest.mark.parametrize(
    ("request_", "needed"),
    [
        (ask(modalities=("text",)), {"thinker"}),
        (ask(modalities=("audio",)), {"thinker", "talker", "voice"}),
        (ask(), {"thinker", "talker", "voice"}),
        (ask("speech"), {"talker", "voice"}),
        (ask(content=(Part("audio", length=1),), modalities=("text",)), {"transcriber", "thinker"}),
        (ask(content=(Part("image", shape=(1,)),), modalities=("text",)), {"thinker"}),
    ],
)
def test_only_stages_on_the_way_are_needed(request_, needed):
    assert CHAT.plan(request_).needed == needed


@pytest.mark.parametrize(
    ("request_", "field", "words"),
    [
        (ask("sing"), "operation", "this pipeline has: chat, speech"),
        (ask(modalities=("smell",)), "modalities", "makes: audio, text"),
        (ask("speech", ("text",)), "modalities", "operation 'speech' makes: audio"),
        (ask(modalities=("text", "")), "modalities", "unknown modality ''"),
    ],
)
def test_what_the_pipeline_cannot_do_is_named(request_, field, words):
    with pytest.raises(BadRequest, match=words) as caught:
        CHAT.plan(request_)
    assert caught.value.where == field


def test_consumers_come_first_in_every_subset_of_every_graph():
    names = "abcd"
    possible = list(itertools.combinations(names, 2))  # edges go from earlier to later letters: no cycle
    for chosen in itertools.product((False, True), repeat=len(possible)):
        edges = tuple(Edge(*pair) for pair, yes in zip(possible, chosen, strict=True) if yes)
        pipeline = Pipeline("p", stages(*names), edges, (), ())
        order = pipeline.consumers_first(frozenset(names))
        assert sorted(order) == list(names)
        assert all(order.index(e.target) < order.index(e.source) for e in edges)


def test_graph_lookups():
    assert CHAT.upstream("thinker", ("thinker", "talker")) == frozenset()
    assert CHAT.upstream("thinker", ("transcriber", "thinker")) == {"transcriber"}
    assert CHAT.downstream("thinker", ("transcriber", "talker")) == {"talker"}
    assert CHAT.model("voice") == "chat_voice"
    assert CHAT.stage("transcriber").media == "audio"
    assert CHAT.output("audio").stage == "voice"
    assert CHAT.check(ask()) is None
    assert no_environment(EngineContext("chat", "transcriber", {})) == {}
    chunk = Chunk(b"r", "e")
    assert whole_chunk(chunk) is chunk


@pytest.mark.parametrize(
    "change",
    [
        {"stages": stages("a", "a")},
        {"edges": (Edge("a", "nowhere"),)},
        {"edges": (Edge("nowhere", "a"),)},
        {"edges": (Edge("a", "b"), Edge("b", "a"))},
        {"edges": (Edge("a", "a"),)},
        {"outputs": (Output("text", "nowhere"),)},
        {"operations": (Operation("chat", "nowhere", ()),)},
        {"operations": (Operation("chat", "a", ("smell",)),)},
    ],
)
def test_a_graph_that_makes_no_sense_is_refused_at_once(change):
    parts = {"stages": stages("a", "b"), "edges": (), "outputs": (Output("text", "b"),), "operations": ()} | change
    with pytest.raises(AssertionError, match="p:"):
        Pipeline("p", **parts)


def test_a_stage_may_refuse_what_no_check_knows():
    """Options of its own, and typed parameters that it takes and has no check for."""

    def check(request, engine):
        raise NotImplementedError

    stages = (
        Stage("voice", _no_engine, params=("speech",)),
        Stage("known", _no_engine, params=("speech",), check=check),
    )
    pipeline = Pipeline("p", stages, (), (), ())
    for request, refusing in (
        (GenerateRequest(), []),
        (GenerateRequest(speech=SpeechParams(voice="bob")), ["voice"]),
        (GenerateRequest(stages={"known": {"x": 1}}), ["known"]),
    ):
        assert [s.name for s in stages if pipeline.may_refuse(s.name, request)] == refusing
