# SPDX-License-Identifier: Apache-2.0
"""`/v1/audio/voices` and `/v1/audio/voice_consents`, and the recording whose voice is to speak."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triton_omni.data_urls import from_base64, from_data_url, is_data_url
from triton_omni.fetch import read_url
from triton_omni.media import MediaError
from triton_omni.media.audio import decode_audio
from triton_omni.openai.endpoints.chat_request import name_of
from triton_omni.openai.endpoints.messages import media_errors
from triton_omni.openai.endpoints.schemas import ConsentBody, ConsentNameBody, Json, VoiceBody, VoiceName
from triton_omni.openai.endpoints.status import model_entries
from triton_omni.openai.http.bodies import read_json
from triton_omni.openai.http.context import RequestContext, context_of
from triton_omni.openai.http.errors import ApiError, invalid, missing, unsupported
from triton_omni.openai.http.forms import file_in, opened_form, parse_form
from triton_omni.openai.http.pools import in_thread
from triton_omni.openai.http.recordings import (
    RECORDING_HZ,
    RECORDING_S,
    SILENT,
    RecordingStore,
    VoiceRecording,
    made_of,
)

MAX_FILE_BYTES = 10 << 20
VOICE, CONSENT = "voice", "cons"
OFF = ApiError(403, "Uploads are off; the operator sets a folder for them (--voices).", code="uploads_disabled",
               kind="permission_error")  # fmt: skip


@dataclass(frozen=True)
class VoiceSample:
    """The voice that is to speak in one request.

    samples     (samples,) float32 at RECORDING_HZ
    transcript  what is said in it; empty: not known, or not to be used
    param       the parameter that it came with
    """

    samples: np.ndarray
    transcript: str
    param: str


async def sample_of(
    context: RequestContext, voice: VoiceName | None, ref_audio: str | None, ref_text: str | None, with_text: bool
) -> VoiceSample | None:
    """The recording that a request brings, or that its voice is; None for a voice of the model. Raises ApiError."""
    if ref_audio is not None:
        samples = await _referred(context, ref_audio)
        context.share.take(samples.nbytes)
        return VoiceSample(samples, (ref_text or "").strip() if with_text else "", "ref_audio")
    if voice is None:
        raise missing("voice")
    store = context.services.recordings
    found = await _found(context, VOICE, name_of(voice)) if store is not None else None
    if store is None or found is None:
        if not isinstance(voice, str) and voice.id.startswith(f"{VOICE}_"):
            raise invalid("voice", f"There is no voice '{voice.id[:100]}' of this key.", "voice_not_found")
        return None
    samples = await in_thread(context.services.pools.media, store.samples, _owner(context), found)
    context.share.take(samples.nbytes)
    return VoiceSample(samples, found.transcript if with_text else "", "voice")


async def check_is_no_upload(context: RequestContext, voice: VoiceName, model: str, param: str) -> None:
    """Refuse an uploaded voice where messages leave no place for a recording. Raises ApiError."""
    if context.services.recordings is not None and await _found(context, VOICE, name_of(voice)) is not None:
        raise unsupported(param, f"'{model}' answers chats in its own voices; uploaded ones work in /v1/audio/speech.")


async def list_voices(request: Request) -> Response:
    """GET /v1/audio/voices: names of all models' voices, or those of `?model=`, and what the key has uploaded."""
    context = context_of(request)
    names = await _built_in(request, request.query_params.get("model") or None)
    store = context.services.recordings
    own = [] if store is None else await in_thread(context.services.pools.media, store.all, _owner(context), VOICE)
    return JSONResponse({"voices": [*names, *(voice.name for voice in own)], "uploaded_voices": [*map(_voice, own)]})


async def add_voice(request: Request) -> Response:
    """POST /v1/audio/voices: a form with the recording of a voice."""
    context = context_of(request)
    store = _store(context)
    async with opened_form(request) as form:
        body = parse_form(VoiceBody, form, ("audio_sample",), context.ignored)
        if body.name.lower() in map(str.lower, await _built_in(request, None)):
            raise invalid("name", f"'{body.name}' is a voice of a model.", "already_exists")
        if context.services.needs_consent and not (
            body.consent and await _found(context, CONSENT, body.consent) is not None
        ):
            raise invalid("consent", "'consent' must be the id of a consent (/v1/audio/voice_consents).")
        data, mime_type = await _file(form, "audio_sample")
    samples = await _decoded(context, data, "audio_sample")
    facts = {"mime_type": mime_type, "transcript": body.ref_text or "", "consent": body.consent or "",
             "description": body.speaker_description or ""}  # fmt: skip
    voice = made_of(VOICE, body.name, samples, len(data), **facts)
    await in_thread(context.services.pools.media, store.add, _owner(context), voice, samples)
    return JSONResponse(_voice(voice) | {"success": True, "voice": _voice(voice)})


async def show_voice(request: Request) -> Response:
    """GET /v1/audio/voices/{voice}"""
    return JSONResponse(_voice(await _wanted(request, VOICE)))


async def delete_voice(request: Request) -> Response:
    """DELETE /v1/audio/voices/{voice}, by id or name"""
    return await _delete(request, VOICE, "audio.voice")


async def add_consent(request: Request) -> Response:
    """POST /v1/audio/voice_consents: a form with the recording of a consent."""
    context = context_of(request)
    store = _store(context)
    async with opened_form(request) as form:
        body = parse_form(ConsentBody, form, ("recording",), context.ignored)
        data, mime_type = await _file(form, "recording")
    samples = await _decoded(context, data, "recording")
    consent = made_of(CONSENT, body.name, samples, len(data), mime_type=mime_type, language=body.language)
    await in_thread(context.services.pools.media, store.add, _owner(context), consent, samples)
    return JSONResponse(_consent(consent))


