# SPDX-License-Identifier: Apache-2.0
"""qwen3_omni on a real server with the tiny checkpoint: what comes out of the proxy is what transformers says.

Codes do not leave the server. That every code of every frame is transformers' is read off the audio: the one that
comes out is the reference's to 1e-5, and one other code in any book of any frame changes it by more.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from tests.kit.omni_chats import CHATS, FRAMES
from tests.kit.omni_media import CASES, TOKENS, openai_content, our_request
from tests.kit.server_calls import wait_until_idle
from tests.kit.triton_server import RunningServer, running_server, wait_for
from triton_omni import Client
from triton_omni.backends.core.outputs import TextPiece
from triton_omni.backends.wire import BadRequest, GenerateRequest, Message, Sampling, SpeechParams

pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]
SAME = 1e-5
HALF = "\ufffd"  # what an answer that was cut inside a character ends with, or not
PCM16 = 1 / 32767  # what a 16-bit sample may be away from the float
IN_VIDEOS = [name for name, case in CASES.items() if any(word.startswith("videoaudio") for word in case)]
"""Cases with the audio of a video, which OpenAI's words have no place for."""
Key = int | str
"""A chat's place in CHATS or a case's name in CASES."""
EVERYTHING: list[Key] = [*range(len(CHATS)), *CASES]
SAYABLE = [key for key in EVERYTHING if key not in IN_VIDEOS]
TIGHT = {"max_num_batched_tokens": 48, "block_size": 32, "vllm": {"num_gpu_blocks_override": 18}}
"""At most 48 tokens a step, and a KV cache that cannot hold all runs."""


