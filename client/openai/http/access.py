# SPDX-License-Identifier: Apache-2.0
"""Who may use the proxy, and how much of it: API keys with limits, and checks of Host and Origin without keys."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from starlette.datastructures import Headers

from triton_omni.backends.wire import Deadlines, GenerateRequest
from triton_omni.openai.http.errors import ApiError, invalid
from triton_omni.openai.http.settings import Settings

log = logging.getLogger("triton_omni.proxy")

MINUTE_S = 60.0
SOCKET_KEY = "openai-insecure-api-key."
"""Browsers cannot set headers of a WebSocket; OpenAI's clients send the key as this subprotocol."""
SESSIONS = "/v1/realtime"
SECRET_PREFIX = "ek_"
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of a key file; a limit of None does not apply.

    sha256            of the key, in hex; the key itself is stored nowhere
    models            model ids that it may use
    max_priority      of its requests
    max_total_s       longest total deadline, also that of requests without one
    requests_per_min, concurrent, audio_s_per_min   limits; audio counts both ways
    operator          sees the details of /health
    """

    id: Annotated[str, Meta(min_length=1, max_length=100)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    models: tuple[str, ...] | None = None
    max_priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    max_total_s: Annotated[float, Meta(gt=0)] | None = None
    requests_per_min: Annotated[int, Meta(ge=1)] | None = None
    concurrent: Annotated[int, Meta(ge=1)] | None = None
    audio_s_per_min: Annotated[float, Meta(gt=0)] | None = None
    operator: bool = False


class KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of `--api-keys`."""

    keys: tuple[ApiKey, ...]


def new_key(key_id: str) -> tuple[str, ApiKey]:
    """A random key, and its entry for the file."""
    key = f"sk-omni-{secrets.token_urlsafe(32)}"
    return key, ApiKey(id=key_id, sha256=digest(key.encode()))


def digest(key: bytes) -> str:
    """The SHA-256 of a key, in hex."""
    return hashlib.sha256(key).hexdigest()


class Allowance:
    """An amount that refills continuously to `per_min` within a minute; None: unlimited."""

    def __init__(self, per_min: float | None, clock: Callable[[], float]) -> None:
        self.per_min = per_min
        self._clock = clock
        self._level = per_min or 0.0
        self._filled_s = clock()

    @property
    def level(self) -> float:
        """What is left; negative where more was spent than was there."""
        now, limit = self._clock(), self.per_min or 0.0
        self._level = min(limit, self._level + (now - self._filled_s) * limit / MINUTE_S)
        self._filled_s = now
        return self._level

    def change(self, per_min: float | None) -> None:
        """Another limit, if it is another one; it begins full."""
        if per_min != self.per_min:
            self.per_min, self._level = per_min, per_min or 0.0

    def spend(self, amount: float) -> None:
        """Take an amount, whatever is left."""
        self._level = self.level - amount

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there; 0 if it is."""
        if self.per_min is None:
            return 0.0
        return max(0.0, (amount - self.level) * MINUTE_S / self.per_min)


class KeyUse:
    """A key and what it has used. Not thread-safe: for the event loop."""

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self.live = 0
        self.requests = Allowance(key.requests_per_min, clock)
        self.audio_s = Allowance(key.audio_s_per_min, clock)

    def update(self, key: ApiKey) -> None:
        """Other limits from now on; requests that run stay counted."""
        self.key = key
        self.requests.change(key.requests_per_min)
        self.audio_s.change(key.audio_s_per_min)

    def spend_request(self) -> None:
        """Count one request. Raises ApiError 429 if the key has none left."""
        wait_s = max(self.requests.wait_s(1), self.audio_s.wait_s(1e-9))
        if wait_s:
            kind = "requests" if self.requests.wait_s(1) else "seconds of audio"
            raise _exceeded(f"This key has no {kind} left; try again in {wait_s:.0f} s.", wait_s)
        self.requests.spend(1)

    @contextmanager
    def request(self) -> Generator[None]:
        """One request while it runs. Raises ApiError 429 if the key has none left."""
        if self.key.concurrent is not None and self.live >= self.key.concurrent:
            raise _exceeded(f"This key may have {self.key.concurrent} requests at a time.", 1.0)
        self.spend_request()
        self.live += 1
        try:
            yield
        finally:
            self.live -= 1

    def limited(self, model: str, request: GenerateRequest) -> GenerateRequest:
        """The request within the limits of the key. Raises ApiError for what the key does not allow."""
        key = self.key
        self.check_model(model)
        if request.priority > key.max_priority:
            raise invalid("priority", f"'priority' must be at most {key.max_priority} (got {request.priority}).")
        if key.max_total_s is None:
            return request
        total_s = request.deadlines.total_s
        if total_s is not None and not 0 < total_s <= key.max_total_s:
            message = f"'deadlines.total_s' must be above 0 and at most {key.max_total_s:g} (got {total_s:g})."
            raise invalid("deadlines.total_s", message)
        deadlines: Deadlines = msgspec.structs.replace(request.deadlines, total_s=total_s or key.max_total_s)
        return msgspec.structs.replace(request, deadlines=deadlines)

    def check_model(self, model: str) -> None:
        """Raise ApiError 403 for a model that the key does not allow."""
        if not self.may_use(model):
            message = f"This key may not use the model '{model}'."
            raise ApiError(403, message, code="model_not_allowed", param="model", kind="permission_error")

    def may_use(self, model: str) -> bool:
        """True if the key allows this model."""
        return self.key.models is None or model in self.key.models

    def headers(self) -> dict[str, str]:
        """OpenAI's headers about the requests that are left."""
        limit = self.requests.per_min
        if limit is None:
            return {}
        return {
            "x-ratelimit-limit-requests": f"{limit:.0f}",
            "x-ratelimit-remaining-requests": f"{max(0.0, self.requests.level):.0f}",
            "x-ratelimit-reset-requests": f"{self.requests.wait_s(limit):.0f}s",
        }


