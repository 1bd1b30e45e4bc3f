# SPDX-License-Identifier: Apache-2.0
"""A stage model: starts and watches one engine worker, and translates between Triton's words and the worker's.

Called by an orchestrator (input `open`): answers "accepted" at once with an empty response and keeps the response
sender open until the run has ended; then FINAL goes through Triton first, the end over the link second.
Called directly: outputs come back as decoupled responses.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import triton_python_backend_utils as pb

from backends import wire
from backends.config import paths
from backends.config.schema import StageDeploy, from_parameters
from backends.control import messages as msg
from backends.control.hub import Hub, Lost, Peer
from backends.control.records import InstanceRecord, remove_record, write_record
from backends.core.chunk import Chunk, Tensor
from backends.core.errors import BadRequest, Internal, OmniError, StageFailed, Unavailable
from backends.core.ids import new_request_id, new_run_id
from backends.core.pipeline import EngineContext
from backends.pipelines import load
from backends.triton import tensors
from backends.triton.logs import use_triton_log
from backends.triton.metrics import StageMetrics
from backends.triton.opens import read_open
from backends.triton.replies import FINAL, error_response, read_request, send_last
from backends.triton.senders import CancelWatch, Senders
from backends.worker.keeper import Command, Keeper

log = logging.getLogger("triton_omni.triton")

MAX_DIRECT_REQUEST_BYTES = 1 << 20
TURN_S = 0.25


@dataclass(eq=False, slots=True)
class Call:
    """One Triton request of this stage. `inputs` is a chunk to hand to the worker before `message`."""

    sender: Any
    lane: Any
    message: msg.Open
    inputs: Chunk | None = None
    acknowledged: bool = False
    ended: bool = False
    index: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def direct(self) -> bool:
        return not self.message.reply


@dataclass(frozen=True, slots=True)
class _Closed:
    """Triton's side of a run is closed."""

    run: bytes


@dataclass(frozen=True, slots=True)
class _Sent:
    """A direct call's response has left; its chunk may go back to the worker it came from."""

    worker: Peer
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class _Gone:
    """The client of a direct call went away."""

    run: bytes