def deploy(model: Path, thinker: dict[str, Any], talker: dict[str, Any]) -> dict[str, Any]:
    common = {"model": str(model), "dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}
    media = {"limit_mm_per_prompt": {"image": 2, "audio": 2, "video": 1}}
    greedy = {"sampling": {"temperature": 0.0, "max_tokens": FRAMES}}
    engines = {
        # blocks of the cache are shorter than prompts here, so that prefixes can be found again
        "thinker": common | media | {"max_model_len": 512, "enable_prefix_caching": True, "block_size": 32} | thinker,
        "talker": common | greedy | {"max_model_len": 512} | talker,
        "code2wav": {"model": str(model)},
    }
    return {"pipeline": "qwen3_omni", "stages": {k: {"device": "cpu", "engine": v} for k, v in engines.items()}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    pytest.importorskip("transformers", reason="needs the engine environment (make setup)")
    from tests.kit.tiny_omni import tiny_omni

    return tiny_omni(tmp_path_factory.mktemp("tiny_omni"))


@pytest.fixture(scope="module")
def model(checkpoint):
    from tests.kit.tiny_omni import Reference

    return Reference(checkpoint)


@pytest.fixture(scope="module")
def reference(model) -> dict[Key, Any]:
    """What transformers makes of everything."""
    from tests.kit.omni_chats import references
    from tests.kit.omni_media import see

    return dict(enumerate(references(model))) | {name: see(model, case) for name, case in CASES.items()}


@pytest.fixture(scope="module", params=["roomy", "tight"])
def server(request, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("omni")
    file = folder / "deploy.yaml"
    options = TIGHT if request.param == "tight" else {}
    file.write_text(yaml.safe_dump(deploy(checkpoint, options, options)), encoding="utf-8")
    command = [sys.executable, "-m", "triton_omni.cli", "repository", "--pipeline", "qwen3_omni"]
    subprocess.run([*command, "--deploy", str(file), "--out", str(folder)], check=True, timeout=60)
    with running_server([folder / "qwen3_omni"], supervised=True, proxy=True, timeout_s=600) as running:
        yield running


@pytest.fixture
def is_tight(request) -> bool:
    return request.node.callspec.params["server"] == "tight"


@pytest.fixture(scope="module")
def client(server: RunningServer):
    with Client(server.grpc, key=server.operator_key) as client:
        yield client


@dataclass
class Answer:
    """What came of one request; `tokens` is empty where the proxy does not show them."""

    text: str = ""
    tokens: Sequence[int] = ()
    audio: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    finish_reason: str = ""
    preemptions: float = 0


def request_of(key: Key, *modalities: str, **more: Any) -> tuple[GenerateRequest, dict[str, Any]]:
    """(request, media tensors)"""
    if isinstance(key, str):
        return our_request(CASES[key], modalities=modalities, **more)
    said, tokens = CHATS[key]
    messages = tuple(Message(role, text) for role, text in said)  # pyright: ignore[reportArgumentType]
    sampling = Sampling(temperature=0.0, max_tokens=tokens)
    return GenerateRequest(messages=messages, modalities=modalities, sampling=sampling, **more), {}


def ask(server: RunningServer, key: Key, begun: Callable[[], None] = lambda: None) -> Answer:
    """Through the OpenAI SDK, as a stream."""
    from openai import OpenAI

    if isinstance(key, str):
        messages: Any = [{"role": "user", "content": openai_content(CASES[key])}]
        tokens = TOKENS
    else:
        said, tokens = CHATS[key]
        messages = [{"role": role, "content": text} for role, text in said]
    stream = OpenAI(base_url=server.openai, api_key="none", timeout=240, max_retries=0).chat.completions.create(
        model="qwen3_omni",
        messages=messages,
        modalities=["text", "audio"],
        audio={"voice": "Ethan", "format": "pcm16"},
        max_tokens=tokens,
        temperature=0,
        stream=True,
    )
    answer, pcm = Answer(), b""
    for chunk in stream:
        for choice in chunk.choices:
            audio: Any = getattr(choice.delta, "audio", None) or {}
            audio = audio if isinstance(audio, dict) else audio.model_dump()  # newer SDKs have a class for it
            answer.text += audio.get("transcript") or ""
            pcm += base64.b64decode(audio.get("data") or "")
            answer.finish_reason = choice.finish_reason or answer.finish_reason
            if pcm:
                begun()
    answer.audio = (np.frombuffer(pcm, np.int16) / 32767).astype(np.float32)
    return answer


def ask_grpc(client: Client, key: Key, *modalities: str) -> Answer:
    """Through our own client, which shows the tokens, float samples and the engines' counts."""
    request, media = request_of(key, *modalities)
    answer, audio = Answer(), [np.zeros(0, np.float32)]
    given = {name: tensor.data for name, tensor in media.items()}
    kinds: list[str] = []
    for piece in client.generate("qwen3_omni", request, timeout_s=240, media=given):
        kinds.append(piece.event.type)
        answer.tokens = [
            *answer.tokens,
            *(piece.event.piece.token_ids if isinstance(piece.event.piece, TextPiece) else ()),
        ]
        answer.text += piece.text or ""
        if piece.audio is not None:
            audio.append(piece.audio)
    assert kinds.count("end") == 1 and kinds[-1] == "end" and piece.event.outcome == "completed"
    answer.finish_reason, answer.preemptions = piece.event.finish_reason, piece.event.usage["preemptions"]
    answer.audio = np.concatenate(audio)
    return answer


def check(model: Any, answer: Answer, spoken: Any, tolerance: float) -> None:
    if answer.tokens:
        assert answer.tokens == spoken.token_ids
    text = model.processor.tokenizer.decode(spoken.token_ids, skip_special_tokens=True)
    assert answer.text.rstrip(HALF) == text.rstrip(HALF)
    assert answer.audio.shape == spoken.wave.shape
    assert np.abs(answer.audio - spoken.wave).max() <= tolerance


def test_any_other_code_would_show(model: Any, reference: dict[Key, Any]) -> None:
    import torch

    codes = torch.tensor(reference[0].codes)
    for book in range(codes.shape[0]):
        for frame in range(codes.shape[1]):
            other = codes.clone()
            other[book, frame] = (other[book, frame] + 1) % 128
            with torch.no_grad():
                wave = model.model.code2wav.chunked_decode(other[None], chunk_size=300, left_context_size=25)
            assert np.abs(wave[0, 0].numpy() - reference[0].wave).max() > 2 * PCM16


def test_alone_everything_is_transformers(
    server: RunningServer, client: Client, model: Any, reference: dict[Key, Any]
) -> None:
    for key in EVERYTHING:
        check(model, ask_grpc(client, key, "text", "audio"), reference[key], SAME)
    for key in SAYABLE:
        check(model, ask(server, key), reference[key], PCM16)


def test_joining_and_leaving_everything_is_transformers(
    server: RunningServer, client: Client, model: Any, reference: dict[Key, Any], is_tight: bool
) -> None:
    """Each request starts when the audio of the one before it has begun; between them others come and go. Then all at
    once, when everything is in the prefix and encoder caches."""
    begun = [threading.Event() for _ in SAYABLE]

    def one(place: int) -> Answer:
        if place:
            assert begun[place - 1].wait(240)
            stranger = client.generate("qwen3_omni", request_of(place % len(CHATS), "text", "audio")[0], timeout_s=240)
            for _ in range(1 + place % 4):
                next(stranger)
            stranger.close()
        try:
            return ask(server, SAYABLE[place], begun[place].set)
        finally:
            begun[place].set()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(len(SAYABLE))))
    for key, answer in zip(SAYABLE, answers, strict=True):
        check(model, answer, reference[key], PCM16)
    preempted = 0.0
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda key: ask_grpc(client, key, "text", "audio"), EVERYTHING))
        for key, answer in zip(EVERYTHING, answers, strict=True):
            check(model, answer, reference[key], SAME)
        preempted += sum(answer.preemptions for answer in answers)
    assert bool(preempted) is is_tight, "a tight server must preempt, and a roomy one has no reason to"
    wait_until_idle(server, "qwen3_omni", timeout_s=10.0)


