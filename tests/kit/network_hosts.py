# SPDX-License-Identifier: Apache-2.0
"""Network namespaces as hosts: each has a cable to a bridge of this one, which can be cut and healed. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class NetworkHost:
    """One namespace."""

    name: str
    address: str
    cable: str

    @property
    def prefix(self) -> list[str]:
        """Before a command that is to run there."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        _ip("link", "set", self.cable, "down")

    def heal(self) -> None:
        _ip("link", "set", self.cable, "up")


def why_not() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"omni-try{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this kernel makes no network namespaces"
    _ip("netns", "del", name)
    return ""


@contextlib.contextmanager
def network_hosts(count: int) -> Iterator[tuple[str, list[NetworkHost]]]:
    """(our own address, the hosts), on a network of their own."""
    mark, net = os.getpid() % 100_000, f"10.{90 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
    bridge, made = f"omb{mark}", list[NetworkHost]()
    _ip("link", "add", bridge, "type", "bridge")
    try:
        _ip("addr", "add", f"{net}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for i in range(2, count + 2):
            host = NetworkHost(f"omn{mark}-{i}", f"{net}.{i}", f"omv{mark}-{i}")
            _ip("netns", "add", host.name)
            made.append(host)
            _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", host.cable, "master", bridge)
            host.heal()
            for words in (f"addr add {host.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                _ip("-n", host.name, *words.split())
        yield f"{net}.1", made
    finally:
        for host in made:
            _ip("netns", "del", host.name)
        _ip("link", "del", bridge)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)
