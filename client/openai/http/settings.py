# SPDX-License-Identifier: Apache-2.0
"""Options of the proxy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from triton_omni.openai.http.budget import HELD_BYTES


@dataclass(frozen=True)
class BodyLimits:
    """Bounds of what clients send.

    body_bytes   size of one body
    held_bytes   all bodies not yet parsed and all decoded media together
    silence_s    longest pause within a body
    bytes_per_s  slowest average rate of a body that takes longer than `silence_s`
    """

    body_bytes: int = 64 * 1024 * 1024
    held_bytes: int = HELD_BYTES
    silence_s: float = 30.0
    bytes_per_s: int = 16 * 1024


@dataclass(frozen=True)
class Settings:
    """Options of the proxy.

    models         model id → pipeline; empty: every public model of the server
    api_key        required of clients of /v1; empty: none
    metrics_url    Triton's metrics; empty: only the proxy's own
    private_urls   media may be fetched from any address, including this network's own
    limits         bounds of request bodies
    model_aliases  further names of models
    voice_aliases  further names of voices
    is_lenient     drop unknown parameters, and name them in a header, instead of refusing them
    cors_origins   origins whose pages may read responses; "*" for all
    api_keys       file of keys with limits of their own, beside `api_key`
    allowed_hosts  names in the Host header that a server without keys answers to; empty: any
    max_priority   of requests without a key of the file
    voices         folder for the voices that clients upload; None: they may not
    needs_consent  an uploaded voice needs a consent that was uploaded before
    max_total_s    longest total deadline of these, in seconds; 0: no bound
    is_public      listens beyond this machine: details of /health need a key
    """

    models: Mapping[str, str] = field(default_factory=dict[str, str])
    api_key: str = ""
    metrics_url: str = ""
    private_urls: bool = False
    limits: BodyLimits = field(default_factory=BodyLimits)
    model_aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    voice_aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    is_lenient: bool = False
    cors_origins: tuple[str, ...] = ()
    api_keys: Path | None = None
    allowed_hosts: frozenset[str] = frozenset()
    max_priority: int = 100
    max_total_s: float = 0.0
    is_public: bool = False
    voices: Path | None = None
    needs_consent: bool = False
