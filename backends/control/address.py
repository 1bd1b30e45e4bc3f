# SPDX-License-Identifier: Apache-2.0
"""Where a process listens: `/run/x.sock`, `tcp://host:port`, or both as `token:/run/x.sock|tcp://[host]:port`.

The token names a host (its boot, and the network namespace): processes with the same one use the unix socket and
shared memory, others TCP.
"""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

import msgspec

TCP = "tcp://"
TOKEN_VARIABLE = "TRITON_OMNI_HOST_TOKEN"
"""For workers that share a boot and a network namespace and are to use TCP all the same."""


class Address(msgspec.Struct, frozen=True):
    """A parsed address; `path` or `tcp` may be empty. `token` is "" for a path that only this host knows."""

    path: str = ""
    tcp: str = ""
    token: str = ""

    def __str__(self) -> str:
        return f"{self.token}:{self.path}|{self.tcp}" if self.path and self.tcp else self.path or self.tcp

    @property
    def is_local(self) -> bool:
        """True if the unix socket is on this host."""
        return bool(self.path) and self.token in ("", host_token())


def parse_address(text: str) -> Address:
    """The address in `text`. Raises ValueError."""
    local, bar, tcp = text.partition("|")
    if local.startswith(TCP):
        local, bar, tcp = "", "", local
    token, colon, path = local.partition(":") if bar else ("", "", local)
    if tcp:
        host_and_port(tcp)
    if (
        (bar and not (token and colon and tcp and "|" not in tcp))
        or (path and not path.startswith("/"))
        or not (path or tcp)
    ):
        raise ValueError(f"address must be a path, tcp://host:port or both (got '{text}')")
    return Address(path, tcp, token)


def host_and_port(tcp: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`; an IPv6 address stands in brackets. Raises ValueError."""
    host, _, port = tcp.removeprefix(TCP).rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_number = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    if not tcp.startswith(TCP) or not bare or not is_number or (":" in bare) != host.startswith("["):
        raise ValueError(f"address must be tcp://host:port, an IPv6 host in brackets (got '{tcp}')")
    return bare, int(port)


def tcp_address(host: str, port: int) -> str:
    return f"{TCP}[{host}]:{port}" if ":" in host else f"{TCP}{host}:{port}"


@functools.cache
def host_token() -> str:
    """What tells this host from others: the boot's id and the network namespace, or the environment's word."""
    if given := os.environ.get(TOKEN_VARIABLE):
        return given
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"


def address_towards(host: str) -> str:
    """This host's address on the way to `host`. Raises OSError where there is no way."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing: the kernel only chooses the way
        return str(probe.getsockname()[0])
