# SPDX-License-Identifier: Apache-2.0
"""The embedded default end to end: real tritonserver, vLLM, speech and Whisper, through the OpenAI SDK."""

from __future__ import annotations

import base64
import io
import json
import re
from typing import Any

import numpy as np
import pytest
import soundfile
from openai import BadRequestError, OpenAI

from tests.kit.server_calls import generate, generate_stream, health, metrics, wait_until_idle
from tests.kit.triton_server import RunningServer
from triton_omni import Client
from triton_omni.backends.supervisor.home import find_home
from triton_omni.backends.wire import GenerateRequest, Message, Part, Sampling, WordsPiece

pytestmark = [pytest.mark.triton, pytest.mark.models, pytest.mark.timeout(600)]

STORY = [{"role": "user", "content": "Tell me about the sea."}]
SPOKEN = [
    "The weather is very nice today.",
    "We walked along the river for an hour.",
    "Please close the window before you leave.",
]


@pytest.fixture(scope="module")
def sdk(chat_server: RunningServer) -> OpenAI:
    return OpenAI(base_url=chat_server.openai, api_key="none", timeout=300, max_retries=0)


def spoken(sdk: OpenAI, stream: bool, voice: str = "heart", tokens: int = 90) -> Any:
    """One deterministic answer with speech."""
    return sdk.chat.completions.create(
        model="chat",
        messages=STORY,
        modalities=["text", "audio"],
        audio={"voice": voice, "format": "pcm16"},
        max_tokens=tokens,
        temperature=0,
        stream=stream,
    )


def test_text_answer_is_right_and_opens_no_speech_stage(sdk: OpenAI, chat_server: RunningServer) -> None:
    def opened() -> dict[str, float]:
        return {k: v for k, v in metrics(chat_server).items() if k.startswith("omni_stage_runs_opened_total")}

    before = opened()
    answer = sdk.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=60,
        temperature=0,
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 3
    grown = {k for k, v in opened().items() if v > before.get(k, 0)}
    assert grown == {'omni_stage_runs_opened_total{pipeline="chat",stage="thinker"}'}


def test_a_text_is_continued_without_the_chat_template(sdk: OpenAI) -> None:
    prompt = "The capital of France is"
    answer = sdk.completions.create(model="chat", prompt=prompt, max_tokens=8, temperature=0, logprobs=2)
    [choice] = answer.choices
    assert "Paris" in choice.text
    assert choice.logprobs is not None and len(choice.logprobs.tokens or ()) == 8
    assert answer.usage is not None and answer.usage.prompt_tokens == 5, "a template would add its tokens"
    with pytest.raises(BadRequestError) as caught:
        sdk.completions.create(model="chat", prompt="word " * 4000)
    assert caught.value.param == "prompt" and "context of this deployment" in caught.value.message


def test_speech_starts_before_the_text_has_ended_and_equals_the_whole(sdk: OpenAI) -> None:
    text, pcm, order = [], [], []
    for chunk in spoken(sdk, stream=True):
        for choice in chunk.choices:
            audio = choice.delta.audio
            if audio is not None and audio.transcript:
                text.append(audio.transcript)
                order.append("text")
            if audio is not None and audio.data:
                pcm.append(base64.b64decode(audio.data))
                order.append("audio")
    assert len(re.findall(r"[.!?]", "".join(text))) >= 3, "".join(text)
    assert order.index("audio") < len(order) - 1 - order[::-1].index("text"), "speech came after the last text"
    whole = spoken(sdk, stream=False).choices[0].message
    assert whole.content is None
    assert whole.audio.transcript == "".join(text)
    assert base64.b64decode(whole.audio.data) == b"".join(pcm)


def test_speech_can_be_transcribed(sdk: OpenAI, chat_server: RunningServer) -> None:
    wrong = total = 0
    for sentence in SPOKEN:
        wav = sdk.audio.speech.create(model="chat", voice="heart", input=sentence, response_format="wav").read()
        transcript_text = transcript(chat_server, *samples(wav))
        wrong += word_errors(sentence, transcript_text)
        total += len(words(sentence))
    assert wrong / total <= 0.10