def _exceeded(message: str, wait_s: float) -> ApiError:
    error = ApiError(429, message, code="rate_limit_exceeded", kind="rate_limit_error")
    error.retry_after_s = wait_s
    return error


class Access:
    """Decides whether a request is served. `reload` reads the key file again; what keys have used is kept."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        everyone = ApiKey(
            id="default", sha256=digest(settings.api_key.encode()), max_priority=settings.max_priority,
            max_total_s=settings.max_total_s or None, operator=bool(settings.api_key) or not settings.is_public,
        )  # fmt: skip
        self._everyone = KeyUse(everyone)
        self._is_open = not settings.api_key and settings.api_keys is None
        self._uses: dict[str, KeyUse] = {}
        self._secrets = _Signer()
        self._read()

    def reload(self) -> None:
        """Read the key file again; a file with errors changes nothing."""
        try:
            self._read()
        except (OSError, ValueError) as error:
            log.error("the key file is not reloaded: %s", error)

    def _read(self) -> None:
        """Raises OSError, or ValueError for a file with errors."""
        file = self._settings.api_keys
        keys = () if file is None else read_keys(file)
        self._uses = {key.sha256: self._uses.get(key.sha256, KeyUse(key)) for key in keys}
        for key in keys:
            self._uses[key.sha256].update(key)

    def client_secret(self, use: KeyUse, session: bytes, expires_at: int) -> str:
        """A secret that opens realtime sessions with this configuration (JSON) for a key, until `expires_at`.

        It is signed, not kept: it is valid at this proxy until it ends, and no longer than the key.
        """
        return self._secrets.sign(msgspec.json.encode(_ClientSecret(use.key.sha256, expires_at, msgspec.Raw(session))))

    def session_of(self, headers: Headers) -> bytes | None:
        """The configuration that the client secret of a request carries; None for a request with a key."""
        secret = self._secret(headers)
        return None if secret is None else bytes(secret.session)

    def _secret(self, headers: Headers) -> _ClientSecret | None:
        signed = self._secrets.read(_sent_key(headers))
        secret = None if signed is None else msgspec.json.decode(signed, type=_ClientSecret)
        return None if secret is None or secret.expires_at <= time.time() else secret

    def key_of(self, headers: Headers, path: str = "") -> KeyUse | None:
        """The key that a request brings; of a server without keys always the same one. Raises ApiError.

        A client secret stands for its key where sessions are opened, and nowhere else.
        """
        if self._is_open:
            self._check_browser(headers)
            return self._everyone
        secret = self._secret(headers) if path == SESSIONS else None
        sent = digest(_sent_key(headers)) if secret is None else secret.sha256
        known = [*self._uses.values(), *([self._everyone] if self._settings.api_key else [])]
        found = [use for use in known if hmac.compare_digest(use.key.sha256, sent)]  # compares with all of them
        return found[0] if found else None

    def _check_browser(self, headers: Headers) -> None:
        """Without a key, any page that a user of this machine visits could call: by rebinding a name, or directly."""
        host, origin, settings = headers.get("host", ""), headers.get("origin"), self._settings
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = host
        if settings.allowed_hosts and name not in settings.allowed_hosts:
            message = f"This server does not answer to the host '{name[:100]}'; see --allowed-host."
            raise ApiError(403, message, code="host_not_allowed", kind="permission_error")
        if origin is None or {"*", origin} & set(settings.cors_origins) or origin.partition("://")[2] == host:
            return
        message = f"Pages of '{origin[:100]}' may not call this server; see --cors-origin."
        raise ApiError(403, message, code="origin_not_allowed", kind="permission_error")


class _ClientSecret(msgspec.Struct, frozen=True):
    sha256: str
    expires_at: int
    session: msgspec.Raw


class _Signer:
    """Texts that only this process can have made."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def sign(self, data: bytes) -> str:
        """The data with its signature, in letters that headers and subprotocols may have."""
        return f"{SECRET_PREFIX}{_letters(data)}.{_letters(self._signature(data))}"

    def read(self, text: bytes) -> bytes | None:
        """The data of a signed text; None for any other text."""
        data, dot, signature = text.removeprefix(SECRET_PREFIX.encode()).partition(b".")
        if not dot or not text.startswith(SECRET_PREFIX.encode()):
            return None
        try:
            found, given = (base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4)) for part in (data, signature))
        except ValueError:
            return None
        return found if hmac.compare_digest(self._signature(found), given) else None

    def _signature(self, data: bytes) -> bytes:
        return hmac.new(self._key, data, hashlib.sha256).digest()


def _letters(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """The entries of a key file. Raises OSError, or ValueError naming file and place."""
    try:
        keys = msgspec.json.decode(file.read_bytes(), type=KeyFile).keys
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: {error}") from None
    for name, values in (("id", [key.id for key in keys]), ("sha256", [key.sha256 for key in keys])):
        if len(set(values)) < len(values):
            raise ValueError(f"{file}: two keys have the same {name}")
    return keys


def _sent_key(headers: Headers) -> bytes:
    """The bearer token or WebSocket subprotocol of a request, as raw bytes; empty for none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip().encode("latin-1")
    offered: Iterable[str] = (name.strip() for name in headers.get("sec-websocket-protocol", "").split(","))
    key = next((name.removeprefix(SOCKET_KEY) for name in offered if name.startswith(SOCKET_KEY)), "")
    return key.encode("latin-1")
