# SPDX-License-Identifier: Apache-2.0
"""What a request handler is given: the services of the proxy and the state of its own request."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

from triton_omni.fetch import IsAllowed
from triton_omni.openai.backend import Backend
from triton_omni.openai.http.budget import Budget, Share
from triton_omni.openai.http.catalogue import Catalogue
from triton_omni.openai.http.metrics import CLIENT_GONE, ProxyMetrics
from triton_omni.openai.http.pools import Pools
from triton_omni.openai.http.transcripts import Transcripts

_KEY = "triton_omni"


@dataclass(frozen=True, kw_only=True)
class Services:
    """What all requests of one proxy share. `may_fetch` says which addresses URLs may lead to."""

    backend: Backend
    catalogue: Catalogue
    transcripts: Transcripts
    pools: Pools
    budget: Budget
    metrics: ProxyMetrics
    may_fetch: IsAllowed


@dataclass(kw_only=True)
class RequestContext:
    """One HTTP request.

    stack        closed when the request ends, whatever the reason
    share        the bytes it holds
    body_bytes   of these, those of its body, until it has been parsed
    traceparent  W3C trace context that goes on to the server; "" for none
    status       of the response; CLIENT_GONE until it starts
    """

    services: Services
    request_id: str
    stack: AsyncExitStack
    share: Share
    traceparent: str = ""
    body_bytes: int = 0
    status: int = CLIENT_GONE
    ignored: list[str] = field(default_factory=list[str])


def set_context(scope: Scope, context: RequestContext) -> None:
    """Attach a context to an ASGI scope."""
    scope[_KEY] = context


def context_of(request: Request) -> RequestContext:
    """The context of a request."""
    context: RequestContext = request.scope[_KEY]
    return context
