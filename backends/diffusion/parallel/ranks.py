# SPDX-License-Identifier: Apache-2.0
"""Starts, joins, watches and ends the processes that share an instance's forwards, one transformer per GPU.

The engine is rank 0: it alone has requests, schedulers, text encoder and VAE. The other ranks (rank_worker.py) hold the
transformer and compute forward requests. Messages travel over a socket per rank, tensors over torch.distributed (NCCL
between GPUs, Gloo between CPUs, both on this host only). ParallelForward (forward.py) decides what is computed where.

Failures. A rank replies whether its forward succeeded before any result is sent, so a request that cannot be computed
fails everywhere or nowhere, and the ranks stay in step. A rank that dies is seen by its socket, one that hangs by
`answer_s`: both end the step with StageFailed, which ends the worker, and the stub restarts it. If the engine itself
waits inside a collective that never returns, the watcher thread ends the process. A rank ends when its socket closes.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import cast

import msgspec
import torch
import torch.distributed as dist

from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.errors import StageFailed
from triton_omni.backends.diffusion.options import DiffusionOptions, ParallelOptions
from triton_omni.backends.diffusion.parallel import context
from triton_omni.backends.diffusion.parallel.partition import ForwardReply, ForwardRequest
from triton_omni.backends.diffusion.upstream import QwenImageTransformer2DModel

log = logging.getLogger("triton_omni.diffusion")

GRACE_S = 5.0  # time for a worker that has lost a rank to fail its requests before the process is ended
KILL_WAIT_S = 5.0  # for a killed process to exit
MAX_MESSAGE_BYTES = 1 << 18  # a PartShape takes about 50 bytes, an error at most 2,000
JOIN = b"join"


def join(
    rank: int, transformer: QwenImageTransformer2DModel, options: DiffusionOptions, device: torch.device, store_fd: int
) -> None:
    """Join the process group through the FileStore `store_fd`. Collective: all ranks call this at the same time."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    ranks, on_gpu = options.parallel.ranks, device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
            f"/proc/self/fd/{store_fd}", ranks
        ),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=options.parallel.answer_s),
        device_id=torch.device("cuda", rank) if on_gpu else None,  # the engine's device has no index
    )
    count = torch.ones(1, device=device)
    dist.all_reduce(count)  # the first collective connects, so that connection errors are load errors
    assert int(count) == ranks
    if options.parallel.context > 1:
        context.enable(transformer, options.parallel, device)


def check_gpus(parallel: ParallelOptions, gpus: int, stage: str) -> None:
    """Raise OptionsError unless an instance has exactly one GPU per rank.

    `gpus` is 0 on a CPU, and if no GPU works, which torch reports itself.
    """
    if gpus and parallel.ranks != gpus:
        raise OptionsError(
            f"stage '{stage}': parallel needs {parallel.ranks} GPU(s), but an instance has {gpus} GPU(s); "
            f"set gpus_per_instance to the number of ranks"
        )


def _leave(on_gpu: bool) -> None:
    if dist.is_initialized() and on_gpu:
        dist.distributed_c10d._abort_process_group()  # NCCL's destroy waits until all ranks call it
    elif dist.is_initialized():
        dist.destroy_process_group()


