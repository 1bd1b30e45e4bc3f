# SPDX-License-Identifier: Apache-2.0
"""How thinker, talker and code predictor sample: as transformers, by request, independent of the rest of the batch."""

from __future__ import annotations

import gc
import json
import os

import numpy as np
import pytest

from tests.kit.ar_runs import await_grammars
from tests.kit.ar_worker import become_ar_worker
from tests.kit.engine_chain import Chain
from tests.kit.omni_chats import CHATS, FRAMES, check, engines, request
from tests.kit.tiny_omni import TEMPLATE, Reference, tiny_omni
from triton_omni.backends.core.engine import EngineOutput, Run
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Message, Sampling
from triton_omni.backends.pipelines.qwen3_omni.pipeline import PIPELINE

become_ar_worker()
pytestmark = pytest.mark.timeout(240)

CITIES = [{"city": "Rome"}, {"city": "Oslo"}]  # a random model writes blanks without end where a grammar allows it
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"enum": CITIES}}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"enum": [{"zone": 1}]}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_omni(tmp_path_factory.mktemp("tiny_omni"))


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


@pytest.fixture(scope="module")
def chain(folder):
    chain = Chain(PIPELINE, engines(folder))
    yield chain
    chain.close()
    gc.collect()


def messages(place):
    return tuple(Message(role, text) for role, text in CHATS[place][0])


def spoken(reference, place, tokens=None, **how):
    chat, most = CHATS[place]
    return reference.speak([{"role": r, "content": t} for r, t in chat], tokens or most, FRAMES, **how)


def answer(chain, given):
    job = chain.open(given)
    await_grammars(chain.engines["thinker"])
    chain.run()
    return job


def test_repetition_penalties_are_transformers(chain, reference):
    for penalty in (1.3, 0.8):
        expected = spoken(reference, 1, thinker_repetition_penalty=penalty, talker_repetition_penalty=penalty)
        sampling = Sampling(temperature=0.0, max_tokens=CHATS[1][1], repetition_penalty=penalty)
        talker = {"talker": {"repetition_penalty": penalty}}
        check(answer(chain, GenerateRequest(messages=messages(1), sampling=sampling, stages=talker)), expected)
    assert expected.token_ids != spoken(reference, 1).token_ids, "the penalty changed nothing; nothing was tested"


def test_options_of_a_stage_beat_the_requests_and_those_beat_the_deployments(chain, reference):
    """What the request says at its top is the thinker's; nothing of it but the seed reaches the talker."""
    wild = Sampling(temperature=1.9, top_p=0.5, repetition_penalty=2.0, frequency_penalty=2.0, max_tokens=3, seed=5)
    own = {"temperature": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "max_tokens": CHATS[0][1]}
    job = answer(chain, GenerateRequest(messages=messages(0), sampling=wild, stages={"thinker": own}))
    check(job, spoken(reference, 0))
    shorter = answer(chain, request(0, stages={"talker": {"max_tokens": 7}}))
    assert shorter.sent("talker", "codes").T.tolist() == [book[:6] for book in spoken(reference, 0).codes]
    assert answer(chain, request(0)).end("talker").usage["audio_frames"] == FRAMES - 1, "the deployment's max_tokens"


def test_a_stop_string_ends_text_and_speech(chain, reference):
    """The text ends before it; the words that made it, all but the last, are spoken, as in transformers."""
    decode = reference.processor.tokenizer.decode
    tokens = spoken(reference, 2).token_ids
    text = decode(tokens, skip_special_tokens=True)
    stop = next(text[i : i + 3] for i in range(8, len(text)) if text.find(text[i : i + 3]) == i and text[i].isascii())
    count = next(n for n in range(len(tokens)) if stop in decode(tokens[:n], skip_special_tokens=True))
    sampling = Sampling(temperature=0.0, max_tokens=CHATS[2][1], stop=(stop,))
    job = answer(chain, GenerateRequest(messages=messages(2), sampling=sampling))
    check(job, spoken(reference, 2, tokens=count))
    assert job.text() == text[: text.index(stop)]
    assert job.end("thinker").reason == "stop"