class TritonPythonModel:
    """One instance of one stage."""

    def initialize(self, args: dict[str, str]) -> None:
        tensors.self_check()
        config = json.loads(args["model_config"])
        given = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._model = args["model_name"]
        use_triton_log(self._model)
        self._pipeline = load(given.pop("pipeline"))
        self._stage = self._pipeline.stage(given.pop("stage"))
        self._deploy = from_parameters(given, StageDeploy, f"model {self._model}")
        self._instance = int(args["model_instance_name"].rpartition("_")[2])
        self._run_dir = paths.run_dir(os.getppid())
        self._keeper = Keeper(self._command(args))
        self._hub = Hub(f"{self._pipeline.name}/{self._stage.name}.stub")
        self._senders = Senders()
        self._watch = CancelWatch()
        self._metrics = StageMetrics(self._pipeline.name, self._stage.name)
        self._calls: dict[bytes, Call] = {}
        self._pending: deque[Call] = deque()
        self._worker: Peer | None = None
        self._ready = threading.Event()
        self._refusal = ""
        self._closing = False
        self._loop = threading.Thread(target=self._run, name="stage", daemon=True)
        self._loop.start()
        self._wait_ready()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                call = self._call(request, sender)
            except OmniError as error:
                sender.send(error_response(error), flags=FINAL)
            except Exception as error:  # the Triton border: a request must be answered whatever it contained
                log.exception("request could not be read")
                sender.send(error_response(Internal(f"{type(error).__name__}: {error}")), flags=FINAL)
            else:
                self._hub.post(call)

    def finalize(self) -> None:
        self._closing = True
        self._hub.wake()
        self._loop.join(5.0)
        self._keeper.stop()
        self._senders.close()
        self._watch.close()
        remove_record(self._run_dir, self._model, self._instance)
        self._hub.close()

    # --- start -----------------------------------------------------------------------------------------------------
    def _command(self, args: dict[str, str]) -> Command:
        gpu = args["model_instance_kind"] == "GPU"
        device = "cuda" if gpu else "cpu"
        context = EngineContext(
            self._pipeline.name, self._stage.name, self._deploy.engine, device, str(paths.models_dir())
        )
        environment = {"OMP_NUM_THREADS": "1"} | dict(self._stage.environment(context))
        if gpu:
            environment["CUDA_VISIBLE_DEVICES"] = args["model_instance_device_id"]
        self._address = self._run_dir / f"{self._model}_{self._instance}.{os.getpid()}.sock"
        arguments = [
            *("--address", str(self._address)),
            *("--pipeline", context.pipeline, "--stage", context.stage, "--device", device),
            *("--models-dir", context.models_dir, "--options", json.dumps(dict(context.options))),
        ]
        return Command(paths.engine_python(), arguments, environment)

    def _wait_ready(self) -> None:
        """Ready when the worker says so; its load error becomes the model's."""
        if not self._ready.wait(self._deploy.start_timeout_s):
            self._refusal = f"the engine was not ready within {self._deploy.start_timeout_s:g} s"
        if self._refusal:
            self.finalize()
            raise pb.TritonModelException(f"stage {self._stage.name}: {self._refusal}")

    # --- Triton's thread -------------------------------------------------------------------------------------------
    def _call(self, request: Any, sender: Any) -> Call:
        opened = tensors.bytes_input(request, wire.OPEN)
        given = [t for s in self._stage.inputs if (t := tensors.tensor_input(request, s.name)) is not None]
        owned = tuple(Tensor(t.spec, bytes(t.data)) for t in given)  # Triton's memory ends with `execute`
        if opened is None:
            message = self._direct(request, bool(owned))
        else:
            message = read_open(opened, self._pipeline, self._stage.name, self._run_dir, bool(owned))
        chunk = Chunk(message.run, msg.INPUTS_EDGE, tensors=owned) if owned else None
        return Call(sender, self._senders.lane(), message, chunk)

    def _direct(self, request: Any, has_tensors: bool) -> msg.Open:
        """A call from a Triton client: the stage works from the request, or from tensors as one last chunk."""
        upstream = [e.source for e in self._pipeline.edges if e.target == self._stage.name]
        entered = any(o.entry == self._stage.name for o in self._pipeline.operations)
        if upstream and not entered and not has_tensors:  # it would wait for a chunk that nobody sends
            own = self._stage.inputs[0].name if self._stage.inputs else wire.REQUEST
            raise BadRequest("this stage works only from what the stage before it makes", own)
        decoded = read_request(request, MAX_DIRECT_REQUEST_BYTES, optional=has_tensors)
        feeds = has_tensors and bool(upstream) and not self._stage.media
        return msg.Open(
            new_run_id(),
            request.request_id() or new_request_id(),
            wire.encode_request(decoded),
            upstream=(upstream[0],) if feeds else (),
            wanted=tuple(o.name for o in self._pipeline.outputs if o.stage == self._stage.name),
            has_inputs=has_tensors,
            direct=feeds,
        )

    # --- the loop --------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        self._start_worker()
        while not self._closing:
            try:
                self._turn()
            except Exception:  # the loop border: one call's trouble must not end the loop for others
                log.exception("a turn of the loop failed")

    def _turn(self) -> None:
        for peer, item in self._hub.poll(TURN_S):
            try:
                if peer is None:
                    self._on_posted(item)
                elif peer is self._worker:
                    self._on_worker(peer, item)
            except Exception:  # the loop border: one item's trouble must not lose the others
                log.exception("%s could not be handled", type(item).__name__)
        for _ in range(len(self._pending)):
            call = self._pending.popleft()
            if not self._try_hand_over(call):
                self._pending.append(call)  # waits for room; calls without large inputs go on meanwhile
        self._keep_worker(time.monotonic())

    def _keep_worker(self, now: float) -> None:
        """Start a dead worker when it is due; end one that gives no sign of life, or does not become ready."""
        ready = self._keeper.state == "ready"
        bound = self._deploy.hang_s if ready else self._deploy.start_timeout_s
        if self._keeper.due(now):
            self._start_worker()
        elif self._ready.is_set() and self._worker is not None and now - self._heard_s > bound > 0:
            log.error("no sign of life from the worker for %g s", bound)
            self._keeper.kill()  # its link closes, which is handled like any other death
            self._heard_s = now

    def _start_worker(self) -> None:
        now = self._heard_s = time.monotonic()
        try:
            self._worker = self._hub.adopt(self._keeper.start(now))
        except OSError as error:  # no such interpreter, no memory: tried again with back-off
            log.error("the worker could not be started: %s", error)
            self._refusal = f"the worker could not be started: {error}"
            self._keeper.died(now)
            self._ready.set()
        self._write_record()

    def _on_posted(self, item: object) -> None:
        match item:
            case Call():
                self._pending.append(item)
            case _Closed(run):
                if self._calls.pop(run, None) is not None and self._worker is not None:
                    self._worker.send(msg.Release(run))
            case _Sent(worker, chunk):
                worker.release(chunk)  # the worker may be another one by now
            case _Gone(run):
                if run in self._calls and self._worker is not None:
                    self._worker.send(msg.Stop(run))
            case _:
                raise TypeError(item)

    def _try_hand_over(self, call: Call) -> bool:
        """As `_hand_over`; a call that cannot be handed over at all is answered."""
        try:
            return self._hand_over(call)
        except Exception as error:  # the loop border: whatever it was, the call must hear of it
            log.exception("a call could not be handed over")
            self._answer(call, Internal(f"{type(error).__name__}: {error}"))
            return True

    def _hand_over(self, call: Call) -> bool:
        """Give a call to the worker; False if there is no room for its inputs now."""
        worker = self._worker
        if worker is None or self._keeper.state != "ready":
            text = f"the stage is {self._keeper.state}"
            self._answer(call, Unavailable(text, self._stage.name))
            return True
        if call.message.run in self._calls:
            self._answer(call, BadRequest("this run is open already", wire.OPEN))
            return True
        if call.inputs is not None and not worker.put(call.inputs):
            return worker.lost
        self._calls[call.message.run] = call
        worker.send(call.message)
        if call.direct:
            run = call.message.run
            self._watch.watch(call.sender, lambda: self._hub.post(_Gone(run)))
        return True

    def _on_worker(self, worker: Peer, item: object) -> None:
        self._heard_s = time.monotonic()
        match item:
            case msg.Ping():
                self._on_ping(item)
            case msg.Accepted(run=run):
                call = self._calls[run]
                call.acknowledged = True
                if not call.direct:
                    call.lane(lambda: call.sender.send(pb.InferenceResponse([])))
            case Chunk():
                self._respond(worker, self._calls[item.run], item)
            case msg.Finished(run=run) | msg.Failed(run=run):
                self._finish(self._calls[run], item)
            case Lost():
                self._on_lost()
            case _:
                log.warning("unexpected message %s from the worker", type(item).__name__)

    def _on_ping(self, ping: msg.Ping) -> None:
        if ping.state == "failed":
            self._refusal = ping.text
            self._ready.set()
        elif ping.state == "ready" and self._keeper.state != "ready":
            self._keeper.is_ready(time.monotonic())
            self._write_record()
            self._ready.set()
        self._metrics.note(ping.numbers, ping.live, self._keeper.restarts)

    # --- answers ---------------------------------------------------------------------------------------------------
    def _respond(self, worker: Peer, call: Call, chunk: Chunk) -> None:
        """One piece of a direct call's output."""
        output = chunk.edge.removeprefix(msg.OUTPUT_PREFIX)
        index = call.index.get(output, 0)
        call.index[output] = index + 1

        def job() -> None:
            try:
                call.sender.send(self._piece(call, output, index, chunk))
            except Exception:  # the Triton border: a piece that cannot be sent ends its call
                log.exception("a response could not be sent")
                self._hub.post(_Gone(call.message.run))
            finally:
                self._hub.post(_Sent(worker, chunk))

        call.lane(job)

    def _piece(self, call: Call, output: str, index: int, chunk: Chunk) -> Any:
        meta = {key: value for key, value in chunk.meta.items() if key != "text"}
        event = wire.Event(
            output or "chunk",  # pyright: ignore[reportArgumentType]
            call.message.request_id, output, self._stage.name, index, meta,
        )  # fmt: skip
        outputs = [tensors.text_output(wire.EVENT, wire.encode_event(event))]
        if "text" in chunk.meta:
            outputs.append(tensors.text_output(wire.TEXT_OUTPUT, chunk.meta["text"]))
        known = {s.name for s in self._stage.outputs}
        outputs += [tensors.tensor_output(t) for t in chunk.tensors if t.name in known]
        return pb.InferenceResponse(outputs)

    def _finish(self, call: Call, end: msg.Finished | msg.Failed) -> None:
        """Close Triton's side of a run, then let the worker tell its end."""
        run = call.message.run
        call.ended = True

        def job() -> None:
            try:
                if isinstance(end, msg.Failed) and end.reply_lost:
                    return  # a send to a dead orchestrator would wait for ever
                send_last(call.sender, self._watch, self._metrics.publish, lambda: self._last(call, end))
            finally:
                self._hub.post(_Closed(run))

        call.lane(job)

    def _last(self, call: Call, end: msg.Finished | msg.Failed) -> Any:
        """The last response of a call; None where the orchestrator hears the rest over its link."""
        if isinstance(end, msg.Failed):
            # to an orchestrator an error goes only as the first response: later ones can get lost (decision 0001)
            return error_response(end.error.error()) if call.direct or not call.acknowledged else None
        if not call.direct:
            return None
        event = wire.Event(
            "end", call.message.request_id, "", self._stage.name, sum(call.index.values()), {},
            "completed", end.reason, end.usage,
        )  # fmt: skip
        return pb.InferenceResponse([tensors.text_output(wire.EVENT, wire.encode_event(event))])

    def _answer(self, call: Call, error: OmniError) -> None:
        """End a call that no worker has with an error."""
        call.lane(lambda: send_last(call.sender, self._watch, self._metrics.publish, lambda: error_response(error)))

    def _on_lost(self) -> None:
        """The worker died: end its calls at once and plan the next start."""
        calls, self._calls = self._calls, {}
        error = StageFailed("the stage's worker died", self._stage.name)
        for call in calls.values():
            if call.ended:
                continue  # its FINAL is on its way
            if call.direct or not call.acknowledged:
                self._answer(call, error)
            else:  # the orchestrator has seen the link close
                sender = call.sender
                call.lane(lambda sender=sender: sender.send(flags=FINAL))
        self._worker = None
        if not self._ready.is_set():
            self._refusal = self._refusal or "the engine worker died while loading"
            self._ready.set()
            return
        self._keeper.died(time.monotonic())
        self._write_record()

    def _write_record(self) -> None:
        pid = os.getpid()
        ready_s = time.monotonic() - self._keeper.started_s if self._keeper.state == "ready" else 0.0
        write_record(
            self._run_dir,
            InstanceRecord(
                model=self._model,
                instance=self._instance,
                role="stage",
                pid=pid,
                start_time=paths.start_time(pid),
                state=self._keeper.state,
                worker_pid=self._keeper.pid,
                address=str(self._address),
                restarts=self._keeper.restarts,
                ready_s=round(ready_s, 3),
            ),
        )
