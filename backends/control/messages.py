# SPDX-License-Identifier: Apache-2.0
"""All control messages between our processes. Everything else on a link is a chunk.

down: Open, Connect, Stop, Release          up: Received, Accepted, Progress, Finished, Failed, Ping
Outputs for the client are chunks too: their edge is "@" followed by the output's name.
"""

from __future__ import annotations

import msgspec

from triton_omni.backends.core.errors import ErrorInfo

PROTOCOL_VERSION = 3
INPUTS_EDGE = "@inputs"
"""Edge of the one chunk that brings a run's media tensors, sent just before its Open."""
OUTPUT_PREFIX = "@"


class ControlMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the control messages."""


class HelloMessage(ControlMessage, frozen=True, array_like=True, tag="hello"):
    """First message on every link: the sender's name, the UUID of its GPU ("" = none) and where it listens."""

    version: int
    name: str
    gpu_uuid: str = ""
    address: str = ""


class OpenMessage(ControlMessage, frozen=True, array_like=True, tag="open"):
    """Start a run.

    request     the client's request as JSON (core.generate)
    reply       address of the orchestrator; "" for a direct call: results go back through the stub
    upstream    stages that will feed the run
    consumers   stages that the run will feed, each as soon as a ConnectMessage names its instance
    wanted      outputs of this stage the client asked for
    has_inputs  a chunk on INPUTS_EDGE came before this message
    direct      that chunk is the stage's input itself, as one last chunk (a direct call of a consumer stage)
    stall_s     fail the run if an upstream edge is silent for longer while the engine waits; 0 = never
    optional    consumers that the run goes on without if they are lost
    wait_s      how long the run may wait in the stub for a worker of a pool that is ready
    """

    run: bytes
    request_id: str
    request: bytes
    reply: str = ""
    upstream: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    has_inputs: bool = False
    direct: bool = False
    stall_s: float = 0.0
    optional: tuple[str, ...] = ()
    wait_s: float = 0.0


class ConnectMessage(ControlMessage, frozen=True, array_like=True, tag="connect"):
    """A consumer of the run has accepted the request: the instance that listens at `address`."""

    run: bytes
    consumer: str
    address: str


class StopMessage(ControlMessage, frozen=True, array_like=True, tag="stop"):
    """End a run now; answered with FinishedMessage(reason="stopped").

    consumer  only stop feeding this consumer; the run goes on, and there is no answer
    """

    run: bytes
    consumer: str = ""


class ReleaseMessage(ControlMessage, frozen=True, array_like=True, tag="release"):
    """From the stub to its worker: Triton's response stream is closed, so the run's end may be sent."""

    run: bytes


class ReceivedMessage(ControlMessage, frozen=True, array_like=True, tag="received"):
    """From a stub to the orchestrator: a run waits for the stub's worker. Until AcceptedMessage, the run's end and the
    loss of its stage are reported over this link."""

    run: bytes


class AcceptedMessage(ControlMessage, frozen=True, array_like=True, tag="accepted"):
    """A run was accepted by the instance that listens at `address`."""

    run: bytes
    address: str = ""


class ProgressMessage(ControlMessage, frozen=True, array_like=True, tag="progress"):
    """Keep-alive of a run without output."""

    run: bytes
    done: float
    total: float = 0.0


class Transfer(msgspec.Struct, array_like=True):
    """Chunks that one edge delivered to a run, measured by the consumer.

    transfer_s  from the producer's put to the consumer's receipt, summed over chunks. Both read one monotonic clock,
                which all processes of a host share
    wait_s      from receipt until the engine accepted the chunk
    """

    chunks: int = 0
    nbytes: int = 0
    transfer_s: float = 0.0
    wait_s: float = 0.0


class RunStats(msgspec.Struct, frozen=True, array_like=True):
    """Measurements of an accepted run by its worker, in seconds since its OpenMessage; part of the end message.

    outcome  "finished", "failed" or "stopped"
    first_s  the first chunk or output; None if there was none
    edges    by upstream stage
    """

    outcome: str
    total_s: float
    first_s: float | None = None
    edges: dict[str, Transfer] = {}


class FinishedMessage(ControlMessage, frozen=True, array_like=True, tag="finished"):
    """A run is over. reason: "stop", "length", …, or "stopped" after a Stop."""

    run: bytes
    reason: str
    usage: dict[str, float] = {}
    stats: RunStats | None = None


class FailedMessage(ControlMessage, frozen=True, array_like=True, tag="failed"):
    """A run failed.

    reply_lost   the orchestrator is gone, so nothing may be sent through Triton
    stats        None: no worker accepted it, or its worker died
    worker_died  from the stub: the worker that had accepted the run died
    """

    run: bytes
    error: ErrorInfo
    reply_lost: bool = False
    stats: RunStats | None = None
    worker_died: bool = False


class PingMessage(ControlMessage, frozen=True, array_like=True, tag="ping"):
    """Heartbeat of a process; a received ping is answered with one.

    state      "starting", "ready", "failed"
    live       running runs or requests
    text       failed: the reason; ready: Hub.gpu_paths
    numbers    gauges and counters by name, for metrics
    """

    name: str = ""
    state: str = ""
    live: int = 0
    text: str = ""
    numbers: dict[str, float] = {}


AnyMessage = (
    HelloMessage
    | OpenMessage
    | ConnectMessage
    | StopMessage
    | ReleaseMessage
    | ReceivedMessage
    | AcceptedMessage
    | ProgressMessage
    | FinishedMessage
    | FailedMessage
    | PingMessage
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """The message in `data`; raises msgspec.MsgspecError for anything else."""
    return _decoder.decode(data)
