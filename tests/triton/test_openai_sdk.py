# SPDX-License-Identifier: Apache-2.0
"""The real openai SDK → the real proxy → a real tritonserver with the toy pipeline; and our own client beside it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest

from tests.kit.server_calls import health, metrics, wait_until_idle
from tests.kit.triton_server import RunningServer, wait_for
from triton_omni import AsyncClient, Client, GenerateRequest, Message, OmniError, Sampling
from triton_omni.backends.pipelines.toy.engines import FRAMES_PER_TOKEN, SAMPLES_PER_FRAME, sine

pytestmark = pytest.mark.triton

SAMPLES_PER_TOKEN = FRAMES_PER_TOKEN * SAMPLES_PER_FRAME
USER: Any = [{"role": "user", "content": "hello there"}]
SPOKEN: Any = {"modalities": ["text", "audio"], "audio": {"voice": "sine", "format": "pcm16"}}


@pytest.fixture
def sdk(toy_proxy_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{toy_proxy_url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def complete(sdk: openai.OpenAI, **more: Any) -> Any:
    return sdk.chat.completions.create(**{"model": "toy", "messages": USER, **more})


def words(count: int) -> str:
    return "".join(f"w{i} " for i in range(count))


def pcm(tokens: int) -> bytes:
    samples = sine(0, tokens * SAMPLES_PER_TOKEN)
    return np.rint(samples * 32767).astype("<i2").tobytes()


def audio_of(chunk: Any) -> dict[str, Any]:
    return chunk.model_dump(exclude_unset=True)["choices"][0]["delta"].get("audio") or {} if chunk.choices else {}


def test_models_and_health(sdk: openai.OpenAI, toy_proxy_url: str) -> None:
    assert [m.id for m in sdk.models.list().data] == ["toy"], "stages are not for clients"
    assert sdk.models.retrieve("toy").model_extra["voices"] == ["sine"]  # type: ignore[index]
    answer = httpx.get(f"{toy_proxy_url}/health")
    assert answer.status_code == 200
    assert set(answer.json()["pipelines"]["toy"]["stages"]) == {"tokens", "frames", "wave"}


def test_text(sdk: openai.OpenAI) -> None:
    answer = complete(sdk, max_tokens=5)
    assert answer.choices[0].message.content == words(5)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 5)
    chunks = list(complete(sdk, max_tokens=300, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == words(300)


def test_streamed_speech_equals_the_whole_byte_for_byte(sdk: openai.OpenAI) -> None:
    whole = complete(sdk, max_tokens=50, **SPOKEN).choices[0].message
    assert whole.content is None and whole.audio.transcript == words(50)
    assert base64.b64decode(whole.audio.data) == pcm(50)
    chunks = [audio_of(c) for c in complete(sdk, max_tokens=50, stream=True, **SPOKEN)]
    assert base64.b64decode("".join(c.get("data", "") for c in chunks)) == pcm(50)
    assert "".join(c.get("transcript", "") for c in chunks) == words(50)
    kinds = [next(iter(c)) for c in chunks if c]
    assert kinds.index("data") < len(kinds) - 1 - kinds[::-1].index("transcript"), "speech starts before the text ends"


@pytest.mark.parametrize("kind", ["mp3", "opus", "aac", "flac", "wav"])
def test_speech_from_a_text(sdk: openai.OpenAI, kind: Any) -> None:
    text = " ".join(["word"] * 60)
    data = sdk.audio.speech.create(model="toy", input=text, voice="sine", response_format=kind).content
    with av.open(io.BytesIO(data)) as container:
        seconds = sum(f.samples / f.sample_rate for f in container.decode(audio=0))
    assert abs(seconds - 60 * SAMPLES_PER_TOKEN / 24_000) < 0.12


def test_speech_as_pcm_is_exact(sdk: openai.OpenAI) -> None:
    data = sdk.audio.speech.create(model="toy", input="a b c d", voice="sine", response_format="pcm").content
    assert data == pcm(4)


def test_texts_are_continued(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="toy", prompt=["one two three", "four"], max_tokens=5)
    assert [choice.text for choice in answer.choices] == [words(5)] * 2
    assert answer.usage is not None and answer.usage.prompt_tokens == 4
    chunks = list(sdk.completions.create(model="toy", prompt="one", max_tokens=50, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == words(50)


def test_text_alone_opens_no_speech_stage(sdk: openai.OpenAI, toy: RunningServer) -> None:
    complete(sdk, max_tokens=1, **SPOKEN)  # makes every counter exist
    name = 'omni_stage_runs_opened_total{pipeline="toy",stage="wave"}'
    before = metrics(toy)[name]
    complete(sdk, max_tokens=2)
    assert metrics(toy)[name] == before


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"modalities": ["text", "audio"], "audio": {"voice": "bob", "format": "wav"}}, "audio.voice"),
        ({"extra_body": {"stages": {"cellar": {}}}}, "stages.cellar"),
        ({"extra_body": {"language": "xx"}}, "language"),
        ({"extra_body": {"stages": {"tokens": {"refuse": True}}}}, "stages.tokens.refuse"),
    ],
)
def test_the_servers_refusals_name_openais_parameter(sdk: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(sdk, **more)
    assert caught.value.param == param and caught.value.request_id


def test_unknown_voice_for_speech(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="available: sine") as caught:
        sdk.audio.speech.create(model="toy", input="x", voice="bob")
    assert caught.value.param == "voice"


def test_choices_have_an_order_and_a_sum(sdk: openai.OpenAI) -> None:
    answer = complete(sdk, n=3, max_tokens=2, **SPOKEN)
    assert [(c.index, c.message.audio.transcript) for c in answer.choices] == [(i, words(2)) for i in range(3)]
    assert all(base64.b64decode(c.message.audio.data) == pcm(2) for c in answer.choices)
    assert answer.usage.prompt_tokens == 2 and answer.usage.completion_tokens_details.text_tokens == 6


def test_a_stage_failure_before_and_in_a_stream(sdk: openai.OpenAI) -> None:
    fail: Any = {"stages": {"tokens": {"fail_after": 3}}}
    with pytest.raises(openai.InternalServerError, match="tokens") as caught:
        complete(sdk, extra_body=fail)
    assert caught.value.response.headers["x-should-retry"] == "false"
    said: list[str] = []
    with pytest.raises(openai.APIError, match="tokens"):
        said += [c.choices[0].delta.content or "" for c in complete(sdk, stream=True, extra_body=fail)]
    with pytest.raises(openai.InternalServerError) as late:
        complete(sdk, extra_body={"stages": {"tokens": {"hold_after": 1}}, "deadlines": {"stall_s": 0.3}})
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
    assert complete(sdk, max_tokens=1).choices[0].message.content == "w0 ", "the next request works"


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(("hold_after", "runs"), [(0, 1), (2, 1), (0, 3), (2, 3)])
def test_a_client_that_leaves_frees_the_stages(
    toy: RunningServer, toy_proxy_url: str, hold_after: int, runs: int, is_stream: bool
) -> None:
    body = {
        "model": "toy", "messages": USER, "stream": is_stream, "n": runs,
        "stages": {"tokens": {"hold_after": hold_after}},
    }  # fmt: skip
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{toy_proxy_url}/v1/chat/completions", json=body, timeout=httpx.Timeout(10, read=0.5))
    wait_until_idle(toy)


def test_sixteen_at_once_do_not_mix(sdk: openai.OpenAI) -> None:
    received: dict[int, bytes] = {}

    def ask(tokens: int) -> None:
        chunks = [audio_of(c) for c in complete(sdk, max_tokens=tokens, stream=True, **SPOKEN)]
        assert "".join(c.get("transcript", "") for c in chunks) == words(tokens)
        received[tokens] = base64.b64decode("".join(c.get("data", "") for c in chunks))

    threads = [threading.Thread(target=ask, args=(10 * n,)) for n in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert received == {10 * n: pcm(10 * n) for n in range(1, 17)}


def test_a_hundred_streams_at_once_and_a_client_with_little_time(sdk: openai.OpenAI, toy_proxy_url: str) -> None:
    async def ask(client: openai.AsyncOpenAI, tokens: int) -> str:
        asked: Any = {"model": "toy", "messages": USER, "max_tokens": tokens, "stream": True}
        return "".join([c.choices[0].delta.content or "" async for c in await client.chat.completions.create(**asked)])

    async def all_of_them() -> list[str]:
        url = f"{toy_proxy_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=100) as client:
            return await asyncio.gather(*(ask(client, 1 + n % 9) for n in range(100)))

    assert asyncio.run(all_of_them()) == [words(1 + n % 9) for n in range(100)]
    with pytest.raises(openai.APITimeoutError):
        complete(sdk.with_options(timeout=0.3), extra_body={"stages": {"tokens": {"hold_after": 1}}})
    assert complete(sdk, max_tokens=1).choices[0].message.content == "w0 "


def test_metrics_page_holds_tritons_too(sdk: openai.OpenAI, toy_proxy_url: str) -> None:
    complete(sdk, max_tokens=1)
    page = httpx.get(f"{toy_proxy_url}/metrics").text
    assert 'omni_proxy_requests_total{route="/v1/chat/completions",status="200"}' in page
    assert "nv_inference_request_success" in page and "omni_stage_runs_opened_total" in page


# --- our own client ---------------------------------------------------------------------------------------------
def chat(max_tokens: int, **stages: Any) -> GenerateRequest:
    return GenerateRequest(
        messages=(Message("user", "hi"),), modalities=("text", "audio"), sampling=Sampling(max_tokens=max_tokens),
        stages=stages,
    )  # fmt: skip


def test_client_streams_and_collects(toy: RunningServer) -> None:
    with Client(toy.grpc) as client:
        pieces = list(client.generate("toy", chat(20), request_id="mine"))
        assert pieces[-1].event.type == "end" and all(p.event.request_id == "mine" for p in pieces)
        audio = np.concatenate([p.audio for p in pieces if p.audio is not None])
        assert np.array_equal(audio, sine(0, 20 * SAMPLES_PER_TOKEN))
        assert "".join(p.text or "" for p in pieces) == words(20)
        whole = list(client.generate("toy", GenerateRequest(messages=(Message("user", "hi"),), stream=False)))
        assert len(whole) == 1 and whole[0].event.type == "end" and whole[0].text == words(16)


def test_client_errors(toy: RunningServer) -> None:
    with Client(toy.grpc) as client:
        for pipeline, request, code in [
            ("nothing", chat(1), "not_found"),
            ("toy", GenerateRequest(), "bad_request"),
            ("toy", chat(9, frames={"fail_after": 1}), "stage_failed"),
        ]:
            with pytest.raises(OmniError) as caught:
                list(client.generate(pipeline, request))
            assert caught.value.code == code
        with pytest.raises(OmniError) as late:
            list(client.generate("toy", chat(9, tokens={"hold_after": 1}), timeout_s=0.5))
        assert (late.value.code, late.value.where) == ("deadline_exceeded", "client")
    with Client("127.0.0.1:1") as unreachable, pytest.raises(OmniError) as gone:
        unreachable.health("toy")
    assert gone.value.code == "unavailable"
    wait_until_idle(toy)


def test_closing_the_iterator_cancels(toy: RunningServer) -> None:
    with Client(toy.grpc) as client:
        pieces: Any = client.generate("toy", chat(9, tokens={"hold_after": 2}))
        next(pieces)
        wait_for(lambda: health(toy)["live"] == 1, 5)
        pieces.close()
        wait_until_idle(toy)


def test_abort_by_id(toy: RunningServer) -> None:
    with Client(toy.grpc) as client:
        pieces = client.generate("toy", chat(9, tokens={"hold_after": 2}), request_id="stop-me")
        next(pieces)
        assert client.abort("toy", "stop-me") == 1
        rest = list(pieces)
        assert rest[-1].event.outcome == "cancelled"
        assert client.abort("toy", "stop-me") == 0


def test_async_requests_on_one_channel_do_not_mix(toy: RunningServer) -> None:
    async def one(client: AsyncClient, tokens: int) -> bool:
        audio: list[np.ndarray] = []
        async with aclosing(client.generate("toy", chat(tokens))) as pieces:
            async for piece in pieces:
                audio += [piece.audio] if piece.audio is not None else []
        return np.array_equal(np.concatenate(audio), sine(0, tokens * SAMPLES_PER_TOKEN))

    async def all_of_them() -> list[bool]:
        async with AsyncClient(toy.grpc) as client:
            return await asyncio.gather(*(one(client, 5 * n) for n in range(1, 33)))

    assert all(asyncio.run(asyncio.wait_for(all_of_them(), 60)))


def test_health_of_the_client_is_the_servers(toy: RunningServer) -> None:
    with Client(toy.grpc) as client:
        state = client.health("toy")
        assert client.is_live() and [(m.name, m.is_ready) for m in client.models()] == [("toy", True)]
    assert state["ready"] and json.dumps(state["about"]["voices"]) == '["sine"]'
