# SPDX-License-Identifier: Apache-2.0
"""qwen3_omni on a real server with the tiny checkpoint: what comes out of the proxy is what transformers says."""

from __future__ import annotations

import base64
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from backends.wire import BadRequest, GenerateRequest, Message, Part, Sampling
from client import Client
from tests.kit.calls import idle
from tests.kit.omni_chats import CHATS, FRAMES
from tests.kit.server import RunningServer, running_server, wait_for

pytestmark = [pytest.mark.triton, pytest.mark.timeout(600)]
SAMPLES_PER_FRAME = 1920


def deploy(model: Path) -> dict[str, Any]:
    common = {"model": str(model), "dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}
    thinker = common | {"max_model_len": 1024, "limit_mm_per_prompt": {"image": 1, "audio": 1, "video": 0}}
    talker = common | {"max_model_len": 512, "sampling": {"temperature": 0.0, "max_tokens": FRAMES}}
    code2wav = {"model": str(model), "left_context_frames": 64}
    engines = {"thinker": thinker, "talker": talker, "code2wav": code2wav}
    return {"pipeline": "qwen3_omni", "stages": {k: {"device": "cpu", "engine": v} for k, v in engines.items()}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    pytest.importorskip("transformers", reason="needs the engine environment (make setup)")
    from tests.kit.tiny_omni import tiny_omni

    return tiny_omni(tmp_path_factory.mktemp("tiny_omni"))


@pytest.fixture(scope="module")
def reference(checkpoint):
    from tests.kit.omni_chats import references
    from tests.kit.tiny_omni import Reference

    return references(Reference(checkpoint))


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("omni")
    file = folder / "deploy.yaml"
    file.write_text(yaml.safe_dump(deploy(checkpoint)), encoding="utf-8")
    command = [sys.executable, "-m", "backends.config.repository", "--pipeline", "qwen3_omni"]
    subprocess.run([*command, "--deploy", str(file), "--out", str(folder)], check=True, timeout=60)
    with running_server([folder / "qwen3_omni"], supervised=True, proxy=True, timeout_s=300) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer):
    with Client(server.grpc) as client:
        yield client


def chat(place: int, *modalities: str) -> GenerateRequest:
    said, tokens = CHATS[place]
    messages = tuple(Message(role, text) for role, text in said)
    return GenerateRequest(
        messages=messages, modalities=modalities, sampling=Sampling(temperature=0.0, max_tokens=tokens)
    )


def collect(client: Client, request: GenerateRequest, **media: np.ndarray):
    """(token ids, samples, kinds of events in order, the end)."""
    tokens: list[int] = []
    audio: list[np.ndarray] = []
    kinds: list[str] = []
    for piece in client.generate("qwen3_omni", request, timeout_s=120, **media):
        kinds.append(piece.event.type)
        tokens += piece.event.meta.get("token_ids", [])
        if piece.audio is not None:
            audio.append(piece.audio)
        last = piece.event
    return tokens, np.concatenate(audio) if audio else np.zeros(0, np.float32), kinds, last


def test_eight_chats_at_once_are_transformers(client: Client, reference: Any) -> None:
    with ThreadPoolExecutor(len(CHATS)) as pool:
        answers = list(pool.map(lambda place: collect(client, chat(place, "text", "audio")), range(len(CHATS))))
    for (tokens, audio, kinds, last), spoken in zip(answers, reference, strict=True):
        assert tokens == spoken.token_ids
        assert len(audio) in (len(spoken.wave), len(spoken.wave) + SAMPLES_PER_FRAME)  # the frame it leaves out
        assert np.abs(audio[: len(spoken.wave)] - spoken.wave).max() < 1e-5
        assert kinds.count("end") == 1 and kinds[-1] == "end"
        assert last.outcome == "completed"


def test_text_alone_opens_no_speech_stage(client: Client, reference: Any) -> None:
    tokens, audio, _, last = collect(client, chat(2, "text"))
    assert tokens == reference[2].token_ids
    assert not len(audio)
    assert last.stage == "thinker"


def test_a_picture_and_a_sound_are_read(client: Client) -> None:
    """Exactness is tests/reference's; here: the tensors reach the thinker, and others give another answer."""

    def answer(seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        image = rng.integers(0, 255, (96, 64, 3), dtype=np.uint8)
        sound = rng.standard_normal(16_000).astype(np.float32) * 0.1
        parts = (
            Part("image", length=image.size, shape=image.shape),
            Part("audio", length=sound.size, sample_rate=16_000),
            Part("text", "what is this"),
        )
        request = GenerateRequest(
            messages=(Message("user", parts),),
            modalities=("text", "audio"),
            sampling=Sampling(temperature=0.0, max_tokens=12),
        )
        tokens, audio, _, _ = collect(client, request, image=image.reshape(-1), audio=sound)
        assert len(audio)
        return tokens

    assert answer(1) == answer(1)
    assert len(answer(1)) == 12


def test_the_openai_sdk_hears_it_stream(server: RunningServer, reference: Any) -> None:
    from openai import OpenAI

    said, tokens = CHATS[1]
    stream = OpenAI(base_url=server.openai, api_key="none", timeout=120, max_retries=0).chat.completions.create(
        model="qwen3_omni",
        messages=[{"role": role, "content": text} for role, text in said],
        modalities=["text", "audio"],
        audio={"voice": "Ethan", "format": "pcm16"},
        max_tokens=tokens,
        temperature=0,
        stream=True,
    )
    pcm: list[bytes] = []
    for chunk in stream:
        for choice in chunk.choices:
            audio: Any = getattr(choice.delta, "audio", None)  # newer SDKs have a class for it, older a dict
            data = audio.get("data") if isinstance(audio, dict) else audio.data if audio is not None else None
            if data:
                pcm.append(base64.b64decode(data))
    samples = np.frombuffer(b"".join(pcm), np.int16) / 32767
    wave = reference[1].wave
    assert np.abs(samples[: len(wave)] - wave).max() < 1e-4


def test_unknown_voices_are_refused_with_the_known_ones(client: Client, server: RunningServer) -> None:
    request = GenerateRequest(messages=(Message("user", "x"),), modalities=("audio",), voice="nobody")
    with pytest.raises(BadRequest, match="aiden, chelsie, ethan") as caught:
        collect(client, request)
    assert caught.value.where == "voice"
    wait_for(lambda: idle(server, "qwen3_omni"), 10.0, "every run is over")


def test_cancelled_requests_leave_nothing(client: Client, server: RunningServer, reference: Any) -> None:
    for pieces in (1, 2, 5):
        answer = client.generate("qwen3_omni", chat(2, "text", "audio"), timeout_s=60)
        for _ in range(pieces):
            next(answer)
        answer.close()
    wait_for(lambda: idle(server, "qwen3_omni"), 10.0, "every run is over")
    tokens, _, _, _ = collect(client, chat(2, "text", "audio"))
    assert tokens == reference[2].token_ids
