# SPDX-License-Identifier: Apache-2.0
"""Validates the `open` tensor of a stage model. Any client of the server can send one; only the orchestrator should.

A message that cannot be from this server's orchestrator is refused: its address must be in the server's private
folder, whose name clients do not know, and the message must match the stage's edges and outputs. A client can
therefore neither make a worker connect to a socket of its choice nor put it into an unexpected state.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from triton_omni.backends import wire
from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.address import parse_address
from triton_omni.backends.control.records import read_records
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.ids import RUN_ID_BYTES
from triton_omni.backends.core.pipeline import Pipeline


def read_open(data: bytes, pipeline: Pipeline, stage: str, run_dir: Path, has_inputs: bool) -> msg.OpenMessage:
    """The Open in `data`; raises BadRequest if it cannot be from this server's orchestrator."""
    try:
        message = msg.decode(data)
    except msgspec.DecodeError as error:
        raise BadRequest(f"not an Open message: {error}", wire.OPEN) from None
    if not isinstance(message, msg.OpenMessage):
        raise BadRequest("not an Open message", wire.OPEN)
    sources = pipeline.feeds_of(stage).keys()
    targets = {e.target for e in pipeline.edges if e.source == stage}
    outputs = {o.name for o in pipeline.outputs if o.stage == stage}
    genuine = (
        len(message.run) == RUN_ID_BYTES
        and _is_of_server(message.reply, run_dir)
        and not message.direct
        and message.has_inputs == has_inputs
        and sources >= set(message.upstream)
        and targets.issuperset(message.consumers)
        and outputs.issuperset(message.wanted)
        and message.stall_s >= 0
        and message.wait_s >= 0
    )
    if not genuine:
        raise BadRequest("this input belongs to the orchestrator of this server", wire.OPEN)
    return message


def _is_of_server(address: str, run_dir: Path) -> bool:
    """True for a unix socket in the server's folder; with a TCP address only if an instance's record names both."""
    try:
        where = parse_address(address)
    except ValueError:
        return False
    if not where.tcp:
        return Path(where.path).parent == run_dir
    return any(record.address == address for record in read_records(run_dir))