def test_logprobs_are_transformers(chain, reference):
    import torch

    job = answer(chain, request(3, sampling=Sampling(temperature=0.0, max_tokens=CHATS[3][1], logprobs=3)))
    entries = [e for event in job.events["thinker"] if isinstance(event, EngineOutput) for e in event.piece.logprobs]
    ids = torch.tensor([spoken(reference, 3).prompt_ids + job.tokens()])
    with torch.no_grad():
        rows = reference.model.thinker(input_ids=ids).logits[0].log_softmax(-1)[-len(entries) - 1 : -1]
    assert [entry.token_id for entry in entries] == job.tokens()
    for entry, row in zip(entries, rows, strict=True):
        best = row.topk(3)
        assert [t.token_id for t in entry.top[:3]] == best.indices.tolist()
        assert np.allclose([t.logprob for t in entry.top[:3]], best.values, atol=1e-4)


def sampled(place, seed):
    return GenerateRequest(
        messages=messages(place),
        sampling=Sampling(temperature=1.0, seed=seed, max_tokens=CHATS[place][1]),
        stages={"talker": {"temperature": 0.9, "top_k": 50}},
    )


def test_a_seed_gives_the_same_in_any_batch(chain):
    alone = answer(chain, sampled(1, 7))
    jobs = [chain.open(sampled(place, 7 if place == 1 else place)) for place in range(6)]
    for _ in range(3):
        chain.turn()
    late = chain.open(sampled(1, 7))
    chain.run()
    for job in (jobs[1], late):
        assert job.tokens() == alone.tokens()
        assert np.array_equal(job.sent("talker", "codes"), alone.sent("talker", "codes"))
    other = answer(chain, sampled(1, 8))
    assert not np.array_equal(other.sent("talker", "codes"), alone.sent("talker", "codes"))


def test_each_stage_may_have_its_own_seed(chain):
    """The talker's seed changes first and residual codes and leaves the text alone."""
    jobs = []
    for seed in (1, 1, 2):
        given = sampled(2, 7)
        given.stages["talker"]["seed"] = seed
        jobs.append(answer(chain, given))
    first, again, other = jobs
    assert first.tokens() == again.tokens() == other.tokens()
    codes = [job.sent("talker", "codes") for job in jobs]
    assert np.array_equal(codes[0], codes[1])
    for book in range(codes[0].shape[1]):
        assert not np.array_equal(codes[0][:20, book], codes[2][:20, book])


def test_residual_codes_are_drawn_as_transformers_draws_them(reference):
    """Pearson's chi-squared test of 20,000 draws, each with its own seed, against transformers' distribution."""
    import torch
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    from triton_omni.backends.ar.code_predictor import draw, kept, mix
    from triton_omni.backends.pipelines.qwen3_omni.network import RESIDUAL_SAMPLING

    how = _how_transformers_draws(reference)
    assert (RESIDUAL_SAMPLING.top_k, RESIDUAL_SAMPLING.top_p) == (how["top_k"], how["top_p"])
    generator = torch.Generator().manual_seed(1)
    draws = 20_000
    keys, never = mix(torch.arange(draws)), torch.zeros(draws, dtype=torch.bool)
    for scale in (0.1, 1.0, 4.0, 20.0):
        logits = torch.randn(128, generator=generator) * scale
        warped = TopPLogitsWarper(how["top_p"])(None, TopKLogitsWarper(how["top_k"])(None, logits[None]))
        expected = warped[0].softmax(-1)
        values, codes = logits.topk(how["top_k"])
        ours = kept(values[None], how["top_p"]).softmax(-1)[0]
        assert torch.allclose(ours, expected[codes], atol=1e-6)
        counts = draw(logits.expand(draws, -1), keys, never, RESIDUAL_SAMPLING).bincount(minlength=128).double()
        possible = expected > 0
        assert not counts[~possible].any()
        means = expected[possible].double() * draws
        degrees = int(possible.sum()) - 1
        chi_squared = float(((counts[possible] - means) ** 2 / means).sum())
        assert chi_squared < degrees + 4.5 * (2 * degrees) ** 0.5 + 1e-9, (scale, chi_squared, degrees)


def test_greedy_residual_codes_are_the_best(reference):
    import torch

    from triton_omni.backends.ar.code_predictor import draw, mix
    from triton_omni.backends.pipelines.qwen3_omni.network import RESIDUAL_SAMPLING

    logits = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    greedy = torch.arange(64) % 2 == 0
    codes = draw(logits, mix(torch.arange(64)), greedy, RESIDUAL_SAMPLING)
    assert torch.equal(codes[greedy], logits.argmax(-1)[greedy])
    assert not torch.equal(codes, logits.argmax(-1))


