# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runners by stage: which can be had here, and what must hold with a runner that has persistent buffers.

The cases T8184-… are those of a fault of another server: hidden rows that the next step had overwritten. Case f is
`the_producer_may_reuse_its_buffer` of every carrier's contract, g is in tests/unit/worker/test_loop.py (a chunk without
what the adapter reads).
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

from tests.kit.ar_worker import become_ar_worker

become_ar_worker()

import torch  # noqa: E402
from vllm.triton_utils import HAS_TRITON  # noqa: E402

from tests.kit.ar_runs import answer, chat, end, make_engine, tokens  # noqa: E402
from tests.kit.engine_chain import Chain  # noqa: E402
from tests.kit.host_graphs import HostRecorder  # noqa: E402
from tests.kit.omni_chats import check, code2wav, engines, references, request  # noqa: E402
from tests.kit.tiny_checkpoints import tiny_llama  # noqa: E402
from tests.kit.tiny_omni import Reference, tiny_omni  # noqa: E402
from triton_omni.backends.ar.hooks import Span  # noqa: E402
from triton_omni.backends.ar.load import check_runner, engine_arguments, load_llm  # noqa: E402
from triton_omni.backends.ar.options import read_options  # noqa: E402
from triton_omni.backends.ar.rows import BeginRows, RowStore  # noqa: E402
from triton_omni.backends.ar.taps import TokenTaps  # noqa: E402
from triton_omni.backends.ar.upstream import HookedRunner  # noqa: E402
from triton_omni.backends.ar.upstream_v2 import V2HookedRunner  # noqa: E402
from triton_omni.backends.core.engine import OptionsError  # noqa: E402
from triton_omni.backends.core.generate import SpeechParams  # noqa: E402
from triton_omni.backends.core.pipeline import EngineContext  # noqa: E402
from triton_omni.backends.pipelines.qwen3_omni.pipeline import PIPELINE  # noqa: E402

pytestmark = pytest.mark.timeout(240)
RUNNERS = (
    pytest.param("v1", id="v1"),
    pytest.param("v2", id="v2", marks=pytest.mark.skipif(not HAS_TRITON, reason="vLLM's V2 runner needs a GPU here")),
)


# --- the option --------------------------------------------------------------------------------------------------
def options_of(folder, **given):
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return read_options({"model": str(folder)} | given, "thinker")


def context(device="cpu"):
    return EngineContext("chat", "thinker", {}, device)


@pytest.mark.skipif(HAS_TRITON, reason="this machine has vLLM's V2 runner")
def test_a_runner_that_is_not_here_is_refused(tmp_path):
    """T8184-d: the message names the stage, the option and what to do. Nothing of the checkpoint is read before."""
    with pytest.raises(OptionsError) as caught:
        load_llm(read_options({"model": str(tmp_path / "nowhere"), "runner": "v2"}, "thinker"), context())
    for words in ("stage 'thinker'", "runner 'v2'", "its device, which cpu", "'runner: v1'", "run the stage on a GPU"):
        assert words in str(caught.value)


