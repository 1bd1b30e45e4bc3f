# SPDX-License-Identifier: Apache-2.0
"""Uploaded voices: checked, bounded, each key's own, safe on disk, and what they become in a request for speech."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from tests.kit.fake_backend import FakeBackend
from tests.kit.proxy_server import RunningProxy, running_proxy
from triton_omni.backends.wire import Part
from triton_omni.openai.http import recordings
from triton_omni.openai.http.access import digest
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.http.settings import Settings

KEYS = ("first", "second")


def wav(seconds: float = 2.0, rate_hz: int = 24_000, level: float = 0.5) -> bytes:
    samples = level * np.sin(np.arange(round(seconds * rate_hz)) * 0.05)
    data = io.BytesIO()
    soundfile.write(data, samples, rate_hz, format="WAV", subtype="FLOAT")
    return data.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "voices"


@pytest.fixture
def proxy(backend: FakeBackend, folder: Path, tmp_path: Path) -> Iterator[RunningProxy]:
    keys = [{"id": key, "sha256": digest(key.encode())} for key in KEYS]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys}))
    with running_proxy(backend, Settings(voices=folder, api_keys=tmp_path / "keys.json")) as running:
        yield running


def call(proxy: RunningProxy, method: str, path: str, key: str = KEYS[0], **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.request(method, f"{proxy.root}/v1/audio/{path}", headers=headers, timeout=30, **more)


def upload(proxy: RunningProxy, name: str = "Anna", data: bytes | None = None, key: str = KEYS[0],
           **fields: str) -> httpx.Response:  # fmt: skip
    files = {"audio_sample": ("a.wav", wav() if data is None else data, "audio/wav")}
    return call(proxy, "POST", "voices", key, files=files, data={"name": name, **fields})


def speak(proxy: RunningProxy, key: str = KEYS[0], **more: Any) -> httpx.Response:
    body = {"model": "fake", "input": "One two", "response_format": "pcm", **more}
    return call(proxy, "POST", "speech", key, json={k: v for k, v in body.items() if v is not None})


def sent(backend: FakeBackend) -> tuple[np.ndarray, tuple[Part, ...]]:
    """The recording and the message of the latest request."""
    (message,) = backend.seen[-1].request.messages
    assert message.role == "user"
    return backend.seen[-1].media["audio"], message.parts


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    found = answer.json()["error"]
    return answer.status_code, found["code"], found["param"]


def test_an_uploaded_voice_is_listed_shown_used_and_deleted(
    proxy: RunningProxy, backend: FakeBackend, folder: Path
) -> None:
    made = upload(proxy, ref_text="Hello there.", speaker_description="calm", consent="yes").json()
    assert made["object"] == "audio.voice" and made["success"] is True and made["voice"]["id"] == made["id"]
    assert (made["name"], made["seconds"], made["mime_type"], made["consent"]) == ("Anna", 2.0, "audio/wav", "yes")
    listed = call(proxy, "GET", "voices").json()
    assert listed["voices"] == ["sine", "Anna"] and [v["id"] for v in listed["uploaded_voices"]] == [made["id"]]
    assert call(proxy, "GET", f"voices/{made['id']}").json()["speaker_description"] == "calm"
    for voice in (made["id"], "Anna", "anna", {"id": made["id"]}):
        assert speak(proxy, voice=voice).status_code == 200
        samples, (part, text) = sent(backend)
        assert (part.type, part.sample_rate, part.length, text.text) == ("audio", 24_000, 48_000, "Hello there.")
        assert np.abs(samples - 0.5 * np.sin(np.arange(48_000) * 0.05)).max() < 1e-3
        assert backend.seen[-1].request.speech.voice is None
    deleted = call(proxy, "DELETE", "voices/ANNA").json()
    assert deleted["deleted"] is True and deleted["id"] == made["id"]
    assert call(proxy, "DELETE", f"voices/{made['id']}").status_code == 404
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_a_voice_belongs_to_its_key(proxy: RunningProxy, backend: FakeBackend) -> None:
    mine = upload(proxy).json()["id"]
    assert call(proxy, "GET", "voices", KEYS[1]).json()["uploaded_voices"] == []
    for name in (mine, "Anna"):
        assert call(proxy, "GET", f"voices/{name}", KEYS[1]).status_code == 404
        assert call(proxy, "DELETE", f"voices/{name}", KEYS[1]).status_code == 404
        speak(proxy, KEYS[1], voice=name)
        assert not backend.seen[-1].request.messages, "to the other key it is only a name"
    assert error_of(speak(proxy, KEYS[1], voice={"id": mine})) == (400, "voice_not_found", "voice")
    assert upload(proxy, key=KEYS[1]).status_code == 200, "the name is free for it"


def test_another_proxy_on_the_folder_knows_it_at_once(proxy: RunningProxy, folder: Path, tmp_path: Path) -> None:
    upload(proxy)
    with running_proxy(FakeBackend(), Settings(voices=folder, api_keys=tmp_path / "keys.json")) as other:
        assert [v["name"] for v in call(other, "GET", "voices").json()["uploaded_voices"]] == ["Anna"]
        call(other, "DELETE", "voices/Anna")
    assert call(proxy, "GET", "voices").json()["uploaded_voices"] == []


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "audio"), (b"RIFF and no audio", "audio"), (wav(0.5), "at least 1 s"), (wav(31), "at most 30 s"),
        (wav(level=0.001), "silent"), (wav()[:200], "at least 1 s"),
    ],
)  # fmt: skip
def test_what_is_no_recording_of_a_voice_is_refused(proxy: RunningProxy, data: bytes, said: str) -> None:
    answer = upload(proxy, data=data)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "audio_sample"
    assert said.lower() in answer.json()["error"]["message"].lower()
    assert call(proxy, "GET", "voices").json()["uploaded_voices"] == []


@pytest.mark.parametrize("name", ["../x", "a/b", "a\\b", "", " ", "x" * 65, "a\nb", "sine", "SINE", "a\x00b"])
def test_a_name_that_could_be_a_path_or_is_taken_is_refused(proxy: RunningProxy, folder: Path, name: str) -> None:
    answer = upload(proxy, name)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "name"
    assert not folder.exists() or not any(folder.iterdir())


@pytest.mark.parametrize("name", ["..", "%2e%2e%2fkeys.json", "voice_" + "0" * 32, "../../keys.json"])
def test_no_path_leads_out_of_the_folder(proxy: RunningProxy, tmp_path: Path, name: str) -> None:
    upload(proxy)
    assert call(proxy, "DELETE", f"voices/{name}").status_code in (404, 405)
    assert (tmp_path / "keys.json").exists()


def test_names_are_unique_and_their_number_is_bounded(proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_RECORDINGS", 2)
    assert upload(proxy).status_code == 200
    assert error_of(upload(proxy, "ANNA")) == (409, "already_exists", "name")
    assert upload(proxy, "Bert").status_code == 200
    assert error_of(upload(proxy, "Carl")) == (409, "too_many_recordings", "name")


def test_a_file_that_is_damaged_or_half_written_is_no_voice(proxy: RunningProxy, folder: Path) -> None:
    made = upload(proxy).json()["id"]
    own = folder / hashlib.sha256(digest(KEYS[0].encode()).encode()).hexdigest()[:32]
    assert [path.name for path in own.iterdir()] == [made]
    (own / f"voice_{'1' * 32}").write_bytes(b"{ not ours")
    (own / ".new-abc").write_bytes(b"")
    assert [v["id"] for v in call(proxy, "GET", "voices").json()["uploaded_voices"]] == [made]


def test_uploads_are_off_without_a_folder(backend: FakeBackend) -> None:
    with running_proxy(backend) as proxy:
        assert error_of(upload(proxy)) == (403, "uploads_disabled", None)
        assert call(proxy, "GET", "voices").json() == {"voices": ["sine"], "uploaded_voices": []}


def test_a_model_that_clones_no_voice_says_so(proxy: RunningProxy, backend: FakeBackend) -> None:
    upload(proxy)
    for field in ("messages", "messages[0].content[0]"):
        backend.refusal = f"[bad_request:{field}] 'fake' takes text, not audio"
        answer = speak(proxy, voice="Anna")
        assert error_of(answer) == (400, "unsupported_value", "voice") and "clones none" in answer.text
    backend.refusal = "[bad_request:messages[0]] the recording must take 1 to 30 s (got 0.50 s)"
    assert error_of(speak(proxy, voice="Anna")) == (400, "invalid_value", "voice")


def test_a_chat_refuses_it_by_the_parameter(proxy: RunningProxy) -> None:
    upload(proxy)
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "modalities": ["text", "audio"],
            "audio": {"voice": "Anna", "format": "pcm16"}, "stream": True}  # fmt: skip
    answer = httpx.post(f"{proxy.root}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEYS[0]}"})
    assert error_of(answer) == (400, "unsupported_value", "audio.voice")


def test_a_recording_may_come_with_the_request(proxy: RunningProxy, backend: FakeBackend) -> None:
    data = base64.b64encode(wav()).decode()
    for source in (data, f"data:audio/wav;base64,{data}"):
        assert speak(proxy, ref_audio=source, ref_text="Hello.").status_code == 200
        samples, (part, text) = sent(backend)
        assert part.length == len(samples) == 48_000 and text.text == "Hello."
    speak(proxy, ref_audio=data, ref_text="Hello.", x_vector_only_mode=True)
    assert [part.type for part in sent(backend)[1]] == ["audio"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({}, "voice"),
        ({"voice": "sine", "ref_text": "x"}, "ref_text"),
        ({"voice": "sine", "x_vector_only_mode": True}, "x_vector_only_mode"),
        ({"ref_audio": base64.b64encode(wav()).decode(), "x_vector_only_mode": False}, "ref_text"),
        ({"ref_audio": base64.b64encode(wav(0.2)).decode()}, "ref_audio"),
        ({"ref_audio": "!!"}, "ref_audio"),
        ({"ref_audio": "file:///etc/passwd"}, "ref_audio"),
        ({"ref_audio": "http://127.0.0.1:1/x.wav"}, "ref_audio"),
    ],
)
def test_bad_recordings_of_a_request_are_refused_by_name(proxy: RunningProxy, more: dict[str, Any], param: str) -> None:
    answer = speak(proxy, **more)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_consents_are_kept_renamed_and_needed_where_the_operator_says_so(backend: FakeBackend, folder: Path) -> None:
    with running_proxy(backend, Settings(voices=folder, needs_consent=True)) as proxy:
        assert error_of(upload(proxy))[1:] == ("invalid_value", "consent")
        assert error_of(upload(proxy, consent="cons_none"))[1:] == ("invalid_value", "consent")
        files = {"recording": ("a.wav", wav(), "audio/wav")}
        made = call(proxy, "POST", "voice_consents", files=files, data={"name": "Anna", "language": "en-US"}).json()
        assert made["object"] == "audio.voice_consent" and made["language"] == "en-US"
        assert upload(proxy, consent=made["id"]).status_code == 200
        assert call(proxy, "GET", "voice_consents").json()["data"] == [made]
        renamed = call(proxy, "POST", f"voice_consents/{made['id']}", json={"name": "Anna B."}).json()
        assert renamed == {**made, "name": "Anna B."}
        assert call(proxy, "GET", f"voice_consents/{made['id']}").json() == renamed
        assert call(proxy, "DELETE", f"voice_consents/{made['id']}").json()["deleted"] is True
        assert call(proxy, "GET", f"voice_consents/{made['id']}").status_code == 404
        assert call(proxy, "GET", "voice_consents").json()["data"] == []


def test_missing_fields_are_named(proxy: RunningProxy) -> None:
    assert error_of(call(proxy, "POST", "voices", files={"audio_sample": wav()}, data={"x": "y"}))[2] == "x"
    assert error_of(call(proxy, "POST", "voices", files={"audio_sample": wav()}))[2] == "name"
    assert error_of(call(proxy, "POST", "voices", files={"other": b""}, data={"name": "Anna"}))[2] in (
        "other", "audio_sample")  # fmt: skip
    assert error_of(call(proxy, "POST", "voice_consents", files={"recording": wav()}, data={"name": "A"}))[2] == (
        "language"
    )


# --- proxies that share a folder ---


def test_proxies_that_share_a_folder_see_each_others_voices(proxy: RunningProxy, backend: FakeBackend, folder: Path):
    with running_proxy(backend, Settings(voices=folder, api_keys=folder.parent / "keys.json")) as other:
        made = upload(proxy, "Anna").json()
        assert [voice["name"] for voice in call(other, "GET", "voices").json()["uploaded_voices"]] == ["Anna"]
        assert upload(other, "anna").status_code == 409
        voice_id = made["voice"]["id"] if "voice" in made else made["id"]
        assert call(other, "DELETE", f"voices/{voice_id}").status_code == 200
        assert call(proxy, "GET", "voices").json()["uploaded_voices"] == []


def test_two_proxies_never_take_the_same_name(folder: Path) -> None:
    """What one checks and writes, another one does not do meanwhile; drafts of one that was killed are removed."""
    mine, others = recordings.RecordingStore(folder), recordings.RecordingStore(folder)
    samples = np.zeros(24_000, np.float32)
    first, second = (recordings.made_of("voice", name, samples, 1) for name in ("Anna", "anna"))
    refused: list[ApiError] = []

    def add() -> None:
        try:
            mine.add("owner", second, samples)
        except ApiError as error:
            refused.append(error)

    with others._locked("owner"):
        thread = threading.Thread(target=add)
        thread.start()
        thread.join(0.3)  # without a lock it is done by now
        others._write("owner", first, b"")
        (others._folder("owner") / ".new-killed").write_bytes(b"half")
    thread.join(20)
    assert [error.code for error in refused] == ["already_exists"]
    assert [recording.name for recording in mine.all("owner", "voice")] == ["Anna"]
    assert not list(mine._folder("owner").glob(".new-*"))
