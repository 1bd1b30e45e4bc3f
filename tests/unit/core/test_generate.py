# SPDX-License-Identifier: Apache-2.0
"""The request's JSON: bad input names its field, hostile input is refused in words."""

from __future__ import annotations

import json

import pytest

from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import (
    GenerateRequest,
    ImageParams,
    Message,
    Part,
    Sampling,
    SpeechParams,
    TranscriptionParams,
    decode_request,
    encode_request,
)
from triton_omni.backends.core.ids import RUN_ID_BYTES, new_request_id, new_run_id

BAD = {
    "messages[0].role": {"messages": [{"role": "robot"}]},
    "messages[1].content": {"messages": [{"role": "user"}, {"role": "user", "content": 5}]},
    "messages[0].content[0].type": {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
    "messages[0].content[0].offset": {"messages": [{"role": "user", "content": [{"type": "audio", "offset": -1}]}]},
    "sampling.temperature": {"sampling": {"temperature": 3}},
    "sampling.top_p": {"sampling": {"top_p": 0}},
    "sampling.max_tokens": {"sampling": {"max_tokens": 0}},
    "sampling.seed": {"sampling": {"seed": 1.5}},
    "sampling.stop[1]": {"sampling": {"stop": ["a", 1]}},
    "speech.speed": {"speech": {"speed": 100}},
    "priority": {"priority": 101},
    "stream": {"stream": "yes"},
    "modalities": {"modalities": "text"},
    "stages[...]": {"stages": {"tokens": 5}},
    "deadlines.total_s": {"deadlines": {"total_s": -1}},
    "deadlines.stall_s": {"deadlines": {"stall_s": "soon"}},
    "temprature": {"temprature": 1},
}


@pytest.mark.parametrize(("field", "value"), BAD.items(), ids=list(BAD))
def test_a_bad_field_is_named(field, value):
    with pytest.raises(BadRequest) as caught:
        decode_request(json.dumps(value).encode())
    assert caught.value.where == field
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"null", b"[]", b'"text"', b"5", b'{"input": "\xff"}',
     b'{"speech": {"speed": NaN}}', b'{"speech": {"speed": Infinity}}',
     b'{"deadlines": {"total_s": 1e999}}', b'{"deadlines": {"total_s": NaN}}', b'{"sampling": {"seed": 1e400}}',
     b'{"sampling": {"seed": 99999999999999999999999999}}', b'{"stages": ' + b'{"a":' * 100_000,
     b'{"stages": {"a": {"b": ' + b"[" * 20_000 + b"]" * 20_000 + b"}}}", b'{"tools": [' + b'{"a":' * 5_000,
     b'{"input": "a"} trailing', b'{"input": "\\ud800"}'],
    ids=lambda data: data[:30].decode("latin-1"),
)  # fmt: skip
def test_hostile_json_is_a_bad_request(data):
    with pytest.raises(BadRequest) as caught:
        decode_request(data)
    assert len(caught.value.line()) < 3_000


def test_a_typo_inside_a_group_is_named():
    with pytest.raises(BadRequest, match="top_pp"):
        decode_request(b'{"sampling": {"top_pp": 1}}')


@pytest.mark.parametrize("text", ["", "\x00", "🎻" * 1000, "'; DROP TABLE", "a\nb\u2028c", '"}'])
def test_any_text_passes_unchanged(text):
    request = GenerateRequest("speech", (Message("user", text),), text)
    assert decode_request(encode_request(request)) == request


def test_round_trip_of_everything():
    parts = (Part("audio", offset=1, length=2, sample_rate=16_000), Part("image", shape=(2, 2, 3)))
    request = GenerateRequest(
        messages=(Message("user", parts),),
        modalities=("text", "audio"),
        sampling=Sampling(max_tokens=3, logit_bias={"5": -1.0}, json_schema={"type": "object"}),
        image=ImageParams(width=64),
        speech=SpeechParams(voice="v", speed=1.5),
        transcription=TranscriptionParams(word_timestamps=True),
        stages={"tokens": {"delay_s": 0.5}},
        stream=False,
    )  # fmt: skip
    assert decode_request(encode_request(request)) == request
    assert request.media() == {"audio", "image"}
    assert Message("user", "hi").parts == (Part("text", "hi"),)


def test_deadlines_made_in_code_are_checked_too():
    from triton_omni.backends.core.generate import Deadlines

    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="queue_s must be a finite"):
            Deadlines(queue_s=bad)
    assert Deadlines(total_s=0.0).total_s == 0.0


def test_ids_are_unique_and_printable():
    runs = {new_run_id() for _ in range(1_000)}
    assert len(runs) == 1_000
    assert {len(run) for run in runs} == {RUN_ID_BYTES}
    assert len({new_request_id("x") for _ in range(1_000)}) == 1_000
    assert new_request_id("x").startswith("x-")
    assert new_request_id().isprintable()


def test_a_default_that_is_given_is_no_parameter():
    """msgspec compares numbers by identity: every chat through the proxy was refused for `image.lora_scale`."""
    one = float("1.0")
    request = GenerateRequest(image=ImageParams(lora_scale=one), speech=SpeechParams(speed=one))
    assert decode_request(encode_request(request)).params() == request.params() == ()
    assert GenerateRequest(image=ImageParams(lora_scale=2 * one, n=2)).params() == ("image.n", "image.lora_scale")
