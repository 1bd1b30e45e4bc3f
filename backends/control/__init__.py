# SPDX-License-Identifier: Apache-2.0
"""Control messages and the hub of links that carries them."""

from triton_omni.backends.control.hub import Hub, Lost, Peer, probe

__all__ = ["Hub", "Lost", "Peer", "probe"]
