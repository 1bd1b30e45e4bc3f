# SPDX-License-Identifier: Apache-2.0
"""Several processes, each with the transformer on a GPU of its own, compute the forwards of one instance.

The engine is rank 0: it alone has requests, schedulers, text encoder and VAE. The others are *followers*
(follower.py): they hold the transformer and compute what they are asked. Words go over a socket to each, numbers over
torch.distributed (NCCL between GPUs, Gloo between CPUs, both on this host only).

    cfg      every rank gets some parts of the step, and the results are gathered
    context  every rank gets all of it, and diffusers splits each picture's tokens inside the transformer (context.py)

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from backends.core.engine import OptionsError
from backends.core.errors import StageFailed
from backends.diffusion import context
from backends.diffusion.forward import COMPUTE_ERRORS, Forward, Pictures, Prediction
from backends.diffusion.options import DiffusionOptions, Parallel
from backends.diffusion.shares import Answer, Ask, Outline, Part, deal, pack, parts_of, together

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
        device_id=device if on_gpu else None,
    )
    here = torch.ones(1, device=device)
    dist.all_reduce(here)  # the first collective connects: what is wrong with that is a load error
    assert int(here) == ranks
    if options.parallel.context > 1:
        context.share(transformer, options.parallel, device)


def _lacks(transformer: Any, parallel: Parallel, device: torch.device) -> str:
    """What keeps these ranks from being started, in words; empty if nothing does."""
    if device.type == "cuda" and parallel.ranks > torch.cuda.device_count():
        return f"{parallel.ranks} ranks need a GPU each; say `gpus_per_instance: {parallel.ranks}` for this stage"
    return context.lacks(transformer, parallel, device) if parallel.context > 1 else ""


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """The followers of one instance: started and joined when made, gone when closed."""

    def __init__(self, folder: Path, options: DiffusionOptions, device: torch.device, transformer: Any) -> None:
        """`transformer` is that of this rank. Raises OptionsError if another cannot load, or they cannot be joined."""
        self.count = options.parallel.ranks
        problem = _lacks(transformer, options.parallel, device)
        if problem:
            raise OptionsError(f"parallel: {problem}")
        self._transformer, self._options, self._device = transformer, options, device
        self._socks: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._store = os.memfd_create("ranks")  # where they meet; nothing of it stays behind
        self._closing, self._closed = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._out_of_step = False
        try:
            for rank in range(1, self.count):
                self._start(rank, folder)
            self._watcher.start()
            for rank in range(1, self.count):
                self._loaded(rank)
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

    def lost(self, message: str) -> StageFailed:
        """The error that ends this instance's worker."""
        self._out_of_step = True
        return StageFailed(message)

    def close(self) -> None:
        """End all followers; called once."""
        os.close(self._closed)
        if self._watcher.is_alive():
            self._watcher.join()
        os.close(self._closing)
        if not self._out_of_step:
            _leave()
        for sock in self._socks:
            sock.close()
        for process in self._processes:
            process.kill()
            process.wait(LEAVE_S)
        if self._out_of_step and self._device.type == "cpu":  # NCCL would wait for whom it has lost
            _leave()
        os.close(self._store)

    # --- start ---------------------------------------------------------------------------------------------------
    def _start(self, rank: int, folder: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [
                *(
                    sys.executable,
                    "-m",
                    "backends.diffusion.follower_main",
                    "--rank",
                    str(rank),
                    "--folder",
                    str(folder),
                ),
                *("--fd", str(theirs.fileno()), "--store", str(self._store), "--device", self._device.type),
                *("--options", msgspec.json.encode(self._options).decode()),
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
            self._out_of_step = True
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
            raise self.lost(f"rank {rank} of {self.count} has not answered within {waited_s:g} s")
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
            return self.lost(f"rank {rank} of {self.count} cannot be reached: {why}")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return self.lost(f"rank {rank} of {self.count} died {how}")

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


class Spread:
    """A forward whose parts are computed by all ranks (see the top of this file)."""

    def __init__(self, own: Forward, ranks: Ranks, options: DiffusionOptions) -> None:
        self._own, self._ranks = own, ranks
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._answer_s = options.parallel.answer_s
        self._gathers = options.parallel.context == 1
        self._by_picture = options.batching != "seq"  # the stock arithmetic of a branch is one call for its pictures
        self._known: list[tuple[int, torch.Size]] = []
        """The drawings that the followers have the texts of, and their sizes."""
        self._shares: list[list[Part]] = []
        """By rank; they keep the drawings."""

    def predict(self, drawings: Sequence[Pictures]) -> list[Prediction]:
        known = [(id(drawing), drawing.seen().shape) for drawing in drawings]
        are_new = known != self._known
        if are_new:
            self._known, self._shares = known, self._dealt(drawings)
        deadline_s = time.monotonic() + self._answer_s
        others = {rank: share for rank, share in enumerate(self._shares) if rank and share}
        sent = {rank: self._ask(rank, share, are_new) for rank, share in others.items()}
        found, errors = self._own_part()
        for rank, share in others.items():
            answer = self._ranks.answer(rank, deadline_s)
            errors += [answer.error] if answer.error else []
            if self._gathers and not answer.error:
                found += zip(share, self._take(rank, share, answer.channels), strict=True)
        for rank, (work, _) in sent.items():
            self._ranks.sent(rank, work)
        if not self._gathers and errors and (len(errors) <= len(others) or len(set(errors)) > 1):
            raise self._ranks.lost(f"a forward went well on some ranks only: {errors[0]}")
        if errors:
            raise RuntimeError(errors[0])
        return together(found, drawings)

    def forget(self) -> None:
        """Drop what is kept of the last drawings."""
        self._known, self._shares = [], []
        self._own.forget()

    def _dealt(self, drawings: Sequence[Pictures]) -> list[list[Part]]:
        parts = parts_of(drawings, self._by_picture)
        if not self._gathers:
            return [parts] * self._ranks.count
        ranks = deal([part.tokens for part in parts], self._ranks.count)
        return [[p for p, of in zip(parts, ranks, strict=True) if of == rank] for rank in range(self._ranks.count)]

    def _ask(self, rank: int, share: Sequence[Part], are_new: bool) -> tuple[Any, torch.Tensor]:
        """What is to be waited for, and what must live until then."""
        numbers = pack(share, are_new, self._dtype)
        ask = Ask(len(numbers), tuple(Outline.of(part) for part in share) if are_new else None)
        return self._ranks.ask(rank, ask, numbers), numbers

    def _own_part(self) -> tuple[list[tuple[Part, torch.Tensor]], list[str]]:
        """Our own share, and what is wrong with it: the others have to be heard before anything is raised."""
        share = self._shares[0]
        try:
            found = self._own.predict(share) if share else []
        except COMPUTE_ERRORS as error:
            log.warning("rank 0: a forward failed: %s", error)
            return [], [str(error) or type(error).__name__]
        return [(part, one.positive) for part, one in zip(share, found, strict=True)], []

    def _take(self, rank: int, share: Sequence[Part], channels: int) -> list[torch.Tensor]:
        """A follower's results, (n, image tokens, channels) each."""
        shapes = [(part.n, prod(part.grids[0]), channels) for part in share]
        numbers = share[0].seen().new_empty(sum(prod(shape) for shape in shapes), dtype=self._dtype)
        self._ranks.take(rank, numbers)
        pieces = numbers.split([prod(shape) for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
