# SPDX-License-Identifier: Apache-2.0
"""One rank of an instance but the first: it holds the transformer and computes what the engine asks (ranks.py)."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from triton_omni.backends.core.errors import MAX_MESSAGE_CHARS
from triton_omni.backends.diffusion.batching import forward_of
from triton_omni.backends.diffusion.forward import COMPUTE_ERRORS
from triton_omni.backends.diffusion.options import DiffusionOptions
from triton_omni.backends.diffusion.parallel.partition import Answer, Ask, Copy, reason, unpack
from triton_omni.backends.diffusion.parallel.ranks import MAX_WORDS, join
from triton_omni.backends.diffusion.upstream import AutoModel, be_quiet

log = logging.getLogger("triton_omni.diffusion")


def serve(sock: socket.socket, rank: int, folder: Path, device_type: str, store_fd: int, options: str) -> int:
    """Be a rank until the engine is gone; `device_type` is "cpu" or "cuda", `options` are DiffusionOptions as JSON."""
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    try:
        follower = Follower(sock, folder, msgspec.json.decode(options, type=DiffusionOptions), device)
    except Exception as error:  # whatever stops it from loading becomes the model's load error, in words
        log.exception("it did not load")
        _say(sock, Answer(f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]))
        return 1
    _say(sock, Answer())
    if not sock.recv(MAX_WORDS):
        return 0
    follower.join(rank, store_fd)
    with torch.inference_mode():
        while words := sock.recv(MAX_WORDS):
            follower.compute(msgspec.msgpack.decode(words, type=Ask))
    return 0


class Follower:
    """The transformer of one rank."""

    def __init__(self, sock: socket.socket, folder: Path, options: DiffusionOptions, device: torch.device) -> None:
        self._sock, self._options, self._device = sock, options, device
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        torch.set_num_threads(options.threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        be_quiet()
        transformer = AutoModel.from_pretrained(str(folder), subfolder="transformer", dtype=self._dtype)
        self._transformer: Any = transformer.to(device).eval().requires_grad_(False)
        self._forward = forward_of(self._transformer, options)
        self._copies: list[Copy] = []

    def join(self, rank: int, store_fd: int) -> None:
        """Meet the others. Collective."""
        join(rank, self._transformer, self._options, self._device, store_fd)

    def compute(self, ask: Ask) -> None:
        """One forward: say how it went, then send the results, if they are not on every rank anyway."""
        numbers = torch.empty(ask.numel, dtype=self._dtype, device=self._device)
        dist.recv(numbers, 0)
        if ask.parts is not None:
            self._copies = [Copy(outline) for outline in ask.parts]
        try:
            unpack(numbers, self._copies, with_text=ask.parts is not None)
            found = [one.positive for one in self._forward.predict(self._copies)]
            results = torch.cat([one.reshape(-1) for one in found]).to(self._dtype)
        except COMPUTE_ERRORS as error:
            log.warning("a forward failed: %s", error)
            _say(self._sock, Answer(reason(error)))
            return
        _say(self._sock, Answer("", found[0].shape[-1]))
        if self._options.parallel.context == 1:
            dist.send(results, 0)


def _say(sock: socket.socket, answer: Answer) -> None:
    sock.send(msgspec.msgpack.encode(answer))
