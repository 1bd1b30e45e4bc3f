# SPDX-License-Identifier: Apache-2.0
"""Plain torch, stage `voice` and the codec against qwen-tts 0.1.1 itself, which runs in an environment of its own.

With what test_tts_talker.py and test_tts_clones.py show, the served codes and audio are qwen-tts's. `make qwen-tts`
makes the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.tiny_tts import tiny_tts
from tests.kit.tts_reference import Speech, TtsReference
from tests.kit.tts_runs import FOX, HELLO, SPOKEN, TRANSCRIPT, recording, stage
from triton_omni.backends.pipelines.qwen3_tts.code2wav import load
from triton_omni.backends.supervisor.home import find_home

FOLDER = find_home().root / "qwen-tts"
RUNNER = Path(__file__).resolve().parents[1] / "kit" / "qwen_tts_reference.py"
FRAMES = 20
CLOSE = 2e-6
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="needs qwen-tts beside the engine environment (make qwen-tts)"),
]


def said_by_qwen_tts(folder: Path, jobs: list[dict[str, Any]], tmp_path: Path) -> Any:
    """Arrays by name and number of the job; see the runner."""
    for job in jobs:
        job["max_new_tokens"] = FRAMES
    (tmp_path / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    command = [sys.executable, str(RUNNER), str(folder), str(tmp_path / "jobs.json"), str(tmp_path / "out.npz")]
    run = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(FOLDER)}, capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "newly initialized" not in run.stderr, "the tiny checkpoint lacks tensors of the published layout"
    return np.load(tmp_path / "out.npz")


def wave_of(folder: Path, codes: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return load(str(folder), "").eval()(torch.from_numpy(codes.T.astype(np.int64))[None])[0, 0].numpy()


def test_voices(tmp_path: Path) -> None:
    folder = tiny_tts(tmp_path / "voices")
    said = [speech for speech in SPOKEN if speech.voice]
    jobs = [
        {
            "call": "generate_custom_voice", "text": s.text, "speaker": s.voice, "language": s.language,
            "instruct": s.instructions, "non_streaming_mode": not s.text_per_frame,
        }
        for s in said
    ]  # fmt: skip
    found, model = said_by_qwen_tts(folder, jobs, tmp_path), TtsReference(folder)
    for number, speech in enumerate(said):
        codes = model.speak(speech, FRAMES)
        np.testing.assert_array_equal(found[f"codes_{number}"], codes)
        assert np.abs(found[f"wave_{number}"] - wave_of(folder, codes)).max() < CLOSE


def test_designed_voices(tmp_path: Path) -> None:
    folder = tiny_tts(tmp_path / "design", "voice_design")
    said = [Speech(HELLO, language="english", instructions="an old man"), Speech(FOX, instructions="a child")]
    jobs = [
        {
            "call": "generate_voice_design", "text": s.text, "language": s.language, "instruct": s.instructions,
            "non_streaming_mode": True,
        }
        for s in said
    ]  # fmt: skip
    found, model = said_by_qwen_tts(folder, jobs, tmp_path), TtsReference(folder)
    for number, speech in enumerate(said):
        np.testing.assert_array_equal(found[f"codes_{number}"], model.speak(speech, FRAMES))


def test_clones(tmp_path: Path) -> None:
    folder = tiny_tts(tmp_path / "base", "base")
    samples = recording()
    np.save(tmp_path / "ref.npy", samples)
    said = [
        Speech(HELLO, language="english", transcript=TRANSCRIPT),
        Speech(FOX, language="french", text_per_frame=False),
        Speech(FOX, transcript=TRANSCRIPT, text_per_frame=False),
    ]
    jobs = [
        {
            "call": "generate_voice_clone", "text": s.text, "language": s.language,
            "ref_audio": str(tmp_path / "ref.npy"), "ref_text": s.transcript or None,
            "x_vector_only_mode": not s.transcript, "non_streaming_mode": s.text_per_frame is False,
        }
        for s in said
    ]  # fmt: skip
    found, model = said_by_qwen_tts(folder, jobs, tmp_path), TtsReference(folder)
    reader = stage("voice", folder)._reader
    vector, frames = reader.vector(samples), reader.codes(samples)
    for number, speech in enumerate(said):
        assert np.abs(found[f"vector_{number}"] - vector).max() < CLOSE
        recorded = frames if speech.transcript else None
        codes = model.speak(speech, FRAMES, vector, recorded)
        np.testing.assert_array_equal(found[f"codes_{number}"], codes)
        if recorded is not None:
            np.testing.assert_array_equal(found[f"frames_{number}"], frames)
            wave = wave_of(folder, np.concatenate([frames, codes]))[len(frames) * 1920 :]
            theirs = found[f"wave_{number}"][-len(wave) :]  # its cut may be some samples early
            assert np.abs(theirs - wave[-len(theirs) :]).max() < CLOSE
