# SPDX-License-Identifier: Apache-2.0
"""The greeting of a TCP link: both ends prove that they know the server's key before anything of ours leaves.

    dialer    magic "d" nonce                  first
    listener  magic "l" nonce proof            only to well-formed first bytes
    dialer    proof                            only to a listener whose proof is right
    pulse     magic "p" nonce proof            a second stream of the same dialer, see tcp.py

A proof is HMAC-SHA256 of the key over magic, the sender's role, its own nonce and the other's. Nonces are random for
each link, so a recorded greeting proves nothing; roles differ, so an echo does not either. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import hashlib
import hmac
import os

MAGIC = b"OMNI-TCP1"
NONCE_BYTES = PROOF_BYTES = 32  # the digest of SHA-256
FIRST_BYTES = len(MAGIC) + 1 + NONCE_BYTES
KEY_BYTES = 32  # at least; as many as the digest
DIALER, LISTENER, PULSE = b"d", b"l", b"p"


class Greeting:
    """One end's part of the greeting of one stream."""

    def __init__(self, key: bytes, dials: bool) -> None:
        self.trusted = False
        self.pulse_of = b""
        """The link whose pulse this stream is, by its dialer's nonce; `pulse_proof` is still to be checked."""
        self.pulse_proof = b""
        self.nonce = os.urandom(NONCE_BYTES)
        self.peer_nonce = b""
        self._key = key
        self._role = DIALER if dials else LISTENER
        self._theirs = LISTENER if dials else DIALER
        self.outgoing = MAGIC + self._role + self.nonce if dials else b""
        self.missing = FIRST_BYTES
        """Bytes of the peer's next part."""

    def receive(self, part: bytes) -> None:
        """Take `missing` bytes of the peer. Raises ValueError if they are wrong."""
        if not self.peer_nonce:
            self._on_first(part)
        elif self.pulse_of:
            self.pulse_proof, self.missing = part, 0
        elif not hmac.compare_digest(part, self._proof(self._theirs, self.peer_nonce, self.nonce)):
            raise ValueError("the peer does not know the key")
        else:
            if self._role == DIALER:
                self.outgoing += self._proof(self._role, self.nonce, self.peer_nonce)
            self.trusted, self.missing = True, 0

    def pulse(self) -> bytes:
        """What the dialer of a trusted link sends as the link's pulse."""
        return MAGIC + PULSE + self.nonce + self._proof(PULSE, self.nonce, self.peer_nonce)

    def is_pulse(self, proof: bytes) -> bool:
        """True if `proof` came from the dialer of this trusted link."""
        return hmac.compare_digest(proof, self._proof(PULSE, self.peer_nonce, self.nonce))

    def _on_first(self, part: bytes) -> None:
        role, nonce = part[len(MAGIC) : len(MAGIC) + 1], part[len(MAGIC) + 1 :]
        if part[: len(MAGIC)] != MAGIC or role not in (self._theirs, PULSE if self._role == LISTENER else self._theirs):
            raise ValueError("the peer is no process of a Triton-Omni server")
        self.peer_nonce, self.missing = nonce, PROOF_BYTES
        if role == PULSE:
            self.pulse_of = nonce
        elif self._role == LISTENER:
            proof = self._proof(self._role, self.nonce, nonce)
            self.outgoing += MAGIC + self._role + self.nonce + proof

    def _proof(self, role: bytes, own: bytes, other: bytes) -> bytes:
        return hmac.digest(self._key, MAGIC + role + own + other, hashlib.sha256)
