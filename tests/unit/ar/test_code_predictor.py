# SPDX-License-Identifier: Apache-2.0
"""The predictor of residual codes against transformers' own network: greedy and drawn codes, alone and in a batch."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="needs the engine environment (make setup)")
pytest.importorskip("transformers", reason="needs the engine environment (make setup)")

from transformers import DynamicCache  # noqa: E402
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerCodePredictorConfig  # noqa: E402
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (  # noqa: E402
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration,
)

from triton_omni.backends.ar.code_predictor import CodePredictor, ResidualSampling  # noqa: E402
from triton_omni.backends.ar.rows import Draws  # noqa: E402

HIDDEN, BOOKS, CODES, RUNS, FRAMES = 64, 16, 256, 16, 20
SAMPLING = ResidualSampling(top_k=50, top_p=0.8)
MASK = 2**64 - 1


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Thousands of small products: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference():
    config = Qwen3OmniMoeTalkerCodePredictorConfig(
        vocab_size=CODES, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_code_groups=BOOKS, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    network = Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            scale = 0.1 if weight.dim() < 2 else 0.5 if "embed" in name else 1.5 / weight.shape[-1] ** 0.5
            weight.copy_(torch.randn_like(weight) * scale + (weight.dim() < 2))
    return network


@pytest.fixture(scope="module")
def predictor(reference):
    predictor = CodePredictor(reference.config, HIDDEN, RUNS, SAMPLING)
    loaded = predictor.load_weights(reference.state_dict().items())
    assert loaded == {name for name, _ in predictor.named_parameters()}
    return predictor


def inputs(frames: int):
    """Hidden rows and first embeddings (frames, RUNS, HIDDEN), tokens (frames, RUNS)."""
    generator = torch.Generator().manual_seed(9)
    shape = (frames, RUNS, HIDDEN)
    rows = [torch.randn(shape, generator=generator) for _ in range(2)]
    return *rows, torch.randint(0, CODES, shape[:2], generator=generator)


@torch.no_grad()
def reference_frame(network, hidden, first, choose):
    """Codes that `choose(book, logits)` takes of one run's frame, by transformers' network; their summed embedding."""
    cache, rows, codes, total = DynamicCache(config=network.config), torch.stack([hidden, first])[None], [], first
    for book in range(BOOKS - 1):
        out = network.model(inputs_embeds=rows, past_key_values=cache, use_cache=True)
        codes.append(choose(book, network.lm_head[book](out.last_hidden_state[0, -1])))
        rows = network.model.codec_embedding[book](torch.tensor([[codes[-1]]]))
        total = total + rows[0, 0]
    return codes, total


def splitmix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def drawn(seed: int, frame: int):
    """`choose` of one run's frame, in Python's integers: an exponential race over the codes that are kept."""
    golden = 0x9E3779B97F4A7C15
    key = splitmix((seed ^ splitmix(frame * golden & MASK)) & MASK)

    def choose(book: int, logits) -> int:
        values, codes = logits.topk(SAMPLING.top_k)
        probabilities = values.double().softmax(-1).tolist()
        mass, best = 0.0, (-math.inf, 0)
        for value, probability, code in zip(values.tolist(), probabilities, codes.tolist(), strict=True):
            if mass >= SAMPLING.top_p:
                break
            mass += probability
            bits = splitmix((splitmix((key + book) & MASK) + (code + 1) * golden) & MASK) >> 40
            best = max(best, (value - math.log(-math.log((bits + 0.5) * 2.0**-24)), code))
        return best[1]

    return choose


def draws(seeds, frame: int, greedy: bool = False) -> Draws:
    count = len(seeds)
    return Draws(torch.tensor(seeds), torch.full((count,), frame), torch.full((count,), greedy))


def test_greedy_codes_equal_transformers(reference, predictor):
    hidden, first, tokens = inputs(2)
    for frame in range(2):
        codes, total = predictor.frame(hidden[frame], first[frame], tokens[frame], draws([0] * RUNS, frame, True))
        assert torch.equal(codes[:, 0], tokens[frame])
        for run in range(0, RUNS, 3):
            expected, summed = reference_frame(
                reference, hidden[frame, run], first[frame, run], lambda _, logits: int(logits.argmax())
            )
            assert codes[run, 1:].tolist() == expected
            torch.testing.assert_close(total[run], summed, atol=1e-5, rtol=1e-5)


def test_drawn_codes_equal_a_reference_of_each_run(reference, predictor):
    hidden, first, tokens = inputs(2)
    seeds = [2**63 - 1 - 977 * run for run in range(RUNS)]
    for frame in range(2):
        codes, _ = predictor.frame(hidden[frame], first[frame], tokens[frame], draws(seeds, frame))
        for run in range(0, RUNS, 3):
            expected, _ = reference_frame(reference, hidden[frame, run], first[frame, run], drawn(seeds[run], frame))
            assert codes[run, 1:].tolist() == expected


def test_a_run_draws_the_same_alone_and_among_sixteen(predictor):
    hidden, first, tokens = inputs(FRAMES)
    seeds = list(range(RUNS))
    for frame in range(FRAMES):
        together, _ = predictor.frame(hidden[frame], first[frame], tokens[frame], draws(seeds, frame))
        for run in range(RUNS):
            one = slice(run, run + 1)
            alone, _ = predictor.frame(
                hidden[frame, one], first[frame, one], tokens[frame, one], draws(seeds[one], frame)
            )
            assert torch.equal(alone[0], together[run])


def test_seed_and_frame_name_the_draw(predictor):
    hidden, first, tokens = (tensor[0, :1] for tensor in inputs(1))
    codes = [
        predictor.frame(hidden, first, tokens, draws([s], f))[0].tolist() for s, f in ((1, 0), (1, 0), (2, 0), (1, 1))
    ]
    assert codes[0] == codes[1]
    assert codes[0] != codes[2] != codes[3] != codes[0]


def test_drawn_and_greedy_runs_share_a_batch(predictor):
    hidden, first, tokens = (tensor[0] for tensor in inputs(1))
    mixed = Draws(torch.arange(RUNS), torch.zeros(RUNS, dtype=torch.long), torch.arange(RUNS) % 2 == 0)
    codes, _ = predictor.frame(hidden, first, tokens, mixed)
    best, _ = predictor.frame(hidden, first, tokens, draws([0] * RUNS, 0, True))
    sampled, _ = predictor.frame(hidden, first, tokens, draws(list(range(RUNS)), 0))
    assert torch.equal(codes[::2], best[::2]) and torch.equal(codes[1::2], sampled[1::2])


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_every_weight_is_accounted_for(reference, change):
    weights = dict(reference.state_dict())
    if change == "missing":
        del weights["model.layers.1.self_attn.k_norm.weight"]
    else:
        weights["model.layers.1.self_attn.bias"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"k_norm|self_attn\.bias"):
        CodePredictor(reference.config, HIDDEN, RUNS, SAMPLING).load_weights(weights.items())


# --- captured frames: by a recorder of the test kit, as there is no GPU ---------------------------------------------
@pytest.fixture
def captured(reference):
    """A predictor whose frames are replayed, and the recorder."""
    from tests.kit.host_graphs import HostRecorder

    predictor, recorder = CodePredictor(reference.config, HIDDEN, RUNS, SAMPLING), HostRecorder()
    predictor.load_weights(reference.state_dict().items())
    predictor.capture(recorder)
    recorder.replays = 0
    return predictor, recorder


def test_captured_frames_equal_eager_ones_for_any_number_of_runs(predictor, captured, caplog):
    """Fewer runs than a graph has are filled up with those of the step before, which must change nothing."""
    hidden, first, tokens = (tensor[0] for tensor in inputs(1))
    graphs, recorder = captured
    for count in (16, 3, 1, 5, 8, 2, 16):
        some = slice(RUNS - count, RUNS)
        seeds = list(range(count))
        expected, sums = predictor.frame(hidden[some], first[some], tokens[some], draws(seeds, count))
        codes, total = graphs.frame(hidden[some], first[some], tokens[some], draws(seeds, count))
        assert torch.equal(codes, expected)
        torch.testing.assert_close(total, sums)
    assert recorder.replays == 7, "every frame was replayed"
    assert not caplog.records


def test_a_replay_follows_its_inputs(captured):
    """T8184-b: other values in the same shape give other codes and sums, the same ones give the same."""
    hidden, first, tokens = (tensor[0, :4] for tensor in inputs(1))
    predictor, _ = captured

    def bytes_of(rows):
        codes, total = predictor.frame(rows, first, tokens, draws([1, 2, 3, 4], 0))
        return codes.numpy().tobytes(), total.numpy().tobytes()

    one, other, again = bytes_of(hidden), bytes_of(hidden + 1), bytes_of(hidden)
    assert one == again and one[0] != other[0] and one[1] != other[1]


@pytest.mark.parametrize("lie", ["stale", "frozen", "refuses"])
def test_graphs_that_make_other_frames_are_not_used(lie, reference, predictor, caplog):
    from tests.kit.host_graphs import HostRecorder

    liar = CodePredictor(reference.config, HIDDEN, RUNS, SAMPLING)
    liar.load_weights(reference.state_dict().items())
    recorder = HostRecorder(lie)
    with caplog.at_level("WARNING"):
        liar.capture(recorder)
    (warning,) = (record.getMessage() for record in caplog.records if record.name == "triton_omni.ar")
    why = "no capture here" if lie == "refuses" else "captured frames of 1 runs differ from eager ones ("
    assert warning.startswith(why) and warning.endswith(": the code predictor runs without CUDA graphs")
    recorder.replays = 0
    hidden, first, tokens = (tensor[0] for tensor in inputs(1))
    codes, _ = liar.frame(hidden, first, tokens, draws(list(range(RUNS)), 0))
    expected, _ = predictor.frame(hidden, first, tokens, draws(list(range(RUNS)), 0))
    assert torch.equal(codes, expected) and not recorder.replays


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_frames_of_cuda_graphs_equal_eager_ones(reference, caplog):
    hidden, first, tokens = (tensor[0].cuda() for tensor in inputs(1))
    predictor = CodePredictor(reference.config, HIDDEN, RUNS, SAMPLING).cuda()
    predictor.load_weights(reference.state_dict().items())
    given = Draws(torch.arange(RUNS).cuda(), torch.zeros(RUNS, dtype=torch.long).cuda(), torch.arange(RUNS).cuda() < 3)
    expected = predictor.frame(hidden, first, tokens, given)[0].clone()
    predictor.capture()
    assert predictor._graphs, [record.getMessage() for record in caplog.records]
    assert torch.equal(predictor.frame(hidden, first, tokens, given)[0], expected)
