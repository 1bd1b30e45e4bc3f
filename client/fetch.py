# SPDX-License-Identifier: Apache-2.0
"""Media by URL. The proxy fetches for strangers: only public addresses, and only within limits.

The address that was checked is the one that is connected to, again at every redirect: neither a redirect nor a name
that changes its address leads inside.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import Executor
from functools import cache, partial

import httpx

from triton_omni.data_urls import from_data_url, is_data_url
from triton_omni.media import MediaError

MAX_BYTES = 32 * 1024 * 1024
TIMEOUT_S = 15.0
MAX_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
MAX_PORT = 65535
_UNICAST = ipaddress.ip_network("2000::/3")
"""All that is public in IPv6; other ranges are local, or an IPv4 address hides in them."""
IsAllowed = Callable[[str], bool]


def is_public(address: str) -> bool:
    """True for an IP address that is not this machine, its network or anything special."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip not in _UNICAST or ip.sixtofour is not None or ip.teredo is not None:
            return False
    return ip.is_global and not ip.is_multicast


def is_any(address: str) -> bool:
    """True: for programs that fetch for themselves, and proxies whose clients are trusted."""
    return True


async def read_url(url: str, is_allowed: IsAllowed = is_public, names: Executor | None = None) -> bytes:
    """The bytes in a data URL, or behind an http(s) one. Raises MediaError. Threads of `names` look up hosts."""
    if is_data_url(url):
        return await asyncio.to_thread(from_data_url, url)
    try:
        place = httpx.URL(url)
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(MAX_REDIRECTS + 1):
                found = await _once(place, is_allowed, names)
                if isinstance(found, bytes):
                    return found
                place = place.join(found)
    except TimeoutError:
        raise _failed(f"no answer within {TIMEOUT_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _failed(str(error) or type(error).__name__) from None
    raise _failed(f"more than {MAX_REDIRECTS} redirects")


async def _once(url: httpx.URL, is_allowed: IsAllowed, names: Executor | None) -> bytes | str:
    """The bytes, or where to go instead."""
    if url.scheme not in PORTS or not url.host:
        raise MediaError("Only http, https and data URLs are read.")
    port = url.port or PORTS[url.scheme]
    if port > MAX_PORT:
        raise _failed(f"there is no port {port}")
    host = url.raw_host.decode("ascii")
    address = await _resolve(host, port, is_allowed, names)
    headers = {"host": url.netloc.decode("ascii"), "accept": "*/*", "accept-encoding": "identity"}
    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=_certificates()) as client,
        client.stream(
            "GET", url.copy_with(host=address), headers=headers, extensions={"sni_hostname": host}
        ) as answer,
    ):  # fmt: skip
        if answer.has_redirect_location:
            return answer.headers["location"]
        if answer.status_code != 200:
            raise _failed(f"status {answer.status_code}")
        content = bytearray()
        async for piece in answer.aiter_raw():  # as it was sent: what was packed could unpack to anything
            content += piece
            if len(content) > MAX_BYTES:
                raise _failed(f"larger than {MAX_BYTES} bytes")
        return bytes(content)


async def _resolve(host: str, port: int, is_allowed: IsAllowed, names: Executor | None) -> str:
    """An address of the host, if all of them are allowed."""
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.get_running_loop().run_in_executor(names, look_up)
    except (OSError, UnicodeError):  # UnicodeError: a label that no name may have
        raise _failed("its host is not known") from None
    addresses = [str(info[4][0]) for info in found]
    if not all(is_allowed(address) for address in addresses):
        raise MediaError("URLs to addresses that are not public are not read.")
    return addresses[0]


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: that takes 40 ms."""
    return httpx.create_ssl_context(trust_env=False)


def _failed(why: str) -> MediaError:
    return MediaError(f"The URL could not be read: {why}.")