class RankGroup:
    """The other ranks of one instance: started and joined by the constructor, ended by `close`."""

    def __init__(
        self, folder: Path, options: DiffusionOptions, device: torch.device, transformer: QwenImageTransformer2DModel
    ) -> None:
        """`transformer` is that of this rank. Raises OptionsError if a rank cannot load or join."""
        self.count = options.parallel.ranks
        reason = context.unsupported_reason(transformer, options.parallel, device)
        if options.parallel.context > 1 and reason:
            raise OptionsError(f"parallel: {reason}")
        self._transformer, self._options, self._device = transformer, options, device
        self._socks: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._store = os.memfd_create("ranks")  # anonymous: leaves no file behind
        self._closing, self._closed = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            for rank in range(1, self.count):  # sequential: host memory holds the weights of one rank at a time
                self._start(rank, folder)
                self._wait_loaded(rank)
            self._watcher.start()
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks, by rank."""
        return [process.pid for process in self._processes]

    def request(self, rank: int, request: ForwardRequest, values: torch.Tensor) -> dist.Work:
        """Send a request and start to send its tensor; returns a handle for `finish_send`."""
        self._send(rank, msgspec.msgpack.encode(request))
        with self._reaching(rank):
            return cast(dist.Work, dist.isend(values, rank))  # None only outside the group

    def finish_send(self, rank: int, work: dist.Work) -> None:
        """Wait until a rank has received the tensor."""
        with self._reaching(rank):
            work.wait()

    def reply(self, rank: int, deadline_s: float = math.inf) -> ForwardReply:
        """Receive a rank's reply; StageFailed if it has died or does not reply before `deadline_s` (monotonic)."""
        return msgspec.msgpack.decode(self._receive(rank, deadline_s), type=ForwardReply)

    def receive(self, rank: int, values: torch.Tensor) -> None:
        """Receive a rank's results into `values`."""
        with self._reaching(rank):
            dist.recv(values, rank)

    def close(self) -> None:
        """End all other ranks; called once."""
        os.close(self._closed)
        if self._watcher.is_alive():
            self._watcher.join()
        os.close(self._closing)
        on_gpu = self._device.type == "cuda"
        if on_gpu:  # before the other ranks exit, which NCCL would report as a failure
            _leave(on_gpu)
        for sock in self._socks:
            sock.close()
        for process in self._processes:
            process.kill()
        for rank, process in enumerate(self._processes, 1):
            try:
                process.wait(KILL_WAIT_S)
            except subprocess.TimeoutExpired:  # the driver may still be freeing its memory
                log.warning("rank %d of %d was killed but has not exited yet", rank, self.count)
        if not on_gpu:  # Gloo waits for a rank that hangs, but not for one that has exited
            _leave(on_gpu)
        os.close(self._store)

    # --- start ---------------------------------------------------------------------------------------------------
    def _start(self, rank: int, folder: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [
                *(sys.executable, "-m", "triton_omni.backends.diffusion.parallel.rank_main", "--rank", str(rank)),
                *("--folder", str(folder), "--fd", str(theirs.fileno()), "--store", str(self._store)),
                *("--device", self._device.type, "--options", msgspec.json.encode(self._options).decode()),
            ]
            fds = (theirs.fileno(), self._store)
            self._processes.append(subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, cwd="/"))
        self._socks.append(ours)

    def _wait_loaded(self, rank: int) -> None:
        """Wait until a rank has loaded; the stage's `start_timeout_s` bounds this."""
        try:
            reply = self.reply(rank)
        except StageFailed as error:
            raise OptionsError(f"parallel: {error.message} during load") from None
        if reply.error:
            raise OptionsError(f"parallel: rank {rank} of {self.count} failed to load: {reply.error}")

    def _join(self) -> None:
        try:
            for rank in range(1, self.count):
                self._send(rank, JOIN)
            join(0, self._transformer, self._options, self._device, self._store)
        except (RuntimeError, StageFailed) as error:
            raise OptionsError(f"parallel: the {self.count} ranks cannot connect: {error}") from error

    # --- messages ------------------------------------------------------------------------------------------------
    def _send(self, rank: int, payload: bytes) -> None:
        try:
            self._socks[rank - 1].send(payload)
        except ConnectionError:
            raise self._death(rank) from None

    def _receive(self, rank: int, deadline_s: float) -> bytes:
        sock = self._socks[rank - 1]
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        left_s = max(0.0, deadline_s - time.monotonic())
        if not poller.poll(None if left_s == math.inf else left_s * 1000):
            timeout_s = self._options.parallel.answer_s
            raise StageFailed(f"rank {rank} of {self.count} did not reply within {timeout_s:g} s")
        try:
            payload = sock.recv(MAX_MESSAGE_BYTES)
        except ConnectionError:
            payload = b""
        if not payload:
            raise self._death(rank)
        return payload

    @contextmanager
    def _reaching(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._death(rank, str(error)) from error

    def _death(self, rank: int, why: str = "it closed its socket") -> StageFailed:
        try:
            code = self._processes[rank - 1].wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            return StageFailed(f"rank {rank} of {self.count} cannot be reached: {why}")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return StageFailed(f"rank {rank} of {self.count} died {how}")

    # --- watch ---------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        """End this process if a rank died and `close` is not called: the engine is idle, or waits in a collective."""
        closing, poller = select.poll(), select.poll()
        for each in (closing, poller):
            each.register(self._closing, select.POLLHUP)
        rank_of = {os.pidfd_open(pid): rank for rank, pid in enumerate(self.pids, 1)}
        for pidfd in rank_of:
            poller.register(pidfd, select.POLLIN)
        dead = [rank_of[fd] for fd, _ in poller.poll() if fd in rank_of]
        for pidfd in rank_of:
            os.close(pidfd)
        if dead:
            log.error("rank %d of %d died; the worker ends", dead[0], self.count)
            if not closing.poll(GRACE_S * 1000):
                os._exit(1)
