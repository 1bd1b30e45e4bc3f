# SPDX-License-Identifier: Apache-2.0
"""qwen3_tts on a real server with the tiny checkpoint: what comes out of the proxy is what plain torch says.

Codes do not leave the server. The audio is that of the reference's codes to 1e-5 (a 16-bit step through the proxy), and
one other code in any book of a frame changes it by more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from tests.kit.server_calls import wait_until_idle
from tests.kit.triton_server import RunningServer, running_server
from tests.kit.tts_reference import FRAMES
from triton_omni import Client
from triton_omni.backends.wire import GenerateRequest, Sampling, WordsPiece

pytestmark = [pytest.mark.triton, pytest.mark.timeout(240)]
SAME, PCM16 = 1e-5, 1 / 32767
MAX_WORDS_S = 2.0  # 29 frames are longer
DEPLOY = Path(__file__).resolve().parents[2] / "backends" / "pipelines" / "qwen3_tts" / "deploy-cpu.yaml"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    pytest.importorskip("transformers", reason="needs the engine environment (make setup)")
    from tests.kit.tiny_tts import tiny_tts

    return tiny_tts(tmp_path_factory.mktemp("tiny_tts"))


@pytest.fixture(scope="module")
def spoken(checkpoint) -> list[tuple[GenerateRequest, np.ndarray]]:
    """Requests, and the audio of the codes that plain torch makes of them."""
    import torch

    from tests.kit.tts_reference import TtsReference
    from tests.kit.tts_runs import SPOKEN, request
    from triton_omni.backends.pipelines.qwen3_tts.code2wav import load

    reference, network = TtsReference(checkpoint), load(str(checkpoint), "").eval()
    found = []
    for speech in SPOKEN:
        codes = torch.from_numpy(reference.speak(speech).T)
        with torch.no_grad():
            found.append((request(speech), network(codes[None])[0, 0].numpy()))
            other = codes.clone()
            other[7, 3] = (other[7, 3] + 1) % 2048
            assert np.abs(network(other[None])[0, 0].numpy() - found[-1][1]).max() > 2 * PCM16
    return found


@pytest.fixture(scope="module")
def aligner(tmp_path_factory):
    from tests.kit.tiny_aligner import tiny_aligner

    folder = tmp_path_factory.mktemp("tiny_aligner")
    tiny_aligner(folder)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint, aligner, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tts")
    deploy = yaml.safe_load(DEPLOY.read_text(encoding="utf-8"))
    for stage in deploy["stages"].values():
        stage["engine"]["model"] = str(checkpoint)
    deploy["stages"]["aligner"]["engine"] = {"model": str(aligner), "max_audio_s": MAX_WORDS_S}
    deploy["stages"]["talker"]["engine"] |= {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 512}
    deploy["stages"]["talker"]["engine"]["sampling"] = {"temperature": 0.0, "max_tokens": FRAMES}
    file = folder / "deploy.yaml"
    file.write_text(yaml.safe_dump(deploy), encoding="utf-8")
    command = [sys.executable, "-m", "triton_omni.cli", "repository", "--pipeline", "qwen3_tts"]
    subprocess.run([*command, "--deploy", str(file), "--out", str(folder)], check=True, timeout=60)
    with running_server([folder / "qwen3_tts"], supervised=True, proxy=True, timeout_s=200) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer):
    with Client(server.grpc, key=server.operator_key) as client:
        yield client


def audio_of(client: Client, request: GenerateRequest, begun: threading.Event | None = None) -> np.ndarray:
    parts: list[np.ndarray] = []
    for piece in client.generate("qwen3_tts", request, timeout_s=120):
        if piece.audio is not None:
            parts.append(piece.audio)
            if begun is not None:
                begun.set()
    return np.concatenate(parts)


def posted(server: RunningServer, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        f"{server.openai}/audio/speech", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


def test_alone_and_joining_the_audio_is_that_of_plain_torch(client: Client, spoken: Any) -> None:
    """Each joins when the audio of the one before it has begun; chunks of one frame, and the deployment's ramp."""
    for chunks in ({}, {"code2wav": {"first_chunk_frames": 1, "chunk_frames": 1}}):
        begun = [threading.Event() for _ in spoken]

        def one(place: int, chunks: Any = chunks, begun: Any = begun) -> np.ndarray:
            if place:
                assert begun[place - 1].wait(120)
            request, _ = spoken[place]
            given = GenerateRequest(
                operation="speech", input=request.input, speech=request.speech, sampling=request.sampling,
                stages=request.stages | chunks,
            )  # fmt: skip
            try:
                return audio_of(client, given, begun[place])
            finally:
                begun[place].set()

        with ThreadPoolExecutor(len(spoken)) as pool:
            answers = list(pool.map(one, range(len(spoken))))
        for audio, (_, wave) in zip(answers, spoken, strict=True):
            assert audio.shape == wave.shape and np.abs(audio - wave).max() <= SAME
    request, wave = spoken[0]
    assert np.abs(audio_of(client, request) - wave).max() <= SAME


def test_words_come_behind_the_audio_and_cost_none_of_it(client: Client, server: RunningServer, spoken: Any) -> None:
    """Short speech gets them; for speech that is too long the aligner fails, and the request completes without."""
    for frames, has_words in ((20, True), (FRAMES, False)):
        request, wave = spoken[0]
        given = msgspec.structs.replace(
            request, modalities=("audio", "words"), sampling=Sampling(temperature=0.0, max_tokens=frames)
        )
        pieces = list(client.generate("qwen3_tts", given, timeout_s=120))
        kinds = [piece.event.type for piece in pieces if piece.event.type in ("audio", "words", "end")]
        assert kinds == ["audio"] * kinds.count("audio") + ["words"] * has_words + ["end"]
        audio = np.concatenate([piece.audio for piece in pieces if piece.audio is not None])
        assert len(audio) == (frames - 1) * 1920 and np.abs(audio - wave[: len(audio)]).max() <= SAME
        end = pieces[-1].event
        assert end.outcome == "completed" and list(end.missing) == ([] if has_words else ["words"])
        if has_words:
            found = pieces[-2].event.piece
            assert isinstance(found, WordsPiece)
            assert [word.word for word in found.words] == ["Hello", "there", "this", "is", "a", "test"]
            times = [t for word in found.words for t in (word.start_s, word.end_s)]
            assert times == sorted(times) and times[-1] <= len(audio) / 24_000
        else:
            assert "at most 2 s to get times of words" in end.missing["words"]
    wait_until_idle(server, "qwen3_tts", timeout_s=20.0)


def test_speech_through_the_proxy(server: RunningServer, spoken: Any) -> None:
    request, wave = spoken[2]
    body = {
        "model": "qwen3_tts", "input": request.input, "voice": "Vivian", "language": "zh", "response_format": "pcm",
        "instructions": request.speech.instructions,
    }  # fmt: skip
    pcm = np.frombuffer(posted(server, body), np.int16) / 32767
    assert pcm.shape == wave.shape and np.abs(pcm - wave).max() <= PCM16
    with pytest.raises(urllib.error.HTTPError) as caught:
        posted(server, body | {"voice": "unknown"})
    said = json.loads(caught.value.read())["error"]
    assert caught.value.code == 400 and "available: aiden" in said["message"] and said["param"] == "voice"
    wait_until_idle(server, "qwen3_tts", timeout_s=20.0)