def test_a_runner_that_the_variable_asks_for_is_refused_too(tmp_path, monkeypatch):
    monkeypatch.setattr("triton_omni.backends.ar.load.HAS_TRITON", False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(OptionsError, match="runner 'v2' needs the Triton language"):
        check_runner(options_of(tmp_path), context())


@pytest.mark.parametrize(("runner", "variable"), [("v1", "1"), ("v2", "0")])
def test_a_process_of_another_runner_is_refused(runner, variable, tmp_path, monkeypatch):
    monkeypatch.setattr("triton_omni.backends.ar.load.HAS_TRITON", True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", variable)
    with pytest.raises(OptionsError, match=f"runner '{runner}', but this process was started with .*={variable}"):
        check_runner(options_of(tmp_path, runner=runner), context())


def test_steps_that_are_not_compared_are_eager(tmp_path):
    def eager(device, **given):
        return engine_arguments(options_of(tmp_path, **given), context(device))["enforce_eager"]

    assert eager("cpu") and not eager("cuda") and not eager("cuda", runner="v1")
    assert eager("cuda", runner="v2") and not eager("cuda", runner="v2", enforce_eager=False)
    assert eager("cuda", enforce_eager=True)
    assert "runner" not in engine_arguments(options_of(tmp_path, runner="v1"), context()), "no argument of vLLM"


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_engine_of_each_runner_answers(runner, tmp_path):
    if os.environ["VLLM_USE_V2_MODEL_RUNNER"] != str(int(runner == "v2")):
        pytest.skip(f"this process was started for another runner; set VLLM_USE_V2_MODEL_RUNNER for {runner}")
    engine = make_engine(tiny_llama(tmp_path / "model"), runner=runner)
    events = answer(engine, chat("hello", max_tokens=4))
    assert len(tokens(events)) == 4 and end(events).reason == "length"
    engine.close()


# --- T8184-a: persistent buffers ---------------------------------------------------------------------------------
HIDDEN = 3
STEPS = ((("A", 0, 2), ("B", 0, 3)), (("B", 3, 1), ("C", 0, 4)), (("C", 4, 1),))
"""By step: run, position, number of rows."""


def values(key, position):
    """What the layer makes of a position of a run."""
    return torch.full((HIDDEN,), float(ord(key) * 100 + position))


class Buffers:
    """A step's rows and token ids: `static` ones are the same memory in every step, and what lies behind is stale."""

    def __init__(self, static):
        self.static = static
        self.rows, self.ids = torch.zeros(16, HIDDEN), torch.zeros(16, dtype=torch.int64)

    def write(self, step):
        if not self.static:
            self.rows, self.ids = torch.zeros(16, HIDDEN), torch.zeros(16, dtype=torch.int64)
        at = 0
        for key, position, count in step:
            for k in range(count):
                self.rows[at], self.ids[at] = values(key, position + k), 7
                at += 1
        return at


class V1Base:
    """What HookedRunner reads of vLLM's V1 runner."""

    def __init__(self, static):
        self.buffers = Buffers(static)

    def step(self, step):
        total = self.buffers.write(step)
        self.input_ids = SimpleNamespace(gpu=self.buffers.ids)
        self.input_batch = SimpleNamespace(
            req_ids=[key for key, _, _ in step], num_computed_tokens_cpu=np.array([position for _, position, _ in step])
        )
        sampling = SimpleNamespace(skip_reading_prefix_cache=True, extra_args={})
        self.requests = {
            key: SimpleNamespace(
                sampling_params=SimpleNamespace(**vars(sampling) | {"extra_args": {"omni_run": key}}),
                num_prompt_tokens=16,
            )
            for key, _, _ in step
        }
        scheduled = SimpleNamespace(num_scheduled_tokens={key: count for key, _, count in step})
        self.execute_model_state = SimpleNamespace(
            scheduler_output=scheduled, aux_hidden_states=[self.buffers.rows[: total + 2]]
        )
        return self.sample_tokens(None)

    def sample_tokens(self, grammar_output):
        return SimpleNamespace()


class V2Base:
    """What V2HookedRunner reads of vLLM's V2 runner."""

    def __init__(self, static):
        self.buffers = Buffers(static)

    def step(self, step):
        total = self.buffers.write(step)
        self.keys, self.tapped = {key: key for key, _, _ in step}, {key: 16 for key, _, _ in step}
        batch = SimpleNamespace(
            req_ids=[key for key, _, _ in step],
            num_tokens=total,
            input_ids=self.buffers.ids,
            query_start_loc_np=np.cumsum([0, *(count for _, _, count in step)]),
            num_computed_tokens_np=np.array([position for _, position, _ in step]),
        )
        self.execute_model_state = SimpleNamespace(input_batch=batch, aux_hidden_states=[self.buffers.rows])
        return self.sample_tokens(None)

    def sample_tokens(self, grammar_output):
        return SimpleNamespace()


def tapped_by_run(hooks, base, static):
    """All steps, and only then what was tapped: rows by run and position."""
    runner = type("Hooked", (hooks, base), {})(static)
    runner.taps = TokenTaps([7])
    results = [runner.step(step).omni_step_result for step in STEPS]
    found = {}
    for key, positions, rows in (piece for result in results for piece in result):
        found |= {(key, position): row for position, row in zip(positions, rows, strict=True)}
    return found


@pytest.mark.parametrize(("hooks", "base"), [(HookedRunner, V1Base), (V2HookedRunner, V2Base)], ids=["v1", "v2"])
def test_tapped_rows_outlive_the_buffers_of_their_step(hooks, base):
    """A and B in one step, B and C in the next: each run has its own rows, with persistent buffers as without."""
    static, eager = (tapped_by_run(hooks, base, kind) for kind in (True, False))
    wanted = {(key, position + k) for step in STEPS for key, position, count in step for k in range(count)}
    assert set(static) == set(eager) == wanted
    for (key, position), row in static.items():
        assert torch.equal(row, values(key, position)) and torch.equal(row, eager[key, position])


class StaticNetwork:
    """A rows.Network whose frames lie in the same memory in every step, as those of a CUDA graph."""

    pad_text = 0

    def __init__(self):
        self.frames, self.sums = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, HIDDEN)

    def prompt_rows(self, prompt):
        return torch.zeros(prompt, HIDDEN)

    def text_rows(self, token_ids):
        return torch.zeros(len(token_ids), HIDDEN)

    def predict(self, hidden, tokens, draws):
        count = len(tokens)
        self.frames[:count] = tokens[:, None]
        self.sums[:count] = tokens[:, None].float()
        return self.frames[:count], self.sums[:count]


def test_frames_outlive_the_buffers_of_their_step():
    """The sum of a run's frame is its next input, and a preempted run reads all of them again."""
    store = RowStore(StaticNetwork())
    store.apply([BeginRows("A", 1), BeginRows("B", 1)])
    results = []
    for keys, codes in ((["A", "B"], [11, 12]), (["B"], [22]), (["A", "B"], [31, 32])):
        store.on_sampled(keys, torch.zeros(len(keys), HIDDEN), codes)
        results.append(store.step_result())
    rows = torch.zeros(5, HIDDEN)
    store.fill([Span("A", 1, 0, 2), Span("B", 1, 2, 3)], rows)
    assert rows[:, 0].tolist() == [11, 31, 12, 22, 32]
    assert [result.frames[:, 0].tolist() for result in results] == [[11, 12], [22], [31, 32]]


# --- T8184-c and e: live engines -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def omni(tmp_path_factory):
    """Thinker, talker and code2wav with one slot each, and what transformers makes of the chats."""
    folder = tiny_omni(tmp_path_factory.mktemp("tiny_omni"))
    one = {"max_num_seqs": 1}
    chain = Chain(PIPELINE, engines(folder, one, one) | {"code2wav": code2wav(folder)})
    yield chain, references(Reference(folder))
    chain.close()


def test_a_run_in_anothers_slot_has_the_default_voice(omni):
    """One slot: the second run says nothing of a voice and gets the checkpoint's default, not its predecessor's."""
    chain, spoken = omni
    first = chain.open(request(0, speech=SpeechParams(voice="Chelsie")))
    chain.run()
    second = chain.open(request(0))
    chain.run()
    check(second, spoken[0])
    assert not np.array_equal(first.sent("talker", "codes"), second.sent("talker", "codes"))


def test_a_stage_with_recorded_steps_behind_one_without(omni):
    """T8184-c: an eager thinker, then talker and codec whose steps replay into the same memory: all as all eager."""
    chain, spoken = omni
    eager = chain.open(request(1))
    chain.run()
    recorder = HostRecorder()
    chain.engines["talker"].llm.engine.apply_model(lambda network: network.code_predictor.capture(recorder))
    chain.engines["code2wav"].decoder.capture([1], chain.engines["code2wav"].options.chunk_frames, recorder)
    recorder.replays = 0
    static = chain.open(request(1))
    chain.run()
    check(static, spoken[1])
    assert recorder.replays > len(static.sent("talker", "codes")), "frames, and a chunk of audio"
    assert np.abs(static.audio() - eager.audio()).max() < 1e-6