def test_repeated_prompts_come_out_of_the_prefix_cache(client: Client, model: Any, reference: dict[Key, Any]) -> None:
    request, _ = request_of(6, "text", "audio")
    for _ in range(2):
        for piece in client.generate("qwen3_omni", request, timeout_s=120):
            last = piece.event
        check(model, ask_grpc(client, 6, "text", "audio"), reference[6], SAME)
    assert last.usage["cached_tokens"] > 0


def test_text_alone_opens_no_speech_stage(client: Client, reference: dict[Key, Any]) -> None:
    answer = ask_grpc(client, 2, "text")
    assert answer.tokens == reference[2].token_ids
    assert not len(answer.audio)


def test_unknown_voices_are_refused_with_the_known_ones(client: Client, server: RunningServer) -> None:
    request = GenerateRequest(
        messages=(Message("user", "x"),), modalities=("audio",), speech=SpeechParams(voice="unknown")
    )
    with pytest.raises(BadRequest, match="aiden, chelsie, ethan") as caught:
        list(client.generate("qwen3_omni", request, timeout_s=60))
    assert caught.value.where == "speech.voice"
    wait_until_idle(server, "qwen3_omni", timeout_s=10.0)


def test_forced_calls_and_json_through_the_sdk(server: RunningServer) -> None:
    from openai import OpenAI

    chats = OpenAI(base_url=server.openai, api_key="none", timeout=240, max_retries=0).chat.completions
    cities = [{"city": "Rome"}, {"city": "Oslo"}]  # a random model writes blanks without end where a schema allows it
    schema = {"type": "object", "enum": cities}
    common: Any = {"model": "qwen3_omni", "messages": [{"role": "user", "content": "Where?"}], "modalities": ["text"]}
    common |= {"temperature": 0.0, "max_tokens": 100}
    weather: Any = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    named: Any = {"type": "function", "function": {"name": "weather"}}

    choice = chats.create(**common, tools=[weather], tool_choice=named).choices[0]
    assert choice.finish_reason in ("tool_calls", "stop") and not choice.message.content
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) in cities
    streamed = list(chats.create(**common, tools=[weather], tool_choice=named, stream=True))
    deltas = [d for piece in streamed for c in piece.choices for d in c.delta.tool_calls or ()]
    assert "".join(d.function.arguments or "" for d in deltas) == call.function.arguments

    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    answer = chats.create(**common, response_format=form).choices[0]
    assert answer.finish_reason == "stop" and json.loads(answer.message.content) in cities


