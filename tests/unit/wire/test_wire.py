# SPDX-License-Identifier: Apache-2.0
"""The contract with clients: events, the short form, and that every odd parameter is named."""

from __future__ import annotations

import json

import msgspec
import pytest

from triton_omni.backends import wire
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.wire import (
    WIRE_VERSION,
    AudioPiece,
    Event,
    GenerateRequest,
    ImagePiece,
    decode_event,
    decode_request,
    encode_event,
    encode_request,
    short_form,
    with_stream,
)


def test_events_round_trip_and_leave_out_what_is_empty():
    event = Event("audio", "r", "audio", "wave", 3, AudioPiece(24_000, 12), usage={"n": 1.0}, timings={"total_s": 0.5})
    assert decode_event(encode_event(event)) == event
    assert json.loads(encode_event(Event("end"))) == {"type": "end"}
    for bad in (b"", b"{}", b'{"type": "smell"}', b'{"type": "text", "index": "x"}'):
        with pytest.raises(msgspec.MsgspecError):
            decode_event(bad)


def test_a_newer_server_may_send_more_fields():
    assert decode_event(b'{"type": "text", "mood": "blue"}') == Event("text")


def test_the_short_form_is_a_chat():
    request = short_form("hi", {"max_tokens": 5, "modalities": "text,audio", "stop": "a,b", "deadline_s": 2}, True)
    assert request.messages[0].content == "hi"
    assert request.modalities == ("text", "audio")
    assert request.sampling.max_tokens == 5
    assert request.sampling.stop == ("a", "b")
    assert request.deadlines.total_s == 2.0
    assert request.stream


def test_the_short_form_of_other_operations_is_their_input():
    request = short_form("say it", {"operation": "speech", "speed": "1.5", "stages": '{"wave": {"burst": 2}}'}, False)
    assert request.input == "say it"
    assert request.messages == ()
    assert request.speech.speed == 1.5
    assert request.stages == {"wave": {"burst": 2}}
    assert not request.stream
    assert short_form("", {"operation": "abort", "target": "req-1"}, False).target == "req-1"


def test_tritons_own_parameters_are_not_ours():
    assert short_form("x", {"id": "7", "triton_enable_empty_final_response": True, "binary_data_output": False}, True)


ODD = [
    ("temprature", 1, "known: operation"),
    ("stream", True, "is an input tensor"),
    ("max_tokens", "many", "must be int"),
    ("max_tokens", 1.5, "must be int"),
    ("max_tokens", True, "must be int"),
    ("max_tokens", None, "must be int"),
    ("max_tokens", float("inf"), "must be int"),
    ("max_tokens", float("nan"), "must be int"),
    ("seed", "9" * 5_000, "must be int"),
    ("temperature", "warm", "must be float"),
    ("temperature", "nan", "must be float"),
    ("temperature", float("inf"), "must be float"),
    ("temperature", True, "must be float"),
    ("deadline_s", "nan", "must be float"),
    ("deadline_s", "-inf", "must be float"),
    ("speed", [], "must be float"),
    ("stages", "{", "must be dict"),
    ("stages", "[]", "must be dict"),
    ("stages", "5", "must be dict"),
    ("stages", '{"a":' * 50_000, "must be dict"),
]


@pytest.mark.parametrize(("key", "value", "words"), ODD)
def test_an_odd_parameter_is_named(key, value, words):
    with pytest.raises(BadRequest, match=words) as caught:
        short_form("x", {key: value}, True)
    assert caught.value.where == key
    assert len(caught.value.line()) < 3_000


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("max_tokens", 0, "sampling.max_tokens"),
        ("temperature", 9, "sampling.temperature"),
        ("deadline_s", -1, "deadlines.total_s"),
        ("speed", 50, "speech.speed"),
        ("priority", 1_000, "priority"),
        ("stages", '{"a": 5}', "stages[...]"),
    ],
)
def test_a_value_out_of_range_names_its_field(key, value, field):
    with pytest.raises(BadRequest) as caught:
        short_form("x", {key: value}, True)
    assert caught.value.where == field


def test_every_parameter_of_the_short_form_reaches_its_place():
    samples = {str: "x", list: "a", int: 1, float: 1.0, dict: "{}"}
    request_parts = {"operation": "chat"}
    for key, (place, kind) in wire.SHORT_FORM.items():
        request = short_form("x", {key: request_parts.get(key, samples[kind])}, True)
        value = msgspec.to_builtins(request)
        for part in place.split("."):
            value = value.get(part, wire) if isinstance(value, dict) else value
        if key not in ("operation", "speed", "stages"):  # these are the defaults, which are left out
            assert value is not wire, key


def test_exported_names_exist():
    assert all(hasattr(wire, name) for name in wire.__all__)


def test_with_stream_changes_nothing_else():
    request = short_form("x", {"seed": 3}, True)
    assert with_stream(with_stream(request, False), True) == request


def test_a_request_of_another_wire_version_is_refused_by_name():
    assert decode_request(encode_request(GenerateRequest(version=WIRE_VERSION))).version == WIRE_VERSION
    with pytest.raises(BadRequest, match=rf"wire version must be {WIRE_VERSION} \(got 2\)") as caught:
        decode_request(b'{"version": 2}')
    assert caught.value.where == "version"


def test_a_first_piece_has_its_index():
    assert json.loads(encode_event(Event("image", index=0, piece=ImagePiece())))["index"] == 0
    assert json.loads(encode_event(Event("image", index=0, piece=ImagePiece())))["piece"]["index"] == 0
    assert "index" not in json.loads(encode_event(Event("progress")))
