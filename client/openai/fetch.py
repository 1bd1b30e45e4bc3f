# SPDX-License-Identifier: Apache-2.0
"""Pictures by URL. The server fetches for a stranger, so only public addresses, and only within limits."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import urljoin, urlsplit

import httpx

from client.openai.errors import ApiError, invalid

MAX_BYTES = 20 * 1024 * 1024
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


async def fetch(url: str, param: str, is_allowed: IsAllowed = is_public) -> bytes:
    """The bytes behind an http(s) URL. Raises ApiError."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(MAX_REDIRECTS + 1):
                found = await _once(url, param, is_allowed)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
    except TimeoutError:
        raise _failed(param, f"no answer within {TIMEOUT_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise _failed(param, str(error) or type(error).__name__) from None
    raise _failed(param, f"more than {MAX_REDIRECTS} redirects")


async def _once(url: str, param: str, is_allowed: IsAllowed) -> bytes | str:
    """The bytes, or where to go instead."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise invalid(param, "Only http, https and data URLs are read.", "invalid_image_url")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = await _resolve(parts.hostname, port, param, is_allowed)
    # Connect to the address that was checked: asking the name a second time might give another one.
    target = httpx.URL(url).copy_with(host=address)
    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client,
        client.stream(
            "GET", target, headers={"host": parts.netloc.rpartition("@")[2], "accept": "image/*"},
            extensions={"sni_hostname": parts.hostname},
        ) as answer,
    ):  # fmt: skip
        if answer.is_redirect:
            return answer.headers["location"]
        if answer.status_code != 200:
            raise _failed(param, f"status {answer.status_code}")
        content = bytearray()
        async for piece in answer.aiter_bytes():
            content += piece
            if len(content) > MAX_BYTES:
                raise _failed(param, f"larger than {MAX_BYTES} bytes")
        return bytes(content)


async def _resolve(host: str, port: int, param: str, is_allowed: IsAllowed) -> str:
    """An address of the host, if all of them are allowed."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        raise _failed(param, "its host is not known") from None
    addresses = [str(info[4][0]) for info in found]
    if not all(is_allowed(address) for address in addresses):
        raise invalid(param, "URLs to addresses that are not public are not read.", "invalid_image_url")
    return addresses[0]


def _failed(param: str, why: str) -> ApiError:
    return invalid(param, f"The URL could not be read: {why}.", "invalid_image_url")