def test_one_can_talk_to_it(sdk: OpenAI) -> None:
    question = sdk.audio.speech.create(
        model="chat", voice="heart", input="What is the capital of France?", response_format="wav"
    ).read()
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(question).decode(), "format": "wav"}}
    answer = sdk.chat.completions.create(model="chat", messages=[{"role": "user", "content": [part]}], max_tokens=30)
    assert "Paris" in answer.choices[0].message.content


def test_a_recording_is_transcribed(chat_server: RunningServer) -> None:
    folder = find_home().root / "packages" / "pytest-audioeval" / "pytest_audioeval" / "samples" / "audio" / "en"
    transcript_text = transcript(chat_server, *samples((folder / "quick_brown_fox.wav").read_bytes()))
    assert words(transcript_text) == words("The quick brown fox jumps over the lazy dog")


@pytest.mark.parametrize("encoding", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
def test_speech_in_every_encoding(sdk: OpenAI, encoding: str) -> None:
    data = sdk.audio.speech.create(model="chat", voice="heart", input="Hello there.", response_format=encoding).read()
    starts = {"opus": b"OggS", "flac": b"fLaC", "wav": b"RIFF"}.get(encoding, b"")
    assert len(data) > 1000
    assert data.startswith(starts)


def test_unknown_voice_and_language_name_what_exists(sdk: OpenAI, chat_server: RunningServer) -> None:
    with pytest.raises(BadRequestError, match="heart"):
        spoken(sdk, stream=False, voice="alloy")
    status, answer = generate(chat_server, "chat", text_input="x", language="de")
    assert status == 400
    assert answer["error"].startswith("[bad_request:speech.language]")
    assert "en" in answer["error"]


def test_generate_stream_as_in_the_readme(chat_server: RunningServer) -> None:
    answers = generate_stream(
        chat_server, "chat", text_input="What is the capital of France?", stream=True, modalities="text", max_tokens=20
    )
    assert "Paris" in "".join(a.get("text_output", "") for a in answers)
    assert answers[-1]["event"]["type"] == "end"


def test_a_too_long_chat_is_refused_with_the_count(sdk: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="2048"):
        sdk.chat.completions.create(model="chat", messages=[{"role": "user", "content": "word " * 4000}])


def test_leaving_in_mid_answer_frees_every_stage(sdk: OpenAI, chat_server: RunningServer) -> None:
    for _ in range(3):
        stream = spoken(sdk, stream=True, tokens=400)
        next(iter(stream))
        stream.close()
    wait_until_idle(chat_server, "chat")
    assert health(chat_server, "chat")["ready"]


def test_concurrent_answers_equal_the_one_alone(sdk: OpenAI, chat_server: RunningServer) -> None:
    alone, _ = whole(chat_server)
    with Client(chat_server.grpc) as client:
        streams = [client.generate("chat", request()) for _ in range(4)]
        texts = ["".join(p.text or "" for p in stream) for stream in streams]
    assert texts == [alone] * 4


def test_an_audio_file_is_transcribed_with_times(sdk: OpenAI, chat_server: RunningServer) -> None:
    speech = [sdk.audio.speech.create(model="chat", voice="heart", input=text, response_format="wav").content
              for text in SPOKEN[:2]]  # fmt: skip
    (first, rate), (second, _) = (samples(wav) for wav in speech)
    silence = np.zeros(rate, np.float32)
    file = io.BytesIO()
    soundfile.write(file, np.concatenate([first, silence, second]), rate, format="flac")
    transcription = sdk.audio.transcriptions.create(
        model="chat", file=("speech", file.getvalue()), response_format="verbose_json", language="en"
    )
    assert word_errors(" ".join(SPOKEN[:2]), transcription.text) <= 2
    assert abs(transcription.duration - (len(first) + len(second) + rate) / rate) < 0.1
    segments = transcription.segments or []
    assert "".join(s.text for s in segments) == transcription.text
    times = [at_s for s in segments for at_s in (s.start, s.end)]
    assert times == sorted(times) and times[-1] <= transcription.duration + 0.01
    last = next(s for s in segments if "river" in s.text)
    assert last.end > (len(first) + rate) / rate, "the second sentence ends after the silence before it"
    events = list(sdk.audio.transcriptions.create(model="chat", file=("speech", file.getvalue()), stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text == transcription.text
    wait_until_idle(chat_server, "chat")


def test_audio_tokens_are_those_of_the_transcript(sdk: OpenAI) -> None:
    wav = sdk.audio.speech.create(model="chat", voice="heart", input=SPOKEN[0], response_format="wav").content
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav).decode(), "format": "wav"}}
    usage = [
        sdk.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": [part] * count}], max_tokens=1
        ).usage.prompt_tokens_details.audio_tokens
        for count in (1, 2)
    ]  # fmt: skip
    assert 5 <= usage[0] <= 20 and usage[1] == 2 * usage[0]


