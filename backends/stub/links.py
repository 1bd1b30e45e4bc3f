# SPDX-License-Identifier: Apache-2.0
"""The `links` of a deploy file, as a model's parameter, for the processes of a server."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from triton_omni.backends.config.schema import ClusterDeploy, ConfigError, LinksDeploy, convert
from triton_omni.backends.control.address import address_towards
from triton_omni.backends.control.link_settings import LinkSettings, read_key

PLACER = Path(__file__).resolve().parents[1] / "scale" / "placer.py"
ANYWHERE = "192.0.2.1"  # of a block that no network uses (RFC 5737): the way to it is the default route


def link_settings(parameter: str, place: str) -> LinkSettings | None:
    """The settings in a model's `links` parameter; None for "". Raises ConfigError naming `place` and the key."""
    if not parameter:
        return None
    links = convert(msgspec.json.decode(parameter.encode()), LinksDeploy, f"{place}: links")
    try:
        key = read_key(Path(links.key_file))
    except ValueError as error:
        raise ConfigError(f"{place}: links.key_file: {error}") from None
    try:
        host = address_towards(ANYWHERE) if links.host == "auto" else links.host
    except OSError:
        raise ConfigError(f"{place}: links.host: this host has no default route; name its address") from None
    tls = () if links.tls is None else (links.tls.cert, links.tls.key, links.tls.ca)
    if tls:
        from triton_omni.backends.connectors.tcp import tls_contexts

        try:
            tls_contexts(*tls)
        except OSError as error:
            raise ConfigError(f"{place}: links.tls: {', '.join(tls)} cannot be used: {error}") from None
    return LinkSettings(host, key, links.port_range(), tls, links.key_file)


def placer_command(parameter: str, place: str) -> list[str]:
    """The command of the placer, from a model's `cluster` parameter. Raises ConfigError naming `place` and the key."""
    cluster = convert(msgspec.json.decode(parameter.encode() or b"{}"), ClusterDeploy, f"{place}: cluster")
    if not os.access(cluster.python, os.X_OK):
        raise ConfigError(f"{place}: cluster.python: {cluster.python} is no interpreter that can be run")
    return [cluster.python, str(PLACER), cluster.address]
