# SPDX-License-Identifier: Apache-2.0
"""Several processes, each with the transformer on a GPU of its own: started, joined, heard and ended.

The engine is rank 0: it alone has requests, schedulers, text encoder and VAE. The others are *followers*
(follower.py): they hold the transformer and compute what they are asked. Words go over a socket to each, numbers over
torch.distributed (NCCL between GPUs, Gloo between CPUs, both on this host only). What is asked stands in spread.py.

Ends. A follower answers whether its forward went well before any result is sent, so a request that cannot be computed
fails everywhere or nowhere, and the ranks stay in step. One that dies is seen by its socket, one that hangs by
`answer_s`: both end the step with StageFailed, which ends the worker, and the stub starts another. Where the engine
waits inside a collective that never comes back, a thread that watches the followers ends the process. A follower ends
when its socket closes, whatever closed it.
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
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.errors import StageFailed
from triton_omni.backends.diffusion.options import DiffusionOptions, Parallel
from triton_omni.backends.diffusion.parallel import context
from triton_omni.backends.diffusion.parallel.partition import Answer, Ask

log = logging.getLogger("triton_omni.diffusion")

GRACE_S = 5.0  # a worker that has lost a follower fails its requests in words within this time, or ends without
LEAVE_S = 5.0  # for a killed process to be gone
MAX_WORDS = 1 << 18  # bytes of one message; an outline is about 50, an error 2,000 at most
JOIN = b"join"


def join(rank: int, transformer: Any, options: DiffusionOptions, device: torch.device, store_fd: int) -> None:
    """Become `rank` of those that meet in the file `store_fd`. All ranks call this at the same time."""
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
        device_id=torch.device("cuda", rank) if on_gpu else None,  # the engine's own device has no number
    )
    here = torch.ones(1, device=device)
    dist.all_reduce(here)  # the first collective connects: what is wrong with that is a load error
    assert int(here) == ranks
    if options.parallel.context > 1:
        context.share(transformer, options.parallel, device)


def check_gpus(parallel: Parallel, gpus: int, stage: str) -> None:
    """Raise OptionsError unless an instance has a GPU for each rank and no other.

    0: it runs on a CPU, or there is no GPU that works, of which torch says more.
    """
    if gpus and parallel.ranks != gpus:
        raise OptionsError(
            f"stage '{stage}': parallel makes {parallel.ranks} rank(s), but an instance has {gpus} GPU(s); "
            f"set gpus_per_instance to the number of ranks"
        )


def _leave(on_gpu: bool) -> None:
    if dist.is_initialized() and on_gpu:
        dist.distributed_c10d._abort_process_group()  # NCCL's destroy waits until all ranks call it
    elif dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """The followers of one instance: started and joined when made, gone when closed."""

    def __init__(self, folder: Path, options: DiffusionOptions, device: torch.device, transformer: Any) -> None:
        """`transformer` is that of this rank. Raises OptionsError if another cannot load, or they cannot be joined."""
        self.count = options.parallel.ranks
        problem = context.lacks(transformer, options.parallel, device) if options.parallel.context > 1 else ""
        if problem:
            raise OptionsError(f"parallel: {problem}")
        self._transformer, self._options, self._device = transformer, options, device
        self._socks: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._store = os.memfd_create("ranks")  # where they meet; nothing of it stays behind
        self._closing, self._closed = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            for rank in range(1, self.count):  # one after the other: host memory holds the weights of one
                self._start(rank, folder)
                self._loaded(rank)
            self._watcher.start()
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The followers' processes, by rank."""
        return [process.pid for process in self._processes]

    def ask(self, rank: int, ask: Ask, numbers: torch.Tensor) -> Any:
        """Give a follower something to compute. The numbers are on their way until what is returned is `sent`."""
        self._say(rank, msgspec.msgpack.encode(ask))
        with self._reaching(rank):
            return dist.isend(numbers, rank)

    def sent(self, rank: int, work: Any) -> None:
        """Wait until a follower has the numbers."""
        with self._reaching(rank):
            work.wait()

    def answer(self, rank: int, deadline_s: float = math.inf) -> Answer:
        """The follower's word on what it was asked; StageFailed if it has died or says nothing in time."""
        return msgspec.msgpack.decode(self._hear(rank, deadline_s), type=Answer)

    def take(self, rank: int, numbers: torch.Tensor) -> None:
        """Receive what a follower has computed."""
        with self._reaching(rank):
            dist.recv(numbers, rank)

    def close(self) -> None:
        """End all followers; called once."""
        os.close(self._closed)
        if self._watcher.is_alive():
            self._watcher.join()
        os.close(self._closing)
        on_gpu = self._device.type == "cuda"
        if on_gpu:  # before the others are gone, which NCCL would see as their failure
            _leave(on_gpu)
        for sock in self._socks:
            sock.close()
        for process in self._processes:
            process.kill()
        for rank, process in enumerate(self._processes, 1):
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:  # a driver still gives its memory back; nobody has to wait for that
                log.warning("rank %d of %d was killed and is not gone yet", rank, self.count)
        if not on_gpu:  # Gloo waits for a rank that hangs, not for one that is gone
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

    def _loaded(self, rank: int) -> None:
        """Wait until a follower has its weights; how long that may take is the stage's `start_timeout_s`."""
        try:
            answer = self.answer(rank)
        except StageFailed as error:
            raise OptionsError(f"parallel: {error.message} while it loaded") from None
        if answer.error:
            raise OptionsError(f"parallel: rank {rank} of {self.count} did not load: {answer.error}")

    def _join(self) -> None:
        try:
            for rank in range(1, self.count):
                self._say(rank, JOIN)
            join(0, self._transformer, self._options, self._device, self._store)
        except (RuntimeError, StageFailed) as error:
            raise OptionsError(f"parallel: the {self.count} ranks do not reach one another: {error}") from error

    # --- words ---------------------------------------------------------------------------------------------------
    def _say(self, rank: int, words: bytes) -> None:
        try:
            self._socks[rank - 1].send(words)
        except ConnectionError:
            raise self._death(rank) from None

    def _hear(self, rank: int, deadline_s: float) -> bytes:
        sock = self._socks[rank - 1]
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        left_s = max(0.0, deadline_s - time.monotonic())
        if not poller.poll(None if left_s == math.inf else left_s * 1000):
            waited_s = self._options.parallel.answer_s
            raise StageFailed(f"rank {rank} of {self.count} has not answered within {waited_s:g} s")
        try:
            words = sock.recv(MAX_WORDS)
        except ConnectionError:
            words = b""
        if not words:
            raise self._death(rank)
        return words

    @contextmanager
    def _reaching(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._death(rank, str(error)) from error

    def _death(self, rank: int, why: str = "it has closed its socket") -> StageFailed:
        try:
            code = self._processes[rank - 1].wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            return StageFailed(f"rank {rank} of {self.count} cannot be reached: {why}")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return StageFailed(f"rank {rank} of {self.count} died {how}")

    # --- watch ---------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        """End this process if a follower has died and nobody closes us: the engine is idle, or in a collective."""
        closing, poller = select.poll(), select.poll()
        for one in (closing, poller):
            one.register(self._closing, select.POLLHUP)
        rank_of = {os.pidfd_open(pid): rank for rank, pid in enumerate(self.pids, 1)}
        for pidfd in rank_of:
            poller.register(pidfd, select.POLLIN)
        dead = [rank_of[fd] for fd, _ in poller.poll() if fd in rank_of]
        for pidfd in rank_of:
            os.close(pidfd)
        if dead:
            log.error("rank %d of %d is gone; this worker ends, too", dead[0], self.count)
            if not closing.poll(GRACE_S * 1000):
                os._exit(1)
