# SPDX-License-Identifier: Apache-2.0
"""Media by URL. The proxy fetches for strangers: only public addresses, and only within limits.

The address that was checked is the one that is connected to, at every redirect anew: neither a redirect nor a name
that changes its address leads inside.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import urljoin, urlsplit

import httpx

from client.media import MediaError, from_data_url

MAX_BYTES = 32 * 1024 * 1024
TIMEOUT_S = 15.0
MAX_REDIRECTS = 3
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
IsAllowed = Callable[[str], bool]


def is_public(address: str) -> bool:
    """True for an IP address that is not this machine, its network or anything special."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip.sixtofour is not None or ip.teredo is not None or ip in _NAT64:
            return False  # an IPv4 address hides in it
    return ip.is_global and not ip.is_multicast


def is_any(address: str) -> bool:
    """True: for programs that fetch for themselves, and proxies whose clients are trusted."""
    return True


async def read_url(url: str, is_allowed: IsAllowed = is_public) -> bytes:
    """The bytes in a data URL, or behind an http(s) one. Raises MediaError."""
    if url.startswith("data:"):
        return from_data_url(url)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(MAX_REDIRECTS + 1):
                found = await _once(url, is_allowed)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
    except TimeoutError:
        raise _failed(f"no answer within {TIMEOUT_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _failed(str(error) or type(error).__name__) from None
    raise _failed(f"more than {MAX_REDIRECTS} redirects")


async def _once(url: str, is_allowed: IsAllowed) -> bytes | str:
    """The bytes, or where to go instead."""
    host, port, authority = _place(url)
    address = await _resolve(host, port, is_allowed)
    target = httpx.URL(url).copy_with(host=address)
    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client,
        client.stream(
            "GET", target, headers={"host": authority, "accept": "*/*", "accept-encoding": "identity"},
            extensions={"sni_hostname": host},
        ) as answer,
    ):  # fmt: skip
        if answer.is_redirect:
            return answer.headers["location"]
        if answer.status_code != 200:
            raise _failed(f"status {answer.status_code}")
        content = bytearray()
        async for piece in answer.aiter_raw():  # as it was sent: what was packed could unpack to anything
            content += piece
            if len(content) > MAX_BYTES:
                raise _failed(f"larger than {MAX_BYTES} bytes")
        return bytes(content)


def _place(url: str) -> tuple[str, int, str]:
    """(host, port, host and port as the URL has them)."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _failed(str(error)) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise MediaError("Only http, https and data URLs are read.")
    return parts.hostname, port or (443 if parts.scheme == "https" else 80), parts.netloc.rpartition("@")[2]


async def _resolve(host: str, port: int, is_allowed: IsAllowed) -> str:
    """An address of the host, if all of them are allowed."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: a label that no name may have
        raise _failed("its host is not known") from None
    addresses = [str(info[4][0]) for info in found]
    if not all(is_allowed(address) for address in addresses):
        raise MediaError("URLs to addresses that are not public are not read.")
    return addresses[0]


def _failed(why: str) -> MediaError:
    return MediaError(f"The URL could not be read: {why}.")
