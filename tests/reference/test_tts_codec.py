# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS's codec: audio that is decoded in chunks, beside other runs, is that of all frames at once."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.kit.tiny_tts import tiny_tts
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.engine import EngineFinished, EngineOutput, OptionsError, Run
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest

pytest.importorskip("torch", reason="needs the engine environment (make setup)")
from tests.kit.tts_runs import stage
from triton_omni.backends.pipelines.qwen3_tts.code2wav import load

pytestmark = pytest.mark.timeout(120)
CLOSE = 1e-6
SAMPLES = 1920
RAMP = {"first_chunk_frames": 1, "ramp_frames": [2, 4, 8, 16], "chunk_frames": 25}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_tts(tmp_path_factory.mktemp("tiny_tts"), "base")


@pytest.fixture(scope="module")
def network(folder):
    return load(str(folder), "").eval()


def random_codes(frames, seed=0):
    return np.random.default_rng(seed).integers(0, 2048, (frames, 16), dtype=np.int16)


def whole(network, codes):
    import torch

    with torch.no_grad():
        return network(torch.from_numpy(codes.T.astype(np.int64))[None])[0, 0].numpy()


def decode(engine, many, pieces=1, context=None):
    """Chunks of audio of several runs at once; every turn brings `pieces` frames of each."""
    runs = [Run(os.urandom(16), "r", GenerateRequest(), upstream=frozenset({"talker"})) for _ in many]
    audio, ends = {run: [] for run in runs}, {}
    for run in runs:
        engine.open(run)
        if context is not None:
            assert engine.feed(run, Chunk(run.id, "talker", tensors=(Tensor.of("context", context),)), False)
    for at in range(0, max(map(len, many)) + pieces, pieces):
        for run, codes in zip(runs, many, strict=True):
            part = codes[at : at + pieces]
            if len(part):
                chunk = Chunk(run.id, "talker", tensors=(Tensor.of("codes", part),))
                assert engine.feed(run, chunk, at + pieces >= len(codes))
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, EngineOutput):
                    audio[event.run].append(event.tensors[0].data)
                elif isinstance(event, EngineFinished):
                    ends[event.run] = event
    for run, codes in zip(runs, many, strict=True):
        assert ends[run].usage == {"audio_samples": len(codes) * SAMPLES}
    return [audio[run] for run in runs]


@pytest.mark.parametrize("chunks", [(1, 1), (2, 3), (7, 10), (25, 25)])
def test_cutting_changes_nothing(folder, network, chunks):
    """100 frames are more than the window of the attention: its keys are dropped on the way."""
    codes = random_codes(100)
    engine = stage("code2wav", folder, chunks={"first_chunk_frames": chunks[0], "chunk_frames": chunks[1]})
    pieces = decode(engine, [codes], pieces=20)[0]
    assert np.abs(np.concatenate(pieces) - whole(network, codes)).max() < CLOSE


def test_a_long_speech_by_the_ramp_of_the_deploy_files(folder, network):
    codes = random_codes(420, seed=3)
    pieces = decode(stage("code2wav", folder, chunks=RAMP), [codes], pieces=25)[0]
    assert np.abs(np.concatenate(pieces) - whole(network, codes)).max() < CLOSE
    assert [len(piece) // SAMPLES for piece in pieces] == [1, 2, 4, 8, 16, *[25] * 15, 14]


def test_runs_of_any_length_side_by_side_equal_alone(folder, network):
    many = [random_codes(frames, seed) for seed, frames in enumerate((1, 7, 33, 80, 4, 29))]
    for codes, pieces in zip(many, decode(stage("code2wav", folder, chunks=RAMP), many, pieces=3), strict=True):
        assert np.abs(np.concatenate(pieces) - whole(network, codes)).max() < CLOSE


def test_codes_outside_the_codebook_are_refused(folder):
    engine = stage("code2wav", folder)
    run = Run(os.urandom(16), "r", GenerateRequest())
    engine.open(run)
    for bad in (2048, -1):
        with pytest.raises(BadRequest, match="from 0 to below 2048"):
            engine.feed(run, Chunk(run.id, "", tensors=(Tensor.of("codes", np.full((1, 16), bad, np.int16)),)), True)


def test_a_checkpoint_without_its_codec_is_named(folder, tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(OptionsError, match=r"speech_tokenizer.config\.json is missing"):
        stage("code2wav", tmp_path)
