# SPDX-License-Identifier: Apache-2.0
"""Grammars that vLLM compiles beside the steps. `request` is the scheduler's record of a run
(upstream.scheduler_record)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


def is_compiling(request: Request) -> bool:
    """True while no step can start the run, because its grammar is not compiled yet."""
    waits = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    structured = request.structured_output_request
    return waits and structured is not None and not structured.is_grammar_ready


def when_compiled(request: Request, call: Callable[[], None]) -> None:
    """Call from another thread once the run's grammar is there or has failed; never for a run without one."""
    compiled = _compiled(request)
    if compiled is not None:
        compiled.add_done_callback(lambda _: call())


def cancel_compiling(request: Request) -> None:
    """Remove the grammar of an ended run from the queue, unless it is being compiled: that cannot be stopped."""
    compiled = _compiled(request)
    if compiled is not None:
        compiled.cancel()


def _compiled(request: Request) -> Future[StructuredOutputGrammar] | None:
    structured = request.structured_output_request
    grammar = None if structured is None else structured._grammar
    return grammar if isinstance(grammar, Future) else None
