# SPDX-License-Identifier: Apache-2.0
"""The up and down messages and the sockets they travel on."""

from triton_omni.backends.control.hub import Hub, Lost, Peer, probe

__all__ = ["Hub", "Lost", "Peer", "probe"]
