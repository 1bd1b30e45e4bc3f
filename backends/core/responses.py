# SPDX-License-Identifier: Apache-2.0
"""What a client's call is answered with: events, the statuses they carry, and where they are sent.

Types of events, and what they come with:

    text        with `text_output`: a piece of the text output, see `TextPiece`
    transcript  with `text_output`: a segment of transcribed audio, see `TranscriptPiece`
    audio       with `audio`: a piece of the audio output, see `AudioPiece`
    words       when words of the audio output are said, see `WordsPiece`
    image       with `image`: an image or a preview of it, see `ImagePiece`
    chunk       what a directly called stage sends its consumers, with the stage's tensors
    progress    a stage that has no output yet is alive, see `Progress`
    accepted    sent once, 1 s after the arrival of a stream without `acknowledge` that has had no other response: from
                then on Triton notices when the client of `/generate_stream` leaves. With `open_input` always the
                first event, at once
    end         the last response, with `stream` false it has all outputs; Triton's FINAL flag comes with it
    health      answer to the operations `health` and `requests`, and the only response; see `PipelineStatus`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.errors import OmniError
from triton_omni.backends.core.outputs import OutputPiece


class Progress(msgspec.Struct, frozen=True):
    """How far a stage without output has come, in a unit of its own: denoising steps, seconds of audio.

    done   how far the stage is
    total  where it ends; 0 is unknown
    """

    done: float
    total: float


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The instances of one stage. `state` is that of the best one, "missing" if there is none.

    state        of the best instance: `ready`, `starting`, `restarting`, `stuck`, `gave_up`; `missing` if there is none
    instances    number of instances
    ready        of them ready
    restarts     worker restarts of all instances
    worker_pids  processes of the workers
    stub_pids    processes of the stubs
    ready_s      seconds its worker took to become ready
    live         runs of this pipeline in the stage
    """

    state: str = "missing"
    instances: int = 0
    ready: int = 0
    restarts: int = 0
    worker_pids: tuple[int, ...] = ()
    stub_pids: tuple[int, ...] = ()
    ready_s: float = 0.0
    live: int = 0


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is not finished yet.

    id         request id
    operation  its operation
    age_s      seconds since arrival
    phase      `waiting`, `opening`, `answering` or `ending`
    stages     stages whose runs are open
    pieces     output → pieces sent
    """

    id: str
    operation: str
    age_s: float
    phase: str
    stages: tuple[str, ...]
    pieces: dict[str, int]


class WaterfallSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a request, in seconds since its arrival.

    name     `queue`, a stage, or `client <output>`: from the first piece to the last
    start_s  when it began
    first_s  when a stage had its first output
    end_s    when it was over
    outcome  of a stage: `finished`, `failed`, `stopped` or `lost`
    """

    name: str
    start_s: float
    first_s: float | None = None
    end_s: float
    outcome: str = ""


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is over.

    id         request id
    operation  its operation
    outcome    `completed`, `cancelled`, or the code of its error
    total_s    seconds from arrival to end
    spans      its parts in order of their start
    ended_s    seconds since its end
    """

    id: str
    operation: str
    outcome: str
    total_s: float
    spans: tuple[WaterfallSpan, ...]
    ended_s: float = 0.0


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to the operations `health` and `requests`.

    pipeline    name
    version     WIRE_VERSION of the server
    ready       every stage has a ready instance, and runs can be opened
    state       `ready`: all instances are; `degraded`: some are not, but `outputs` can be made; `unavailable`: none can
    outputs     what can be made with the stages that are ready
    stages      by stage name
    live        requests admitted
    queued      requests waiting for admission
    operations  operations of the pipeline
    params      typed parameters that its stages take: `image` (all of them), `speech.voice`, …
    about       facts about the model: voices, sample rate, kinds of media, …
    requests    for operation `requests`: the oldest 100
    traces      for operation `requests` with a `target`: those of the latest 256 ended requests that had this id
    """

    pipeline: str
    version: int
    ready: bool
    state: Literal["ready", "degraded", "unavailable"]
    outputs: tuple[str, ...]
    stages: dict[str, StageStatus]
    live: int
    queued: int
    operations: tuple[str, ...]
    params: tuple[str, ...] = ()
    about: dict[str, Any] = {}
    requests: tuple[RequestStatus, ...] = ()
    traces: tuple[RequestTrace, ...] = ()


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One response of the public model.

    type           see above
    request_id     the client's request id, or the one made for it
    output         `text`, `transcript`, `audio`, `words` or `image`; on `end` the request's own final output
    stage          the stage it came from; on `end` the stage of the final output
    index          counts the responses of one output from 0; on `end` the number of all pieces
    piece          what the response carries of an output; its `type` is the event's
    progress       `done` and `total` in a unit of the stage: denoising steps, seconds of audio; `total` 0 is unknown
    joined         on `end` with `stream` false: output → all its pieces as one piece
    counts         beside `joined`: output → number of pieces
    status         on `health`: see `PipelineStatus`
    aborted        on the `end` of operation `abort`: number of requests that were ended
    missing        on `end`: an optional output that failed or was late → why, as the line of an error
    outcome        on `end`: `completed` or `cancelled`; a failure is a Triton error instead
    finish_reason  on `end`: `stop`, `length`, `tool_calls` or `abort`
    usage          on `end`: counts, such as `prompt_tokens`, `prompt_audio_tokens` (those of the prompt that stand for
                   transcribed audio), `completion_tokens`, `audio_input_s`, `audio_frames`, `audio_samples`, `images`,
                   `preemptions` (how often an engine short of memory restarted a run); after an abort, what
                   stages that were still running had delivered
    timings        on `end`: seconds since arrival: `queue_s`, `first_<output>_s`, `total_s`
    token          on the first event of a streamed request: what an abort of it must bring
    acknowledge    a token, only in streams whose request has `acknowledge` set: sent back once the response was read
                   ("Slow clients")
    """

    type: Literal["text", "transcript", "audio", "words", "image", "chunk", "progress", "accepted", "end", "health"]
    request_id: str = ""
    output: str = ""
    stage: str = ""
    index: int | None = None
    piece: OutputPiece | None = None
    progress: Progress | None = None
    joined: dict[str, OutputPiece] = {}
    counts: dict[str, int] = {}
    status: PipelineStatus | None = None
    aborted: int | None = None
    missing: dict[str, str] = {}
    outcome: str = ""
    finish_reason: str = ""
    usage: dict[str, float] = {}
    timings: dict[str, float] = {}
    token: str = ""
    acknowledge: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """One response for a client: an event, and the tensors it is about."""

    event: Event
    tensors: tuple[Tensor, ...] = ()


class ResponseStream(Protocol):
    """One client's call. Methods never block; responses leave in the order of the calls."""

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone`, from another thread, when the client has cancelled or disconnected."""
        ...

    def acknowledge(self) -> None:
        """Send an empty response, which an orchestrator waits for."""
        ...

    def send(
        self, response: Response, failed: Callable[[OmniError], None], sent: Callable[[], None] | None = None
    ) -> None:
        """Send one response. `sent` is always called, when its tensors are no longer needed, and `failed` before it if
        the response could not be sent; both from another thread."""
        ...

    def publish(self) -> None:
        """Bring the server's metrics up to date; only before the call's end is sent."""
        ...

    def end(self, last: Response | OmniError | None, sent: Callable[[], None] | None = None) -> None:
        """Send the last response and close the call, in one; None: close it without another response. `sent` is always
        called, from another thread."""
        ...
