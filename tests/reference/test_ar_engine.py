# SPDX-License-Identifier: Apache-2.0
"""The AR engine against transformers on a tiny fp32 checkpoint: same tokens, whatever batch, cache and ends do."""

from __future__ import annotations

import gc
import json
import os
import random
import threading

import pytest

from tests.kit.ar_runs import (
    LENGTHS,
    PROMPTS,
    answer,
    chat,
    decode,
    drain,
    end,
    free_blocks,
    greedy_reference,
    make_engine,
    scheduler,
    step,
    text,
    texts,
    tokens,
)
from tests.kit.ar_worker import become_ar_worker
from tests.kit.tiny_checkpoints import tiny_llama
from triton_omni.backends.core.engine import EngineChunk, EngineFinished, EngineOutput, Run
from triton_omni.backends.core.errors import BadRequest, OmniError
from triton_omni.backends.core.generate import GenerateRequest, Message, Part
from triton_omni.backends.core.outputs import TextPiece, TranscriptPiece

become_ar_worker()
pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="module")
def woken():
    return threading.Event()


@pytest.fixture(scope="module")
def logprobs_at_load():
    """An item for each step of the engine's load that computed log-probabilities."""
    return []


@pytest.fixture(scope="module")
def engine(folder, woken, logprobs_at_load):
    from vllm.v1.sample.sampler import Sampler

    gather = Sampler.gather_logprobs

    def counted(*args, **more):
        logprobs_at_load.append(1)
        return gather(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "gather_logprobs", staticmethod(counted))
        engine = make_engine(folder, wake=woken.set)
    yield engine
    engine.close()
    gc.collect()


@pytest.fixture(scope="module")
def reference(folder):
    return greedy_reference(folder)


# --- the same tokens as transformers ---------------------------------------------------------------------------------
def test_alone_equals_transformers(engine, reference):
    for prompt, length, (ids, expected) in zip(PROMPTS, LENGTHS, reference, strict=True):
        events = answer(engine, chat(prompt, max_tokens=length))
        assert tokens(events) == expected
        usage = end(events).usage
        joined = TextPiece.join([event.piece for event in events if isinstance(event, EngineOutput)])
        assert joined.usage() == {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), len(expected))


