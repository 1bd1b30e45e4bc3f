# SPDX-License-Identifier: Apache-2.0
"""A rank of an instance other than the engine's: holds the transformer and computes its share (ranks.py)."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from triton_omni.backends.core.errors import MAX_MESSAGE_CHARS, describe
from triton_omni.backends.diffusion.batching import make_forward
from triton_omni.backends.diffusion.forward import COMPUTE_ERRORS
from triton_omni.backends.diffusion.options import DiffusionOptions
from triton_omni.backends.diffusion.parallel.partition import (
    ForwardReply,
    ForwardRequest,
    RemotePart,
    error_text,
    unpack,
)
from triton_omni.backends.diffusion.parallel.ranks import MAX_MESSAGE_BYTES, join
from triton_omni.backends.diffusion.upstream import AutoModel, be_quiet

log = logging.getLogger("triton_omni.diffusion")


def serve(sock: socket.socket, rank: int, folder: Path, device_type: str, store_fd: int, options: str) -> int:
    """Serve until the engine is gone. `device_type` is "cpu" or "cuda", `options` is DiffusionOptions as JSON."""
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    try:
        worker = ForwardRank(sock, folder, msgspec.json.decode(options, type=DiffusionOptions), device)
    except Exception as error:  # any error becomes the load error of the stage
        log.exception("load failed")
        _send(sock, ForwardReply(describe(error)[:MAX_MESSAGE_CHARS]))
        return 1
    _send(sock, ForwardReply())
    if not sock.recv(MAX_MESSAGE_BYTES):
        return 0
    worker.join(rank, store_fd)
    with torch.inference_mode():
        while payload := sock.recv(MAX_MESSAGE_BYTES):
            worker.compute(msgspec.msgpack.decode(payload, type=ForwardRequest))
    return 0


class ForwardRank:
    """The transformer of one rank."""

    def __init__(self, sock: socket.socket, folder: Path, options: DiffusionOptions, device: torch.device) -> None:
        self._sock, self._options, self._device = sock, options, device
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        torch.set_num_threads(options.threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        be_quiet()
        transformer = AutoModel.from_pretrained(str(folder), subfolder="transformer", dtype=self._dtype)
        self._transformer = transformer.to(device).eval().requires_grad_(False)
        self._forward = make_forward(self._transformer, options)
        self._parts: list[RemotePart] = []

    def join(self, rank: int, store_fd: int) -> None:
        """Join the other ranks. Collective."""
        join(rank, self._transformer, self._options, self._device, store_fd)

    def compute(self, request: ForwardRequest) -> None:
        """One forward: reply with its outcome, then send the results unless every rank has them."""
        values = torch.empty(request.numel, dtype=self._dtype, device=self._device)
        dist.recv(values, 0)
        if request.parts is not None:
            self._parts = [RemotePart(shape) for shape in request.parts]
        try:
            unpack(values, self._parts, with_text=request.parts is not None)
            predicted = [prediction.positive for prediction in self._forward.predict(self._parts)]
            results = torch.cat([velocity.reshape(-1) for velocity in predicted]).to(self._dtype)
        except COMPUTE_ERRORS as error:
            log.warning("a forward failed: %s", error)
            _send(self._sock, ForwardReply(error_text(error)))
            return
        _send(self._sock, ForwardReply("", predicted[0].shape[-1]))
        if self._options.parallel.context == 1:
            dist.send(results, 0)


def _send(sock: socket.socket, reply: ForwardReply) -> None:
    sock.send(msgspec.msgpack.encode(reply))