def test_what_this_model_cannot_do_names_the_parameter(sdk: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        sdk.chat.completions.create(model="chat", messages=STORY, modalities=["image"])  # type: ignore[list-item]
    assert caught.value.param == "modalities"


def test_a_system_message_is_enough_and_max_tokens_may_exceed_the_context(sdk: OpenAI) -> None:
    system: Any = [{"role": "system", "content": "Say hello."}]
    answer = sdk.chat.completions.create(model="chat", messages=system, max_tokens=10**6, temperature=0)
    assert answer.choices[0].message.content


def test_an_emoji_is_nothing_to_say(sdk: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        sdk.audio.speech.create(model="chat", voice="heart", input="\U0001f600")
    assert caught.value.param == "input"


def request() -> GenerateRequest:
    return GenerateRequest(messages=(Message("user", STORY[0]["content"]),), sampling=Sampling(24, temperature=0.0))


def whole(server: RunningServer) -> tuple[str, dict[str, Any]]:
    """The deterministic answer, in one response."""
    status, answer = generate(server, "chat", request=json.dumps({
        "messages": STORY, "sampling": {"max_tokens": 24, "temperature": 0}, "stream": False,
    }))  # fmt: skip
    assert status == 200, answer
    return answer["text_output"], answer["event"]


def transcript(server: RunningServer, audio: np.ndarray, rate: int) -> str:
    """What the transcriber stage hears, called directly."""
    part = Part("audio", offset=0, length=len(audio), sample_rate=rate)
    asked = GenerateRequest(messages=(Message("user", (part,)),))
    with Client(server.grpc) as client:
        pieces = list(client.generate("chat_transcriber", asked, media={"audio": audio}))
    return " ".join(p.text for p in pieces if p.text)


def samples(wav: bytes) -> tuple[np.ndarray, int]:
    """A WAV file's mono samples and rate."""
    found, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    return found, rate


def words(text: str) -> list[str]:
    return re.sub(r"[^a-z' ]", " ", text.lower()).split()


def word_errors(said: str, transcript_text: str) -> int:
    """Edit distance in words."""
    a, b = words(said), words(transcript_text)
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def test_a_text_in_parts_is_spoken_as_the_whole_and_its_words_have_times(chat_server: RunningServer) -> None:
    text = "Well, this is one sentence. And here is another one, with 3.14 in it! Good bye"
    outputs = ("audio", "words")
    with Client(chat_server.grpc) as client:
        whole = list(client.generate("chat", GenerateRequest("speech", input=text, modalities=outputs)))
        parts = iter(re.findall(r".{1,7}", text))
        pieces, token = [], ""
        for piece in client.generate("chat", GenerateRequest("speech", modalities=outputs, open_input=True)):
            pieces.append(piece)
            if piece.event.type == "accepted":  # the first sentence, and no more until it is audible
                token = piece.event.token
                for _ in range(5):
                    client.append("chat", token, next(parts))
            elif sum(p.event.type == "audio" for p in pieces) == 1 and piece.event.type == "audio":
                for part in parts:
                    client.append("chat", token, part)
                client.append("chat", token, "", ends=True)
    audio, expected = (np.concatenate([p.audio for p in made if p.audio is not None]) for made in (pieces, whole))
    assert audio.shape == expected.shape and np.abs(audio - expected).max() <= 1e-6
    found, known = ([w for p in made if isinstance(p.event.piece, WordsPiece) for w in p.event.piece.words]
                    for made in (pieces, whole))  # fmt: skip
    assert found == known and [word.word for word in found] == text.split()
    assert known[-1].end_s <= len(expected) / 24_000
