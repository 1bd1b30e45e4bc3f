# SPDX-License-Identifier: Apache-2.0
"""Recordings of voices that clients upload: files of the proxy, bounded, each key's own. Blocking.

A file is a line of JSON about the recording and its samples, int16 at RECORDING_HZ. Names of files are made here, never
of what a client sent. Nothing is kept in memory, so that several proxies of one host may share a folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from triton_omni.openai.http.errors import ApiError

RECORDING_HZ = 24_000
RECORDING_S = (1.0, 30.0)
"""Shortest and longest recording."""
MAX_RECORDINGS = 50
"""Of one key and kind."""
MAX_HEADER_BYTES = 64 * 1024
SILENT = 0.01
"""A recording whose loudest sample is below this has no voice."""
DRAFT = ".new-"
"""How names of files begin that are not whole yet."""
_OWNER_CHARS = 32
_ID = re.compile(r"(?:voice|cons)_[0-9a-f]{32}")


class VoiceRecording(msgspec.Struct, frozen=True, omit_defaults=True):
    """One recording as its file describes it.

    id           its id, which also names the file
    name         what the client calls it; unique among those of its key and kind
    created_at   seconds since the epoch
    seconds      its length
    file_size    bytes of the file that was uploaded
    mime_type    what the client said that file was
    transcript   what is said in it; empty: not known
    description  of the speaker, in the client's words
    language     of a consent
    consent      id or text of the consent to use a voice
    """

    id: str
    name: str
    created_at: int
    seconds: float
    file_size: int
    mime_type: str = ""
    transcript: str = ""
    description: str = ""
    language: str = ""
    consent: str = ""


@dataclass(frozen=True)
class RecordingStore:
    """The recordings below a folder. Owners are digests of keys. `kind` of an id: "voice" or "cons"."""

    folder: Path

    @staticmethod
    def new_id(kind: str) -> str:
        """An id for a new recording."""
        return f"{kind}_{uuid.uuid4().hex}"

    def add(self, owner: str, recording: VoiceRecording, samples: np.ndarray) -> None:
        """Keep a recording, whole or not at all; (samples,) float32. Raises ApiError."""
        kind = recording.id.partition("_")[0]
        with self._locked(owner):
            found = self.all(owner, kind)
            if len(found) >= MAX_RECORDINGS:
                message = (
                    f"This key has {MAX_RECORDINGS} recordings of this kind, which is all it may have; delete one."
                )
                raise ApiError(409, message, code="too_many_recordings", param="name")
            if any(other.name.lower() == recording.name.lower() for other in found):
                raise ApiError(409, f"'{recording.name}' exists already.", code="already_exists", param="name")
            pcm = np.rint(samples.clip(-1, 1) * 32767).astype("<i2").tobytes()
            self._write(owner, recording, pcm)

    def rename(self, owner: str, recording: VoiceRecording, name: str) -> VoiceRecording:
        """Another name for a recording. Raises ApiError."""
        with self._locked(owner):
            if any(o.name.lower() == name.lower() and o.id != recording.id
                   for o in self.all(owner, recording.id.partition("_")[0])):  # fmt: skip
                raise ApiError(409, f"'{name}' exists already.", code="already_exists", param="name")
            renamed = msgspec.structs.replace(recording, name=name)
            self._write(owner, renamed, self._pcm(owner, recording.id))
            return renamed

    def all(self, owner: str, kind: str) -> list[VoiceRecording]:
        """An owner's recordings of one kind, the oldest first. A file that is none of ours is passed over."""
        found: list[VoiceRecording] = []
        for path in self._folder(owner).glob(f"{kind}_*"):
            try:
                with path.open("rb") as file:
                    found.append(msgspec.json.decode(file.readline(MAX_HEADER_BYTES), type=VoiceRecording))
            except (OSError, msgspec.DecodeError):  # deleted meanwhile by another proxy, or damaged
                continue
        return sorted(found, key=lambda recording: (recording.created_at, recording.id))

    def find(self, owner: str, kind: str, name: str) -> VoiceRecording | None:
        """The recording with this id or, in any case of letters, this name."""
        return next((r for r in self.all(owner, kind) if name == r.id or name.lower() == r.name.lower()), None)

    def samples(self, owner: str, recording: VoiceRecording) -> np.ndarray:
        """(samples,) float32 at RECORDING_HZ. Raises ApiError if it was deleted meanwhile."""
        return np.frombuffer(self._pcm(owner, recording.id), "<i2").astype(np.float32) / np.float32(32767)

    def delete(self, owner: str, recording: VoiceRecording) -> None:
        """Remove a recording; one that is gone already is no error."""
        with self._locked(owner):
            self._path(owner, recording.id).unlink(missing_ok=True)

    @contextmanager
    def _locked(self, owner: str) -> Generator[None]:
        """Alone with an owner's folder, among all threads and processes. Removes what a crash has left."""
        folder = self._folder(owner)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for draft in folder.glob(f"{DRAFT}*"):
                draft.unlink(missing_ok=True)
            yield
        finally:
            os.close(lock)

    def _pcm(self, owner: str, recording_id: str) -> bytes:
        try:
            return self._path(owner, recording_id).read_bytes().partition(b"\n")[2]
        except FileNotFoundError:
            raise ApiError(404, f"'{recording_id}' does not exist any more.", code="not_found") from None

    def _write(self, owner: str, recording: VoiceRecording, pcm: bytes) -> None:
        """Under another name first: a reader never sees half a file."""
        path = self._path(owner, recording.id)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=DRAFT, delete=False) as draft:
            try:
                draft.write(msgspec.json.encode(recording) + b"\n" + pcm)
                draft.flush()
                os.fsync(draft.fileno())
                os.replace(draft.name, path)
            except OSError:
                Path(draft.name).unlink(missing_ok=True)
                raise

    def _folder(self, owner: str) -> Path:
        return self.folder / hashlib.sha256(owner.encode()).hexdigest()[:_OWNER_CHARS]

    def _path(self, owner: str, recording_id: str) -> Path:
        assert _ID.fullmatch(recording_id), "ids are made here"
        return self._folder(owner) / recording_id


def made_of(kind: str, name: str, samples: np.ndarray, file_size: int, **facts: str) -> VoiceRecording:
    """A new recording of checked samples at RECORDING_HZ."""
    seconds = round(len(samples) / RECORDING_HZ, 3)
    return VoiceRecording(RecordingStore.new_id(kind), name, int(time.time()), seconds, file_size, **facts)