def test_cancelled_requests_leave_nothing(client: Client, server: RunningServer, reference: dict[Key, Any]) -> None:
    for pieces in (1, 2, 5):
        answer = client.generate("qwen3_omni", request_of(2, "text", "audio")[0], timeout_s=60)
        for _ in range(pieces):
            next(answer)
        answer.close()
    wait_until_idle(server, "qwen3_omni", timeout_s=10.0)
    assert ask_grpc(client, 2, "text", "audio").tokens == reference[2].token_ids


PHASES = ("queued", "read", "written", "spoken", "tail")


@dataclass
class Watched:
    """A request without an end of its own, followed in a thread."""

    request_id: str
    client: Client
    seen: list[str] = field(default_factory=list)
    """What came, in order: text, audio, and the end's outcome."""

    def follow(self, request: GenerateRequest, media: dict[str, Any]) -> list[str]:
        given = {name: tensor.data for name, tensor in media.items()}
        answer = self.client.generate("qwen3_omni", request, request_id=self.request_id, timeout_s=240, media=given)
        for piece in answer:
            self.seen += [name for name in ("text", "audio") if getattr(piece, name) is not None]
            self.seen += [piece.event.outcome] if piece.event.type == "end" else []
        return self.seen

    def is_listed(self) -> bool:
        return any(request["id"] == self.request_id for request in self.client.requests("qwen3_omni")["requests"])


def without_end(checkpoint: Path, key: Key, tokens: int) -> tuple[GenerateRequest, dict[str, Any]]:
    """An answer of so many tokens, spoken as long as the talker's context goes."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["talker_config"]
    talker = {"max_tokens": 400, "logit_bias": {str(config["codec_eos_token_id"]): -100.0}}
    request, media = request_of(key, "text", "audio", stages={"talker": talker})
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return msgspec.structs.replace(request, sampling=sampling), media


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_in_any_phase_ends_once_and_leaves_the_others_alone(
    server: RunningServer, client: Client, checkpoint: Path, phase: str
) -> None:
    """queued: all seats of the thinker are taken; read: its prompt has images, audio and several pieces; tail: the
    text is complete."""
    alone = ask_grpc(client, 1, "text", "audio")

    def stages() -> dict[str, int]:
        return {name: stage["live"] for name, stage in client.health("qwen3_omni")["stages"].items()}

    with ThreadPoolExecutor(10) as pool:
        crowd = [Watched(f"crowd-{i}", client) for i in range(8 if phase == "queued" else 1)]
        others = [pool.submit(other.follow, *without_end(checkpoint, 2, 300)) for other in crowd]
        wait_for(lambda: all("text" in other.seen for other in crowd), 120, "the others write")
        watched = Watched("watched", client)
        key: Key = "short audio in a video" if phase == "read" else 2
        end = pool.submit(watched.follow, *without_end(checkpoint, key, 6 if phase == "tail" else 300))
        reached: dict[str, Callable[[], bool]] = {
            "queued": watched.is_listed,
            "read": watched.is_listed,
            "written": lambda: "text" in watched.seen,
            "spoken": lambda: "audio" in watched.seen,
            "tail": lambda: "audio" in watched.seen and stages()["thinker"] == len(crowd),
        }
        wait_for(reached[phase], 120, phase)
        assert client.abort("qwen3_omni", "watched") == 1
        seen = end.result(60)
        assert seen[-1] == "cancelled" and len(seen) - seen.count("text") - seen.count("audio") == 1
        assert phase != "queued" or seen == ["cancelled"]
        wait_for(lambda: max(stages().values()) <= len(crowd), 30, "the others alone are left")
        for other in crowd:
            client.abort("qwen3_omni", other.request_id)
        for other in others:
            assert other.result(60)[-1] in ("cancelled", "completed")
    wait_until_idle(server, "qwen3_omni", timeout_s=30)
    again = ask_grpc(client, 1, "text", "audio")
    assert again.tokens == alone.tokens
    np.testing.assert_array_equal(again.audio, alone.audio)