def test_concurrent_equals_alone(engine, reference):
    runs = [chat(p, max_tokens=n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    for run in runs:
        engine.open(run)
    events = drain(engine)
    assert [tokens(events[run]) for run in runs] == [expected for _, expected in reference]


def test_runs_that_join_and_leave_in_mid_stream_change_nothing(engine, reference):
    rng = random.Random(5)
    for _ in range(3):
        events, runs = {}, {}
        waiting = list(range(len(PROMPTS)))
        rng.shuffle(waiting)
        passers_by = []
        while waiting or engine.has_work:
            if waiting and rng.random() < 0.4:
                i = waiting.pop()
                runs[i] = chat(PROMPTS[i], max_tokens=LENGTHS[i])
                engine.open(runs[i])
            if rng.random() < 0.2:
                passers_by.append(chat("someone else", max_tokens=200, ignore_eos=True))
                engine.open(passers_by[-1])
            if passers_by and (rng.random() < 0.3 or not waiting):
                engine.stop(passers_by.pop())
            step(engine, events)
        assert [tokens(events[runs[i]]) for i in range(len(PROMPTS))] == [expected for _, expected in reference]


def test_prefix_caching_changes_nothing_but_the_work(engine, reference):
    prompt = 6
    for _ in range(2):
        events = answer(engine, chat(PROMPTS[prompt], max_tokens=LENGTHS[prompt]))
    assert tokens(events) == reference[prompt][1]
    assert end(events).usage["cached_tokens"] > 0


# --- text ------------------------------------------------------------------------------------------------------------
def test_runs_side_by_side_send_their_text_in_fewer_pieces(engine, monkeypatch):
    """While the clock stands still no second piece is due before the end; a run that is alone never waits."""
    monkeypatch.setattr("triton_omni.backends.ar.engine.monotonic", lambda: 1.0)
    alone = answer(engine, chat(PROMPTS[1], max_tokens=8, ignore_eos=True, logprobs=1))
    runs = [chat(PROMPTS[1], max_tokens=8, ignore_eos=True, logprobs=1) for _ in range(2)]
    for run in runs:
        engine.open(run)
    events = drain(engine)
    assert len(texts(alone)) > 3
    for run in runs:
        first, rest = texts(events[run])
        assert first == texts(alone)[0], "the first text is not held back"
        assert TextPiece.join([first, rest]).token_ids == TextPiece.join(texts(alone)).token_ids
        assert (text(events[run]), len(rest.token_ids)) == (text(alone), len(rest.logprobs))


def test_held_text_leaves_with_the_first_token_after_it_is_due(engine, monkeypatch):
    now_s = [1.0]
    monkeypatch.setattr("triton_omni.backends.ar.engine.monotonic", lambda: now_s[0])
    runs = [chat(PROMPTS[1], max_tokens=8, ignore_eos=True) for _ in range(2)]
    for run in runs:
        engine.open(run)
    events: dict[Run, list[object]] = {}
    for _ in range(4):
        step(engine, events)
    assert [len(texts(events[run])) for run in runs] == [1, 1]
    now_s[0] += 0.001
    step(engine, events)
    assert [len(texts(events[run])) for run in runs] == [2, 2]
    drain(engine)


def test_joined_deltas_are_the_text_of_the_tokens(engine):
    rng = random.Random(1)
    runs = [chat(p, max_tokens=50, temperature=1.5, seed=rng.randrange(99)) for p in PROMPTS]
    for run in runs:
        engine.open(run)
    events = drain(engine)
    for run in runs:
        whole = decode(engine, tokens(events[run]))
        joined = text(events[run])
        # a character that never became complete is not sent; transformers shows it as replacement characters
        assert whole.startswith(joined)
        assert set(whole[len(joined) :]) <= {"\ufffd"}


def test_no_delta_is_empty_but_one_that_carries_left_over_tokens(engine):
    events = answer(engine, chat(PROMPTS[4], max_tokens=40, feeds=True))
    outputs = [e for e in events if isinstance(e, EngineOutput)]
    assert all(e.piece.text for e in outputs[:-1])
    sends = [e for e in events if isinstance(e, EngineChunk)]
    assert all(e.piece.text for e in sends)
    assert "".join(e.piece.text for e in sends) == text(events)


def test_a_stop_string_ends_the_text_just_before_it(engine):
    whole = text(answer(engine, chat(PROMPTS[2], max_tokens=40)))
    for start in range(4, len(whole) - 3, 5):
        stop = whole[start : start + 3]
        if "\ufffd" in stop:
            continue
        events = answer(engine, chat(PROMPTS[2], max_tokens=40, stop=("never seen", stop)))
        assert text(events) == whole[: whole.index(stop)]
        assert end(events).reason == "stop"


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(engine):
    whole = text(answer(engine, chat(PROMPTS[0], max_tokens=20)))
    events = answer(engine, chat(PROMPTS[0], max_tokens=20, stop=("a stop string that never comes",)))
    assert text(events) == whole
    assert end(events).reason == "length"


def test_one_token_answers(engine, reference):
    events = answer(engine, chat(PROMPTS[0], max_tokens=1))
    assert tokens(events) == reference[0][1][:1]
    assert end(events).reason == "length"


def test_an_answer_of_nothing_but_the_end_token(engine):
    from transformers import AutoTokenizer

    end_id = AutoTokenizer.from_pretrained(engine.options.model).eos_token_id
    events = answer(engine, chat("x", max_tokens=9, logit_bias={str(end_id): 100.0}))
    assert text(events) == ""
    assert tokens(events) == [end_id]
    assert end(events).reason == "stop"
    assert end(events).usage["completion_tokens"] == 1


@pytest.mark.parametrize("max_tokens", [0, 1, 10**6])
def test_max_tokens_is_cut_to_what_the_messages_leave(engine, max_tokens):
    """As many as the context has, and more: clients send defaults that they do not know to be too large."""
    run = chat("fox " * 240, max_tokens=engine.max_model_len + max_tokens, ignore_eos=True)
    events = answer(engine, run)
    usage = end(events).usage
    assert usage["prompt_tokens"] + usage["completion_tokens"] == engine.max_model_len
    assert end(events).reason == "length"


# --- sampling --------------------------------------------------------------------------------------------------------
def test_a_seed_gives_the_same_answer_in_any_batch(engine):
    def run():
        return chat(PROMPTS[1], max_tokens=30, temperature=1.0, top_p=0.9, top_k=40, seed=1234)

    alone = tokens(answer(engine, run()))
    among = run()
    for i in range(5):
        engine.open(chat(PROMPTS[i], max_tokens=20 + i, temperature=1.0, seed=i))
    events = {}
    step(engine, events)
    engine.open(among)
    assert tokens(drain(engine, events)[among]) == alone
    assert tokens(answer(engine, chat(PROMPTS[1], max_tokens=30, temperature=1.0, seed=1))) != alone


def test_logprobs_come_one_per_token(engine, reference):
    events = answer(engine, chat(PROMPTS[4], max_tokens=12, logprobs=3))
    entries = [e for event in events if isinstance(event, EngineOutput) for e in event.piece.logprobs]
    assert [e.token_id for e in entries] == tokens(events) == reference[4][1][:12]
    for entry in entries:
        best = entry.top[0]
        assert best.token_id == entry.token_id  # greedy
        assert best.logprob == max(t.logprob for t in entry.top) <= 0


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
        {
            "type": "object",
            "properties": {"a": {"enum": ["x", 1, None]}},
            "required": ["a"],
            "additionalProperties": False,
        },
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        {"enum": [{"a": [1, {"b": 2}]}]},
    ],
)
def test_json_ends_although_the_model_prefers_white_space(engine, schema):
    """White space is the most probable token in every step: it may stand nowhere between the tokens of JSON."""
    tokenizer = engine.llm.engine.renderer.get_tokenizer()
    blank = {str(i): 100.0 for i in range(len(tokenizer)) if (word := tokenizer.decode([i])) and not word.strip()}
    assert len(blank) > 2
    events = answer(engine, chat("json", max_tokens=120, json_schema=schema, logit_bias=blank))
    assert end(events).reason == "stop"
    json.loads(text(events))


