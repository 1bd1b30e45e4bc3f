# SPDX-License-Identifier: Apache-2.0
"""What a request handler is given: the services of the proxy and the state of its own request."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import Scope

from triton_omni.fetch import IsAllowed
from triton_omni.openai.backend import Backend
from triton_omni.openai.http.access import Access, KeyUse
from triton_omni.openai.http.budget import Budget, Share
from triton_omni.openai.http.catalogue import Catalogue
from triton_omni.openai.http.live import LiveReadings
from triton_omni.openai.http.metrics import CLIENT_GONE, ProxyMetrics
from triton_omni.openai.http.pools import Pools
from triton_omni.openai.http.recordings import RecordingStore
from triton_omni.openai.http.stored_responses import ResponseStore
from triton_omni.openai.http.transcripts import Transcripts

_KEY = "triton_omni"


@dataclass(frozen=True, kw_only=True)
class Services:
    """What all requests of one proxy share.

    may_fetch      says which addresses URLs may lead to
    voice_aliases  a client's name for a voice → the pipeline's
    recordings     voices that clients uploaded; None: they may not
    needs_consent  an uploaded voice needs a consent that was uploaded before
    """

    backend: Backend
    catalogue: Catalogue
    transcripts: Transcripts
    responses: ResponseStore
    pools: Pools
    budget: Budget
    metrics: ProxyMetrics
    live: LiveReadings
    may_fetch: IsAllowed
    voice_aliases: Mapping[str, str]
    access: Access
    recordings: RecordingStore | None
    needs_consent: bool

    def voice_of(self, voice: str) -> str:
        """The pipeline's name of a voice."""
        return self.voice_aliases.get(voice, voice)


@dataclass(kw_only=True)
class RequestContext:
    """One HTTP request.

    stack        closed when the request ends, whatever the reason
    share        the bytes it holds
    body_bytes   of these, those of its body, until it has been parsed
    traceparent  W3C trace context that goes on to the server; "" for none
    status       of the response; CLIENT_GONE until it starts
    key          of the request; None without one, which is allowed on some routes only
    ignored      names of unknown parameters that were dropped; None: they are refused
    """

    services: Services
    request_id: str
    stack: AsyncExitStack
    share: Share
    traceparent: str = ""
    body_bytes: int = 0
    status: int = CLIENT_GONE
    ignored: list[str] | None = None
    key: KeyUse | None = None

    def check_model(self, model: str) -> None:
        """Raise ApiError 403 for a model that the key does not allow, before any media are read for it."""
        if self.key is not None:
            self.key.check_model(model)


def set_context(scope: Scope, context: RequestContext) -> None:
    """Attach a context to an ASGI scope."""
    scope[_KEY] = context


def context_of(request: HTTPConnection) -> RequestContext:
    """The context of a request."""
    context: RequestContext = request.scope[_KEY]
    return context
