# SPDX-License-Identifier: Apache-2.0
"""The TCP side of a hub: the listener, greetings in progress, and the pulse of each link.

A peer that is not greeted within GREETING_S is closed. A process that dies closes its streams at once. A host that
dies, or a cut path, closes nothing: the kernel's keep-alive probes of the pulse notice it within 5 s, whatever the
process at the other end is busy with.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import time
from functools import partial
from typing import TYPE_CHECKING

from triton_omni.backends.connectors.base import PeerLost
from triton_omni.backends.connectors.greeting import Greeting
from triton_omni.backends.connectors.tcp import TcpLink, tls_contexts
from triton_omni.backends.control.address import host_and_port, tcp_address
from triton_omni.backends.control.link_settings import LinkSettings

if TYPE_CHECKING:
    from triton_omni.backends.control.hub import Hub, Peer

log = logging.getLogger("triton_omni.control")

GREETING_S = 5.0  # from the first packet to a trusted link with a pulse
MAX_STRANGERS = 64  # accepted streams whose greeting is not over; the oldest gives way
KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))  # a cut is seen in 4 to 5 s
SYN_RETRIES = 2  # the kernel's default of 6 would go on for two minutes
ACCEPTS_PER_TURN = 64
ACCEPT_PAUSE_S = 1.0  # after an accept that failed for lack of descriptors or memory


class TcpLinks:
    """Listener, strangers and pulses of one hub. Used by the hub's thread."""

    def __init__(self, owner: Hub, selector: selectors.BaseSelector, settings: LinkSettings, listens: bool) -> None:
        self.address = ""
        self._owner = owner
        self._selector = selector
        self._key = settings.key
        self._dialer_tls, self._listener_tls = tls_contexts(*settings.tls) if settings.tls else (None, None)
        self._strangers: dict[TcpLink, float] = {}
        """Accepted streams that are not greeted yet → when they are closed; oldest first."""
        self._unsettled: dict[Peer, tuple[float, str]] = {}
        """Peers without a greeting or a pulse → until when, and what is missing then; oldest first."""
        self._links: dict[Peer, TcpLink] = {}
        self._dialed: dict[Peer, str] = {}
        self._pulses: dict[Peer, TcpLink] = {}
        self._accept_again_s: float | None = None
        self._listener = _listen(settings) if listens else None
        if self._listener is not None:
            self.address = tcp_address(*self._listener.getsockname()[:2])
            selector.register(self._listener, selectors.EVENT_READ, self._accept)

    # --- dialing -----------------------------------------------------------------------------------------------------
    def dial(self, address: str) -> Peer:
        """A link to `address`, which may be used at once; if no process answers there, it is lost within GREETING_S."""
        link = self._dial(address, Greeting(self._key, dials=True))
        peer = self._owner.add_tcp(link, address)
        self._links[peer], self._dialed[peer] = link, address
        self._expect(peer, f"no answer within {GREETING_S:g} s")
        return peer

    def greet(self, peer: Peer) -> bool:
        """Go on with the greeting of a peer that was dialed; True once it is trusted. Raises PeerLost."""
        link = self._links[peer]
        link.greet()
        if link.trusted:
            self._expect(peer, "its host takes no second stream")
            self._dial_pulse(peer, link)
        return link.trusted

    def _dial(self, address: str, greeting: Greeting) -> TcpLink:
        host, port = host_and_port(address)
        try:
            family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            raise PeerLost(f"no way to {address} ({error.strerror})") from None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, SYN_RETRIES)
        if (error := sock.connect_ex(target)) and error != errno.EINPROGRESS:
            sock.close()
            raise PeerLost(f"no way to {address} ({errno.errorcode[error]})")
        return TcpLink(sock, greeting, self._dialer_tls, dials=True)

    def _dial_pulse(self, peer: Peer, link: TcpLink) -> None:
        greeting = Greeting(self._key, dials=True)
        greeting.outgoing, greeting.missing, greeting.trusted = link.greeting.pulse(), 0, True
        self._add_pulse(peer, self._dial(self._dialed[peer], greeting))

    # --- accepting ---------------------------------------------------------------------------------------------------
    def _accept(self, mask: int) -> None:
        assert self._listener is not None
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # pending connections stay in the backlog; existing links are unaffected
                log.error("cannot accept TCP links for %g s: %s", ACCEPT_PAUSE_S, error)
                self._selector.unregister(self._listener)
                self._accept_again_s = time.monotonic() + ACCEPT_PAUSE_S
                return
            if len(self._strangers) >= MAX_STRANGERS:
                self._close_stranger(next(iter(self._strangers)), "too many streams are not greeted")
            stranger = TcpLink(sock, Greeting(self._key, dials=False), self._listener_tls, dials=False)
            self._strangers[stranger] = time.monotonic() + GREETING_S
            self._selector.register(stranger.socket, selectors.EVENT_READ, partial(self._on_stranger, stranger))

    def _on_stranger(self, stranger: TcpLink, mask: int) -> None:
        if stranger not in self._strangers:
            return
        if stranger.greeting.pulse_proof:  # a pulse that waits for its link must be silent
            self._close_stranger(stranger, "its link did not come")
            return
        fd = stranger.fileno()
        try:
            stranger.greet()
        except PeerLost as error:
            self._close_stranger(stranger, str(error), fd)
            return
        if stranger.greeting.pulse_proof:
            self._attach(stranger)  # else it waits: its link's last part may still be on its way
        elif stranger.trusted:
            self._leave(stranger, fd)
            peer = self._owner.add_tcp(stranger, "")
            self._links[peer] = stranger
            self._expect(peer, "its pulse did not come")
            for waiting in [s for s in self._strangers if s.greeting.pulse_proof]:
                self._attach(waiting)
            self._owner.serve(peer, selectors.EVENT_READ)  # TLS may hold more, which no event will announce
        else:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if stranger.wants_write else 0)
            self._selector.modify(fd, events, partial(self._on_stranger, stranger))

    def _leave(self, stranger: TcpLink, fd: int) -> None:
        del self._strangers[stranger]
        self._selector.unregister(fd)

    def _close_stranger(self, stranger: TcpLink, why: str, fd: int | None = None) -> None:
        with contextlib.suppress(OSError):
            log.warning("a TCP stream from %s was refused: %s", stranger.socket.getpeername()[0], why)
        self._leave(stranger, stranger.fileno() if fd is None else fd)
        stranger.close()

    # --- pulses ------------------------------------------------------------------------------------------------------
    def _attach(self, pulse: TcpLink) -> None:
        """Make an accepted stream the pulse of its link, if that is there."""
        for peer, link in self._links.items():
            ours = link.greeting.peer_nonce == pulse.greeting.pulse_of and peer not in self._pulses
            if ours and link.greeting.is_pulse(pulse.greeting.pulse_proof):
                self._leave(pulse, pulse.fileno())
                pulse.greeting.trusted = True
                self._add_pulse(peer, pulse)
                return

    def _add_pulse(self, peer: Peer, pulse: TcpLink) -> None:
        pulse.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            pulse.socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._pulses[peer] = pulse
        self._selector.register(pulse.fileno(), self._pulse_events(peer), partial(self._on_pulse, peer))

    def _pulse_events(self, peer: Peer) -> int:
        """What to poll a pulse for; a pulse that has been sent ends the wait for it."""
        pulse = self._pulses[peer]
        if pulse.trusted:
            self._unsettled.pop(peer, None)
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if pulse.wants_write else 0)

    def _on_pulse(self, peer: Peer, mask: int) -> None:
        pulse = self._pulses.get(peer)
        if pulse is None:
            return
        if not pulse.trusted:
            try:
                pulse.greet()
            except PeerLost as error:
                self._owner.drop(peer, f"no second stream to its host ({error})")
            else:
                self._selector.modify(pulse.fileno(), self._pulse_events(peer), partial(self._on_pulse, peer))
            return
        try:
            if pulse.socket.recv(1):
                self._owner.drop(peer, "its pulse carries data")
                return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError as error:
            if not isinstance(error, ConnectionResetError):
                self._owner.drop(peer, f"its host gives no sign of life ({error.strerror})")
                return
        # its process has ended, and so will the link, once all is read that it had sent
        self._remove_pulse(peer)
        self._expect(peer, "its pulse stopped")

    def _remove_pulse(self, peer: Peer) -> None:
        pulse = self._pulses.pop(peer, None)
        if pulse is not None:
            self._selector.unregister(pulse.fileno())
            pulse.close()

    # --- time --------------------------------------------------------------------------------------------------------
    def _expect(self, peer: Peer, why: str) -> None:
        """Drop `peer` for reason `why` unless it settles within GREETING_S."""
        self._unsettled.pop(peer, None)
        self._unsettled[peer] = time.monotonic() + GREETING_S, why

    def expire(self, timeout_s: float | None) -> float | None:
        """Close what is overdue; returns the bound of the hub's sleep."""
        if not self._strangers and not self._unsettled and self._accept_again_s is None:
            return timeout_s
        now = time.monotonic()
        if self._listener is not None and self._accept_again_s is not None and self._accept_again_s <= now:
            self._accept_again_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for stranger in [s for s, until_s in self._strangers.items() if until_s <= now]:
            self._close_stranger(stranger, f"it was not greeted within {GREETING_S:g} s")
        for peer, (_, why) in [(p, value) for p, value in self._unsettled.items() if value[0] <= now]:
            self._owner.drop(peer, why)
        deadlines = [*self._strangers.values(), *(until_s for until_s, _ in self._unsettled.values())]
        deadlines += [] if self._accept_again_s is None else [self._accept_again_s]
        left_s = max(0.0, min(deadlines, default=now + GREETING_S) - now)
        return left_s if timeout_s is None else min(left_s, timeout_s)

    def forget(self, peer: Peer) -> None:
        """The hub has dropped a peer."""
        self._links.pop(peer, None)
        self._dialed.pop(peer, None)
        self._unsettled.pop(peer, None)
        self._remove_pulse(peer)

    def fds(self, peer: Peer) -> tuple[int, ...]:
        """The descriptors whose hang-up means the loss of a peer: its link and its pulse; empty before it has both."""
        settled = peer in self._pulses and peer not in self._unsettled
        return (self._links[peer].fileno(), self._pulses[peer].fileno()) if settled else ()

    def close(self) -> None:
        """Close the listener and all streams that are not the hub's peers."""
        for link in (*self._strangers, *self._pulses.values()):
            link.close()
        if self._listener is not None:
            self._listener.close()


def _listen(settings: LinkSettings) -> socket.socket:
    """A listening socket on the first free port. Raises OSError if there is none."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    first, last = settings.ports
    for port in range(first, last + 1):
        try:
            listener = socket.create_server((settings.host, port), family=family, backlog=128)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(error.errno, f"cannot listen on {settings.host} port {port}: {error.strerror}") from None
        else:
            listener.setblocking(False)
            return listener
    raise OSError(errno.EADDRINUSE, f"no port from {first} to {last} of {settings.host} is free")
