# SPDX-License-Identifier: Apache-2.0
"""All links of one process, driven by one thread: connects, listens, and returns received items in order."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from triton_omni.backends.connectors.base import PeerLost
from triton_omni.backends.connectors.device import DeviceStore
from triton_omni.backends.connectors.link import Link
from triton_omni.backends.connectors.shm import ShmConnector
from triton_omni.backends.control.address import Address, host_token, parse_address
from triton_omni.backends.control.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    HelloMessage,
    PingMessage,
    decode,
    encode,
)
from triton_omni.backends.core.chunk import Chunk

if TYPE_CHECKING:
    from triton_omni.backends.connectors.tcp import TcpConnector, TcpLink
    from triton_omni.backends.control.link_settings import LinkSettings
    from triton_omni.backends.control.tcp_links import TcpLinks

log = logging.getLogger("triton_omni.control")

ACCEPT_PAUSE_S = 1.0  # after an accept that failed for lack of descriptors or memory
ITEMS_PER_TURN = 256

_GONE = object()

Sent = TypeVar("Sent")
StoreFactory = Callable[[], DeviceStore | None]


class Lost:
    """The peer closed the link or died; the last item of a link."""


class Peer:
    """A process at the other end of a link. `name` and `listens_at` are from its HelloMessage."""

    def __init__(self, hub: Hub, connector: ShmConnector | TcpConnector, address: str = "") -> None:
        self._hub = hub
        self.connector = connector
        self.fd = connector.fileno()
        self.address = address
        self.name = ""
        self.listens_at = ""
        self.lost = False

    def send(self, message: AnyMessage) -> bool:
        """Send a message; False if the peer is gone (the hub reports the loss itself)."""
        return self._guard(self.connector.send, encode(message)) is not _GONE

    def put(self, chunk: Chunk) -> bool:
        """Offer a chunk; False if there is no credit now or the peer is gone."""
        return self._guard(self.connector.put, chunk) is True

    def release(self, chunk: Chunk) -> None:
        """Acknowledge a chunk that came from this peer."""
        self._guard(self.connector.release, chunk)

    def _guard(self, act: Callable[[Sent], object], argument: Sent) -> object:
        if self.lost:
            return _GONE
        try:
            result = act(argument)
        except PeerLost:
            return _GONE  # the hub reads EOF next and reports the loss, after everything that had arrived
        if not self.connector.link.joining:  # else `joined` does so at its end
            self._hub.watch(self)
        return result


class Hub:
    """The links of one process.

    One thread owns it and calls `poll`; `post` and `wake` are the only calls allowed from other threads. With
    `links` it also dials processes of other hosts, and listens for them if it has an `address` or `joinable` is set.
    Raises OSError if it cannot listen.
    """

    def __init__(
        self,
        name: str,
        address: Path | None = None,
        stores: StoreFactory = lambda: None,
        gpu_uuid: str = "",
        links: LinkSettings | None = None,
        joinable: bool = False,
    ) -> None:
        self.name = name
        self.gpu_uuid = gpu_uuid
        self._path = address
        self._stores = stores
        self._selector = selectors.EpollSelector()
        self._by_address: dict[str, Peer] = {}
        self._peers: dict[Peer, None] = {}
        self._writing: set[Peer] = set()
        self._ready: deque[tuple[Peer | None, object]] = deque()
        self._posted: deque[object] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = threading.Event()
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._on_wake)
        self._listener: socket.socket | None = None
        self._accept_again_s: float | None = None
        self._tcp: TcpLinks | None = None
        try:
            self._listen(address, links, joinable)
        except OSError:
            self.close()
            raise
        tcp = self._tcp.address if self._tcp is not None else ""
        self.address = str(Address(str(address or ""), tcp, host_token() if tcp else ""))
        """Where others reach this process: control.address; "" if it does not listen."""

    def _listen(self, address: Path | None, links: LinkSettings | None, joinable: bool) -> None:
        if address is not None:
            self._listener = listen(address)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if links is not None:
            from triton_omni.backends.control.tcp_links import TcpLinks

            self._tcp = TcpLinks(self, self._selector, links, listens=joinable or address is not None)

    # --- from any thread -----------------------------------------------------------------------------------------
    def post(self, item: object) -> None:
        """Hand `item` to the owning thread; `poll` returns it as (None, item)."""
        self._posted.append(item)
        self.wake()

    def wake(self) -> None:
        """Make a sleeping `poll` return."""
        if not self._awake.is_set():
            self._awake.set()
            os.eventfd_write(self._wake_fd, 1)

    # --- from the owning thread ------------------------------------------------------------------------------------
    def connect(self, address: str) -> Peer:
        """The link to a listening process, made on first use; raises PeerLost if no process listens there."""
        peer = self._by_address.get(address)
        if peer is None or peer.lost:
            try:
                where = parse_address(address)
            except ValueError as error:
                raise PeerLost(str(error)) from None
            peer = self._by_address[address] = self._connect(where, address)
        return peer

    def _connect(self, where: Address, address: str) -> Peer:
        if where.is_local:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            try:
                sock.connect(where.path)  # never waits: a full backlog of the listener refuses at once
            except OSError as error:
                sock.close()
                if not where.tcp:
                    raise PeerLost(f"no process listens there ({error.strerror})") from None
            else:
                return self.adopt(sock, address)
        if self._tcp is None or not where.tcp:
            raise PeerLost("the address is on another host, and `links` are not deployed")
        peer = self._tcp.dial(where.tcp)
        peer.address = address
        return peer

    def adopt(self, sock: socket.socket, address: str = "") -> Peer:
        """Make a link of a connected socket."""
        return self._add(ShmConnector(Link(sock), self._stores()), address)

    def _add(self, connector: ShmConnector | TcpConnector, address: str) -> Peer:
        peer = Peer(self, connector, address)
        self._selector.register(peer.fd, selectors.EVENT_READ, partial(self.serve, peer))
        self._peers[peer] = None
        peer.send(HelloMessage(PROTOCOL_VERSION, self.name, self.gpu_uuid, self.address))
        return peer

    def poll(self, timeout_s: float | None) -> list[tuple[Peer | None, object]]:
        """Received (peer, message | chunk | Lost) and posted (None, item) entries, in order per peer."""
        if self._accept_again_s is not None:
            timeout_s = self._wait_to_accept(self._accept_again_s, timeout_s)
        if self._tcp is not None:
            timeout_s = self._tcp.expire(timeout_s)
        if self._ready or self._posted:
            timeout_s = 0
        for key, mask in self._selector.select(timeout_s):
            key.data(mask)
        items = list(self._ready)
        self._ready.clear()
        items += [(None, self._posted.popleft()) for _ in range(len(self._posted))]
        return items

    @contextlib.contextmanager
    def joined(self) -> Generator[None]:
        """Join what the body sends to each peer into a few packets, sent at its end; order is kept."""
        for peer in self._peers:
            peer.connector.link.joining = True
        try:
            yield
        finally:
            for peer in list(self._peers):
                link = peer.connector.link
                if link.joining:
                    link.joining = False
                    with contextlib.suppress(PeerLost):  # EOF follows and is reported there
                        peer.connector.send_held()
                    self.watch(peer)

    def gpu_paths(self) -> str:
        """The paths of GPU tensors to peers that have a GPU, for `doctor`; "" if there is no such peer."""
        paths = [peer.connector.device for peer in self._peers if peer.connector.device is not None]
        return "; ".join(sorted(path.summary for path in paths if path.peer_has_gpu))

    def watch(self, peer: Peer) -> None:
        """Poll for writability exactly while packets wait."""
        waiting = peer.connector.link.wants_write
        if waiting != (peer in self._writing):
            (self._writing.add if waiting else self._writing.discard)(peer)
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0)
            self._selector.modify(peer.fd, mask, partial(self.serve, peer))

    def close(self) -> None:
        """Close every link and the listening socket."""
        for peer in self._peers:
            peer.lost = True
            peer.connector.close()
        if self._tcp is not None:
            self._tcp.close()
        self._selector.close()
        self._awake.set()  # a late `post` must not write to a descriptor that reuses the number
        os.close(self._wake_fd)
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(str(self._path))

    def add_tcp(self, link: TcpLink, address: str) -> Peer:
        """Make a peer of a TCP stream (for control.tcp_links)."""
        from triton_omni.backends.connectors.tcp import TcpConnector

        return self._add(TcpConnector(link, self._stores()), address)

    def hang_up_fds(self, peer: Peer) -> tuple[int, ...]:
        """Descriptors whose hang-up means that a peer is gone; empty while a TCP link is being made."""
        if self._tcp is not None and not isinstance(peer.connector, ShmConnector):
            return self._tcp.fds(peer)
        return (peer.connector.fileno(),)

    def _on_wake(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        self._awake.clear()  # after the read: a wake between clear and read would disable all later ones

    def _accept(self, mask: int) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # pending connections stay in the backlog; existing links are unaffected
            log.error("cannot accept links for %g s: %s", ACCEPT_PAUSE_S, error)
            self._selector.unregister(self._listener)
            self._accept_again_s = time.monotonic() + ACCEPT_PAUSE_S
            return
        self.adopt(sock)

    def _wait_to_accept(self, again_s: float, timeout_s: float | None) -> float | None:
        """Resume listening when due; returns the bound of `poll`'s sleep."""
        assert self._listener is not None
        left_s = again_s - time.monotonic()
        if left_s > 0:
            return left_s if timeout_s is None else min(left_s, timeout_s)
        self._accept_again_s = None
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        return timeout_s

    def serve(self, peer: Peer, mask: int) -> None:
        """Handle what the selector reports of a peer's socket."""
        if peer.lost:
            return
        if not peer.connector.link.trusted:
            try:
                if self._tcp is None or not self._tcp.greet(peer):
                    self.watch(peer)
                    return
            except PeerLost as error:
                self.drop(peer, str(error))
                return
            mask = selectors.EVENT_READ | selectors.EVENT_WRITE  # what waits for the greeting on either side
        if mask & selectors.EVENT_WRITE:
            with contextlib.suppress(PeerLost):  # EOF follows and is reported there
                peer.connector.flush()
            self.watch(peer)
        if mask & selectors.EVENT_READ:
            self._read(peer)

    def _read(self, peer: Peer) -> None:
        try:
            for taken in itertools.count(1):
                item = peer.connector.get()
                if item is None:
                    return
                self._deliver(peer, item)
                if taken >= ITEMS_PER_TURN and not peer.connector.buffered:
                    return  # let other peers proceed; epoll reports the rest again
        except (PeerLost, msgspec.MsgspecError, RecursionError):  # a malformed message ends the link
            self.drop(peer)

    def _deliver(self, peer: Peer, item: Chunk | bytes) -> None:
        message = decode(item) if isinstance(item, bytes) else item
        if isinstance(message, HelloMessage):
            if message.version != PROTOCOL_VERSION:
                raise PeerLost(f"protocol version must be {PROTOCOL_VERSION} (got {message.version})")
            peer.name, peer.listens_at = message.name, message.address
            if peer.connector.device is not None:
                peer.connector.device.meet(message.name, self.gpu_uuid, message.gpu_uuid)
        else:
            self._ready.append((peer, message))

    def drop(self, peer: Peer, why: str = "") -> None:
        """Close a link; `poll` reports the loss. `why` is logged."""
        if peer.lost:
            return
        if why:
            log.warning("link to %s lost: %s", peer.name or peer.address or "a peer", why)
        peer.lost = True
        if self._tcp is not None:
            self._tcp.forget(peer)
        del self._peers[peer]
        self._writing.discard(peer)
        self._selector.unregister(peer.fd)
        peer.connector.close()
        if self._by_address.get(peer.address) is peer:
            del self._by_address[peer.address]
        self._ready.append((peer, Lost()))


def listen(address: Path) -> socket.socket:
    """A listening SEQPACKET socket at `address`, replacing one that a dead process left behind."""
    with contextlib.suppress(FileNotFoundError):
        address.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    sock.bind(str(address))
    sock.listen(128)
    return sock


def probe(address: str, timeout_s: float) -> PingMessage:
    """The PingMessage of the process that listens at `address`; raises PeerLost or TimeoutError."""
    hub = Hub("probe")
    try:
        peer = hub.connect(address)
        peer.send(PingMessage())
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            for source, item in hub.poll(left):
                if source is peer and isinstance(item, PingMessage):
                    return item
                if isinstance(item, Lost):
                    raise PeerLost("the process closed the link")
        raise TimeoutError(f"no answer within {timeout_s} s")
    finally:
        hub.close()