def _how_transformers_draws(reference):
    """What its talker hands to the predictor's generate when it samples; temperature is left at 1."""
    predictor = reference.model.talker.code_predictor
    asked, draw = {}, predictor.generate

    def catching(*args, **kwargs):
        asked.update(kwargs)
        return draw(*args, **kwargs)

    predictor.generate = catching
    try:
        reference.speak([{"role": "user", "content": "x"}], 3, 3, talker_do_sample=True)
    finally:
        predictor.generate = draw
    assert asked["do_sample"] and predictor.generation_config.temperature in (None, 1.0)
    return asked


def blank_tokens(chain):
    tokenizer = chain.engines["thinker"].llm.engine.renderer.get_tokenizer()
    return [i for i in range(len(tokenizer)) if (word := tokenizer.decode([i])) and not word.strip()]


def test_json_of_a_schema(chain):
    given = Sampling(temperature=0.0, max_tokens=60, json_schema={"enum": CITIES})
    job = answer(chain, request(0, sampling=given))
    assert json.loads(job.text()) in CITIES
    assert job.end("thinker").reason == "stop"


@pytest.mark.parametrize(("choice", "names"), [("weather", {"weather"}), ("required", {"weather", "clock"})])
def test_forced_calls_are_calls_and_are_not_spoken(chain, choice, names):
    given = request(0, tools=(WEATHER, CLOCK), tool_choice=choice, sampling=Sampling(temperature=0.0, max_tokens=100))
    job = answer(chain, given)
    calls = [c for e in job.events["thinker"] if isinstance(e, EngineOutput) for c in e.piece.tool_calls]
    assert calls and {call.name for call in calls} <= names
    for call in calls:
        arguments = json.loads(call.arguments)
        assert arguments in (CITIES if call.name == "weather" else [{"zone": 1}])
    blank = {str(i): 100.0 for i in blank_tokens(chain)}
    biased = request(
        0, tools=(WEATHER,), tool_choice=choice, sampling=Sampling(temperature=0.0, max_tokens=200, logit_bias=blank)
    )
    if choice == "weather":
        job_of_blanks = answer(chain, biased)
        assert job_of_blanks.end("thinker").reason == "tool_calls"
        assert len(calls) == 1 and not job.text()
        assert job.end("thinker").reason == "tool_calls"
        assert not job.sent("talker", "codes").size


def test_parameters_that_are_no_schema_are_the_tools_fault(chain):
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    run = Run(os.urandom(16), "r", request(0, tools=(broken,), tool_choice="f"))
    with pytest.raises(BadRequest) as caught:
        chain.engines["thinker"].open(run)
    assert caught.value.where == "tools" and not chain.engines["thinker"].has_work


def test_a_call_the_model_begins_by_itself_is_not_spoken(chain, reference):
    """The model is made to write nothing but <tool_call>: no call, so it stays text, and is not spoken."""
    tag = reference.processor.tokenizer.convert_tokens_to_ids("<tool_call>")
    given = Sampling(temperature=0.0, max_tokens=6, logit_bias={str(tag): 90.0})
    silent, loud = (answer(chain, request(0, tools=tools, sampling=given)) for tools in ((WEATHER,), ()))
    assert silent.text() == loud.text() == "<tool_call>" * 6
    assert silent.end("thinker").reason == "length"
    assert not silent.sent("talker", "codes").size
    assert loud.sent("talker", "codes").size


def test_earlier_calls_and_their_results_are_read(chain, reference):
    """The prompt is the template's of the same messages with arguments as objects."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    said = (Message("user", "hello"), Message("assistant", "", tool_calls=(call,)), Message("tool", "rain"))
    job = answer(chain, GenerateRequest(messages=said, tools=(WEATHER,), sampling=Sampling(max_tokens=2)))
    function = call["function"] | {"arguments": {"city": "Rome"}}
    chat = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "rain"},
    ]
    tokenizer = reference.processor.tokenizer
    text = tokenizer.apply_chat_template(
        chat, tools=[WEATHER], chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    assert job.end("thinker").usage["prompt_tokens"] == len(tokenizer.encode(text, add_special_tokens=False))
