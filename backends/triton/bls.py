# SPDX-License-Identifier: Apache-2.0
"""Opens runs by BLS, and nothing else: all data and ends travel over links.

Rules (measured, transport.md §4-5): `exec(decoupled=True)` and a waiting `next()` in one stub can deadlock, so one
thread does both, and `next()` is called only when the whole stream is known to be there. The iterator of a dead
stage is abandoned, neither iterated nor destroyed (its destructor would wait forever), until its stub says that it has
sent FINAL; a dead stub never says so.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import triton_python_backend_utils as pb

from triton_omni.backends import wire
from triton_omni.backends.core.errors import Internal, OmniError, Unavailable, describe, from_line
from triton_omni.backends.orchestrator.ports import OpenCall
from triton_omni.backends.triton.tensors import tensor_output

log = logging.getLogger("triton_omni.bls")

STUCK_S = 10.0  # a call takes a millisecond; a longer one waits for a stub that is dead or stopped
KEPT_ITERATORS = 256  # drained ones are kept a while: destroying one races with Triton's own clean-up on 24.10
DRAIN_S = 3.0
LATER_S = 0.05
"""What has time: a stage that waits for another one is opened behind the first stages that come within this."""


class BlsOpener:
    """The orchestrator's Opener port. All BLS calls happen in its one thread."""

    def __init__(self) -> None:
        self._jobs: queue.PriorityQueue[tuple[float, int, Callable[[], None] | None]] = queue.PriorityQueue()
        """(when it is due, number, job); the first stages of all requests that arrive at one moment come first."""
        self._numbers = itertools.count()
        self._drained: deque[Iterator[pb.InferenceResponse]] = deque(maxlen=KEPT_ITERATORS)
        self._abandoned: dict[int, Iterator[pb.InferenceResponse]] = {}
        self._began_s: float | None = None  # when the call under way began
        self._thread = threading.Thread(target=self._run, name="bls", daemon=True)
        self._thread.start()

    @property
    def stuck(self) -> bool:
        began_s = self._began_s
        return began_s is not None and time.monotonic() - began_s > STUCK_S

    def open(self, call: OpenCall, opened: Callable[[object], None], failed: Callable[[OmniError], None]) -> None:
        def job() -> None:
            try:
                handle = self._exec(call)
            except OmniError as error:
                failed(error)
            except pb.TritonModelException as error:  # the model is not loaded, or its stub is dead
                failed(Unavailable(_first_line(error)))
            except Exception as error:  # Triton boundary: the request must be answered
                log.exception("a run could not be opened")
                failed(Internal(describe(error)))
            else:
                opened(handle)

        self._put(job, LATER_S if call.is_fed else 0.0)

    def close(self, handle: object) -> None:
        self._abandoned.pop(id(handle), None)
        self._put(lambda: self._drain(cast("Iterator[pb.InferenceResponse]", handle)), LATER_S)

    def abandon(self, handle: object) -> None:
        self._abandoned[id(handle)] = cast("Iterator[pb.InferenceResponse]", handle)

    def stop(self) -> bool:
        """End the thread, then drain what was abandoned: a stage that lost only its worker has sent its FINAL since.

        False if a call or an iterator does not end (its stub is dead); the process must then not run destructors.
        """
        self._put(None, math.inf)
        last = threading.Thread(target=self._drain_abandoned, name="bls-abandoned", daemon=True)
        last.start()
        last.join(DRAIN_S)
        if self._abandoned:
            log.error("%d streams of dead stages never ended", len(self._abandoned))
        return not self._abandoned and not self._thread.is_alive()

    def _put(self, job: Callable[[], None] | None, later_s: float) -> None:
        self._jobs.put((time.monotonic() + later_s, next(self._numbers), job))

    def _exec(self, call: OpenCall) -> Iterator[pb.InferenceResponse]:
        """Open one run; returns its iterator. The stage's stub answers on receipt."""
        inputs = [pb.Tensor(wire.OPEN, np.frombuffer(call.message, dtype=np.uint8))]
        inputs += [tensor_output(tensor) for tensor in call.inputs.values()]
        request = pb.InferenceRequest(model_name=call.model, requested_output_names=[wire.EVENT], inputs=inputs)
        iterator = request.exec(decoupled=True)
        first = next(iterator)
        if first.has_error():
            self._drained.append(iterator)
            error = from_line(first.error().message())
            raise error if type(error) is not Internal else Unavailable(error.message)
        return iterator

    def _drain(self, iterator: Iterator[pb.InferenceResponse]) -> None:
        """Take what is there of a stream whose FINAL has been sent: returns without waiting."""
        for _ in iterator:
            pass
        self._drained.append(iterator)

    def _drain_abandoned(self) -> None:
        self._thread.join()
        for key, iterator in list(self._abandoned.items()):
            self._drain(iterator)
            del self._abandoned[key]

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            self._began_s = time.monotonic()
            try:
                job()
            except Exception:  # Triton boundary: one request's trouble must not end the thread for others
                log.exception("a BLS call failed")
            self._began_s = None


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