def test_repetition_penalty_is_used(engine):
    from collections import Counter

    plain = Counter(tokens(answer(engine, chat("x", max_tokens=60, ignore_eos=True))))
    penalised = Counter(tokens(answer(engine, chat("x", max_tokens=60, ignore_eos=True, repetition_penalty=2.0))))
    assert len(penalised) > len(plain)


SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}


@pytest.fixture
def compilers(engine):
    """All of vLLM's threads that compile grammars are held: none is compiled until the event is set."""
    pool, gate = engine.llm.engine.engine_core.engine_core.structured_output_manager.executor, threading.Event()
    held = [pool.submit(gate.wait, 60.0) for _ in range(pool._max_workers)]
    yield gate
    gate.set()
    assert all(future.result() for future in held), "the test itself took too long"


def test_while_a_grammar_is_compiled_no_step_is_spent_on_it(engine, reference, compilers, woken):
    free = free_blocks(engine)
    woken.clear()
    run, other = chat("answer", max_tokens=60, json_schema={"enum": ["yes", "no"]}), chat(PROMPTS[0], max_tokens=24)
    engine.open(run)
    assert not engine.has_work
    engine.open(other)
    events, steps = {}, 0
    while engine.has_work:
        step(engine, events)
        steps += 1
    assert tokens(events[other]) == reference[0][1]
    assert steps == len(tokens(events[other])), "every step made a token of the other run"
    assert run not in events and not woken.is_set()
    compilers.set()
    assert woken.wait(60) and engine.has_work
    assert text(drain(engine, events)[run]) in ('"yes"', '"no"')
    assert free_blocks(engine) == free


def test_a_run_that_is_stopped_has_no_grammar_compiled(engine, compilers, woken):
    woken.clear()
    run = chat("answer", max_tokens=60, json_schema={"enum": ["never", "compiled"]})
    engine.open(run)
    grammar = run.state.scheduled.structured_output_request._grammar
    engine.stop(run)
    assert grammar.cancelled() and woken.is_set() and not engine.has_work
    assert answer(engine, chat("x", max_tokens=2))


def test_a_schema_is_obeyed(engine):
    found = text(answer(engine, chat("answer", max_tokens=60, temperature=1.0, seed=2, json_schema=SCHEMA)))
    assert set(found) <= set('{}"yes:truefalse \n\r\t')  # a random model may fill its tokens with blanks
    if found.rstrip().endswith("}"):
        assert isinstance(json.loads(found)["yes"], bool)


# --- refused ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: chat("fox " * 3000), "messages"),
        (lambda: chat("x", stop=("",)), "sampling.stop"),
        (lambda: chat("x", logit_bias={"99999": 1.0}), "sampling.logit_bias"),
        (lambda: chat("x", seed=2**70), "sampling.seed"),
        (lambda: chat("x", json_schema={"type": "nonsense"}), "sampling.json_schema"),
        (lambda: chat("x", json_schema={"type": "integer", "multipleOf": 3}), "sampling.json_schema"),
        (lambda: chat("", messages=(Message("user", (Part("image"),)),)), "messages[0]"),
        (lambda: chat("", messages=(Message("tool", "4"),)), "messages[0]"),
    ],
)
def test_what_cannot_be_served_is_refused_and_nothing_is_kept(engine, make, where):
    free = free_blocks(engine)
    with pytest.raises(BadRequest) as caught:
        engine.open(make())
    assert caught.value.where == where
    assert not engine.has_work
    assert free_blocks(engine) == free


