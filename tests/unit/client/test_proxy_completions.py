# SPDX-License-Identifier: Apache-2.0
"""/v1/completions and /v1/embeddings through the real SDK."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types import Completion
from pydantic import TypeAdapter

from tests.kit.fake_backend import FakeBackend
from triton_omni.backends.core.outputs import Candidate, TextPiece, TokenLogprob

LOGPROBS = (
    TokenLogprob(5, "w", -0.5, (Candidate(5, "w", -0.5), Candidate(6, "v", -1.5))),
    TokenLogprob(7, "0 ", -0.25, (Candidate(7, "0 ", -0.25), Candidate(8, "1 ", -2.5))),
)


def complete(sdk: openai.OpenAI, **more: Any) -> Any:
    return sdk.completions.create(**{"model": "fake", "prompt": "once upon", **more})


def test_a_text_is_continued(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    answer = complete(sdk, max_tokens=4, temperature=0, stop="x", seed=3)
    TypeAdapter(Completion).validate_python(answer.model_dump(), strict=True)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == ("w0 w1 w2 w3 ", "length", 0)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 4)
    request = backend.seen[0].request
    assert (request.operation, request.input, request.messages) == ("completion", "once upon", ())
    assert (request.sampling.temperature, request.sampling.stop, request.sampling.seed) == (0, ("x",), 3)


def test_sixteen_tokens_by_default(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    complete(sdk)
    assert backend.seen[0].request.sampling.max_tokens == 16


def test_several_prompts_with_several_choices_each(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    answer = complete(sdk, prompt=["one", "two", "three"], n=2, seed=7, max_tokens=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    seen = sorted((call.request.input, call.request.sampling.seed) for call in backend.seen)
    assert seen == sorted((prompt, seed) for prompt in ("one", "two", "three") for seed in (7, 8))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (15, 12), "each prompt counts once"


def test_a_stream(sdk: openai.OpenAI) -> None:
    chunks = list(complete(sdk, prompt=["a", "b"], max_tokens=3, stream=True, stream_options={"include_usage": True}))
    texts = {0: "", 1: ""}
    ends: dict[int, str] = {}
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        assert choice.index not in ends, "nothing follows the end of a choice"
        texts[choice.index] += choice.text
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
        assert chunk.usage is None
    assert texts == {0: "w0 w1 w2 ", 1: "w0 w1 w2 "} and ends == {0: "length", 1: "length"}
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 16
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(sdk: openai.OpenAI, backend: FakeBackend, stream: bool) -> None:
    backend.extra = TextPiece(logprobs=LOGPROBS)
    answer = complete(sdk, max_tokens=2, logprobs=1, stream=stream)
    parts = [c.choices[0].logprobs for c in answer] if stream else [answer.choices[0].logprobs]
    parts = [part for part in parts if part is not None]
    assert [t for part in parts for t in part.tokens] == ["w", "0 ", "w", "0 "]
    assert [t for part in parts for t in part.token_logprobs] == [-0.5, -0.25] * 2
    assert [t for part in parts for t in part.top_logprobs] == [{"w": -0.5}, {"0 ": -0.25}] * 2
    assert [t for part in parts for t in part.text_offset] == [0, 1, 3, 4]
    assert backend.seen[0].request.sampling.logprobs == 1


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"echo": True}, "echo", "unsupported_value"),
        ({"suffix": "end"}, "suffix", "unsupported_value"),
        ({"best_of": 3}, "best_of", "unsupported_value"),
        ({"prompt": [1, 2, 3]}, "prompt", "unsupported_value"),
        ({"prompt": [[1, 2], [3]]}, "prompt", "unsupported_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt", "invalid_value"),
        ({"logprobs": 6}, "logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"extra_body": {"modalities": ["audio"]}}, "modalities", "unknown_parameter"),
    ],
)
def test_what_is_refused(sdk: openai.OpenAI, backend: FakeBackend, more: Any, param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(sdk, **more)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert not backend.seen


def test_a_pipeline_without_completions_is_named(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.refusal = "[bad_request:operation] unknown operation 'completion'; this pipeline has: image"
    with pytest.raises(openai.BadRequestError) as caught:
        complete(sdk)
    assert caught.value.param == "model" and "unknown operation 'completion'" in caught.value.message


def test_one_prompt_that_fails_fails_all(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.fail_after = 1
    with pytest.raises(openai.InternalServerError) as caught:
        complete(sdk, prompt=["a", "b"])
    assert caught.value.code == "stage_failed"
    assert all(call.over.wait(5) for call in backend.seen)


def test_no_pipeline_makes_embeddings(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.embeddings.create(model="fake", input=["a", "b"])
    assert (caught.value.param, caught.value.code) == ("model", "unsupported_value")
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.embeddings.create(model="none", input="a")
    assert unknown.value.code == "model_not_found"
