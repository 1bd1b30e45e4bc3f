# SPDX-License-Identifier: Apache-2.0
"""How processes of several hosts reach each other, on its way from a deploy file to every process.

The key travels in environment variables, never on a command line: those are readable by all users of a host.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

import msgspec

from triton_omni.backends.connectors.greeting import KEY_BYTES

KEY_VARIABLE = "TRITON_OMNI_LINK_KEY"
"""The key in hexadecimal digits, from a stub to its own workers."""
KEY_FILE_VARIABLE = "TRITON_OMNI_LINK_KEY_FILE"
"""A file with the key, for workers that are started by other means."""
MAX_KEY_BYTES = 4096


class LinkSettings(msgspec.Struct, frozen=True):
    """How processes of several hosts reach each other.

    host   our own address for the listener
    key    secret of the server, at least KEY_BYTES long
    ports  first and last port to listen on; 0, 0: any that is free
    tls    files of mutual TLS: certificate, key, certificate of the authority; empty: no TLS
    key_file  where the key comes from, for those who are to copy it
    """

    host: str
    key: bytes
    ports: tuple[int, int] = (0, 0)
    tls: tuple[str, ...] = ()
    key_file: str = ""

    def arguments(self) -> list[str]:
        """The settings without the key, as arguments of a worker."""
        tls = ["--tls", *self.tls] if self.tls else []
        return ["--host", self.host, "--ports", "{}-{}".format(*self.ports), *tls]

    def environment(self) -> dict[str, str]:
        """The key, as an environment variable of a worker."""
        return {KEY_VARIABLE: self.key.hex()}


def read_key(file: Path) -> bytes:
    """The key in `file`. Raises ValueError saying what is wrong with it and what to do."""
    try:
        status = file.stat()
        key = file.read_bytes() if status.st_size <= MAX_KEY_BYTES else b""
    except OSError as error:
        how = f"head -c {KEY_BYTES} /dev/urandom > {file} && chmod 600 {file}"
        raise ValueError(f"{file}: {error.strerror}; a key is made by: {how}") from None
    if status.st_mode & 0o077:
        raise ValueError(
            f"{file} must be readable by its owner only (mode {status.st_mode & 0o777:o}): chmod 600 {file}"
        )
    if len(key) < KEY_BYTES:
        raise ValueError(f"{file} must hold {KEY_BYTES} to {MAX_KEY_BYTES} random bytes (got {status.st_size})")
    return key


def take_key(environ: MutableMapping[str, str]) -> bytes:
    """The key of this process, removed from its environment so that no child inherits it. Raises ValueError."""
    digits, file = environ.pop(KEY_VARIABLE, ""), environ.get(KEY_FILE_VARIABLE, "")
    if not digits and not file:
        raise ValueError(f"the environment variable {KEY_FILE_VARIABLE} must name the file with the server's key")
    return bytes.fromhex(digits) if digits else read_key(Path(file))


def parse_ports(text: str) -> tuple[int, int]:
    """`first-last`. Raises ValueError."""
    first, _, last = text.partition("-")
    return int(first), int(last)