def test_empty_messages_are_refused(engine):
    run = Run(os.urandom(16), "r", GenerateRequest())
    with pytest.raises(BadRequest) as caught:
        engine.open(run)
    assert caught.value.where == "messages"


def test_context_overflow_says_the_limit(engine):
    with pytest.raises(BadRequest, match=str(engine.max_model_len)):
        engine.open(chat("fox " * 3000))


# --- stop, at any time -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_a_stopped_run_frees_its_blocks_and_says_nothing_more(engine, steps, reference):
    drain(engine)
    free = free_blocks(engine)
    other = chat(PROMPTS[1], max_tokens=LENGTHS[1])
    run = chat(PROMPTS[6], max_tokens=300, ignore_eos=True)
    engine.open(run)
    engine.open(other)
    events = {}
    for _ in range(steps):
        step(engine, events)
    before = len(events.get(run, []))
    engine.stop(run)
    engine.stop(run)  # twice is as good as once
    drain(engine, events)
    assert len(events.get(run, [])) == before
    assert tokens(events[other]) == reference[1][1]
    assert free_blocks(engine) == free
    assert not scheduler(engine).running
    assert not scheduler(engine).waiting


def test_stopping_the_only_run_leaves_the_engine_idle(engine):
    free = free_blocks(engine)
    run = chat("x", max_tokens=300, ignore_eos=True)
    engine.open(run)
    step(engine, {})
    engine.stop(run)
    assert not engine.has_work
    assert free_blocks(engine) == free


def test_stopping_a_run_that_waits_for_upstream(engine):
    run = chat("x", upstream=("transcriber",))
    engine.open(run)
    engine.stop(run)
    assert not engine.has_work


# --- priority, upstream ----------------------------------------------------------------------------------------------
def test_an_urgent_run_overtakes_those_that_wait(engine):
    crowd = [chat("x", max_tokens=30, ignore_eos=True) for _ in range(12)]  # 8 run at once
    for run in crowd:
        engine.open(run)
    urgent = chat("x", max_tokens=5, priority=10, ignore_eos=True)
    engine.open(urgent)
    events = {}
    while urgent not in events or not isinstance(events[urgent][-1], EngineFinished):
        step(engine, events)
    assert sum(run not in events for run in crowd) >= 4
    drain(engine, events)
    assert all(tokens(events[run]) == tokens(events[crowd[0]]) for run in crowd)


def test_transcripts_take_the_place_of_audio_parts_in_order(engine):
    parts = (Part("audio"), Part("text", "and then"), Part("audio"))
    transcribed = chat(
        "", messages=(Message("system", "Be brief."), Message("user", parts)), upstream=("transcriber",), max_tokens=9
    )
    engine.open(transcribed)
    assert not engine.has_work
    assert engine.feed(transcribed, TranscriptPiece(" the lazy dog ", part=1), False)
    assert engine.feed(transcribed, TranscriptPiece("the quick fox"), False)
    assert not engine.has_work
    assert engine.feed(transcribed, None, True)
    events = drain(engine)[transcribed]
    read = (Message("system", "Be brief."), Message("user", "the quick fox\nand then\nthe lazy dog"))
    assert tokens(events) == tokens(answer(engine, chat("", messages=read, max_tokens=9)))


def test_a_missing_transcript_is_an_error_not_a_silence(engine):
    run = chat("", messages=(Message("user", (Part("audio"), Part("audio"))),), upstream=("transcriber",))
    engine.open(run)
    engine.feed(run, TranscriptPiece("one"), False)
    with pytest.raises(OmniError, match="transcript"):
        engine.feed(run, None, True)
    engine.stop(run)
    assert not engine.has_work


def test_a_long_transcript_is_refused_like_a_long_message(engine):
    run = chat("", messages=(Message("user", (Part("audio"),)),), upstream=("transcriber",))
    engine.open(run)
    with pytest.raises(BadRequest) as caught:
        engine.feed(run, TranscriptPiece("fox " * 3000), True)
    assert caught.value.where == "messages"
    assert not engine.has_work


def test_log_probabilities_are_computed_once_at_load(engine, logprobs_at_load):
    """On a GPU vLLM compiles their kernel at first use, in a step that all runs wait for."""
    assert logprobs_at_load == [1]