async def list_consents(request: Request) -> Response:
    """GET /v1/audio/voice_consents"""
    context = context_of(request)
    found = await in_thread(context.services.pools.media, _store(context).all, _owner(context), CONSENT)
    ends = {"first_id": found[0].id if found else None, "last_id": found[-1].id if found else None}
    return JSONResponse({"object": "list", "data": [*map(_consent, found)], **ends, "has_more": False})


async def show_consent(request: Request) -> Response:
    """GET /v1/audio/voice_consents/{consent}"""
    return JSONResponse(_consent(await _wanted(request, CONSENT)))


async def rename_consent(request: Request) -> Response:
    """POST /v1/audio/voice_consents/{consent}: another name"""
    context = context_of(request)
    body = await read_json(request, ConsentNameBody)
    found = await _wanted(request, CONSENT)
    rename = partial(_store(context).rename, _owner(context), found, body.name)
    return JSONResponse(_consent(await in_thread(context.services.pools.media, rename)))


async def delete_consent(request: Request) -> Response:
    """DELETE /v1/audio/voice_consents/{consent}"""
    return await _delete(request, CONSENT, "audio.voice_consent")


# ---
async def _delete(request: Request, kind: str, object_name: str) -> Response:
    context = context_of(request)
    found = await _wanted(request, kind)
    await in_thread(context.services.pools.media, _store(context).delete, _owner(context), found)
    return JSONResponse({"id": found.id, "object": f"{object_name}.deleted", "deleted": True, "success": True})


async def _wanted(request: Request, kind: str) -> VoiceRecording:
    """The recording that the path names. Raises ApiError 404."""
    context = context_of(request)
    name = request.path_params["name"]
    _store(context)
    found = await _found(context, kind, name)
    if found is None:
        what = "voice" if kind == VOICE else "consent"
        raise ApiError(404, f"There is no {what} '{name[:100]}' that this key uploaded.", code=f"{what}_not_found")
    return found


async def _found(context: RequestContext, kind: str, name: str) -> VoiceRecording | None:
    find = partial(_store(context).find, _owner(context), kind, name)
    return await in_thread(context.services.pools.media, find)


def _store(context: RequestContext) -> RecordingStore:
    if context.services.recordings is None:
        raise OFF
    return context.services.recordings


def _owner(context: RequestContext) -> str:
    return context.key.key.sha256 if context.key is not None else ""


async def _built_in(request: Request, model: str | None) -> list[str]:
    """Voices of the models that the key may use, and their aliases."""
    entries = await model_entries(request, model)
    voices = dict.fromkeys(voice for entry in entries for voice in entry.get("voices", ()))
    aliases = context_of(request).services.voice_aliases
    return [*voices, *(alias for alias, voice in aliases.items() if voice in voices)]


async def _file(form: FormData, param: str) -> tuple[bytes, str]:
    """A form's one file, and what the client says that it is. Raises ApiError."""
    files = form.getlist(param)
    if not files:
        raise missing(param)
    if len(files) > 1:
        raise invalid(param, "There is one file at most.")
    data = await file_in(files[0], param)
    if len(data) > MAX_FILE_BYTES:
        raise invalid(param, f"'{param}' must be at most {MAX_FILE_BYTES} bytes (got {len(data)}).", "file_too_large")
    mime_type = (files[0].content_type or "")[:100] if isinstance(files[0], UploadFile) else ""
    return data, mime_type if mime_type.isprintable() else ""


async def _referred(context: RequestContext, source: str) -> np.ndarray:
    """The recording behind a URL, a data URL or base64. Raises ApiError."""
    pools = context.services.pools
    with media_errors("ref_audio", "invalid_audio_url"):
        if is_data_url(source):
            data = await in_thread(pools.media, from_data_url, source)
        elif source.lower().startswith(("http:", "https:")):
            data = await read_url(source, context.services.may_fetch, pools.names)
        else:
            data = await in_thread(pools.media, from_base64, source)
    return await _decoded(context, data, "ref_audio")


async def _decoded(context: RequestContext, data: bytes, param: str) -> np.ndarray:
    """(samples,) float32 at RECORDING_HZ of a file with a voice in it. Raises ApiError."""
    with media_errors(param, "invalid_audio"):
        return await context.services.pools.decode(_voice_samples, data)


def _voice_samples(data: bytes) -> np.ndarray:
    """Raises MediaError for what is no recording of a voice."""
    least_s, most_s = RECORDING_S
    samples = decode_audio(data, RECORDING_HZ, most_s)
    if len(samples) < least_s * RECORDING_HZ:
        raise MediaError(
            f"The recording must be at least {least_s:g} s long (got {len(samples) / RECORDING_HZ:.2f} s)."
        )
    if np.abs(samples).max() < SILENT:
        raise MediaError("The recording is silent.")
    return samples


def _voice(voice: VoiceRecording) -> Json:
    return {
        "id": voice.id, "object": "audio.voice", "name": voice.name, "created_at": voice.created_at,
        "consent": voice.consent or None, "mime_type": voice.mime_type, "file_size": voice.file_size,
        "seconds": voice.seconds, "ref_text": voice.transcript or None,
        "speaker_description": voice.description or None,
    }  # fmt: skip


def _consent(consent: VoiceRecording) -> Json:
    return {
        "id": consent.id, "object": "audio.voice_consent", "name": consent.name, "language": consent.language,
        "created_at": consent.created_at,
    }  # fmt: skip
