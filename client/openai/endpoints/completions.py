# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions: texts are continued, without a chat template; and the refusal of /v1/embeddings."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triton_omni.backends.wire import Deadlines, Event, GenerateRequest, TextPiece
from triton_omni.openai.endpoints.chat_answer import Head, finish_reason_of, usage_of
from triton_omni.openai.endpoints.chat_request import sampling_of, wants_usage
from triton_omni.openai.endpoints.schemas import CompletionBody, EmbeddingBody, Json
from triton_omni.openai.http import sse
from triton_omni.openai.http.bodies import read_json
from triton_omni.openai.http.calls import BackendCall, open_pieces
from triton_omni.openai.http.context import context_of
from triton_omni.openai.http.errors import invalid, unsupported
from triton_omni.pieces import Piece

DEFAULT_TOKENS = 16
"""OpenAI's."""
MAX_RUNS = 128
PARAMS = {"input": "prompt", "operation": "model", "modalities": "model"}


@dataclass
class CompletionChoice:
    """What one run has made so far."""

    text: list[str] = field(default_factory=list[str])
    logprobs: list[Json] = field(default_factory=list[Json])
    length: int = 0
    end: Event | None = None


class CompletionAnswer:
    """Output pieces → OpenAI's text completion, at once or as chunks. Pure."""

    def __init__(self, body: CompletionBody, call: BackendCall, head: Head) -> None:
        self._with_usage = wants_usage(body)
        self._top_logprobs = body.logprobs
        self._call = call
        self._head = head
        self._runs = [CompletionChoice() for _ in range(call.runs)]

    def on(self, index: int, piece: Piece) -> Iterable[Json]:
        """Take a piece of one run; the chunks for it."""
        run = self._runs[index]
        if piece.event.type == "text" and piece.text is not None:
            logprobs = self._logprobs(piece.event, run.length)
            run.text.append(piece.text)
            run.length += len(piece.text)
            if logprobs is not None:
                run.logprobs.append(logprobs)
            if piece.text or (logprobs and logprobs["tokens"]):
                yield self._body([_choice(index, piece.text, logprobs, None)])
        if piece.event.type == "end":
            run.end = piece.event
            yield self._body([_choice(index, "", None, finish_reason_of(piece.event))])
            if self._with_usage and all(other.end is not None for other in self._runs):
                yield self._body([], self._usage())

    def body(self) -> Json:
        """The whole answer."""
        choices = [
            _choice(index, "".join(run.text), _joined(run.logprobs), finish_reason_of(run.end or Event("end")))
            for index, run in enumerate(self._runs)
        ]
        return self._body(choices, self._usage())

    def _usage(self) -> Json:
        ends = [run.end or Event("end") for run in self._runs]
        return usage_of(*ends, prompts=len(self._call.inputs))

    def _body(self, choices: list[Json], usage: Json | None = None) -> Json:
        head = self._head
        body: Json = {
            "id": head.id, "object": "text_completion", "created": head.created, "model": head.model,
            "system_fingerprint": None, "choices": choices,
        }  # fmt: skip
        return body | {"usage": usage} if self._with_usage or usage is not None else body

    def _logprobs(self, event: Event, start: int) -> Json | None:
        """The log-probabilities of a piece that begins `start` characters into its answer."""
        if self._top_logprobs is None:
            return None
        tokens = event.piece.logprobs if isinstance(event.piece, TextPiece) else ()
        offsets: list[int] = []
        for token in tokens:
            offsets.append(start)
            start += len(token.token)
        tops = [{other.token: other.logprob for other in token.top[: self._top_logprobs]} for token in tokens]
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _joined(several: list[Json]) -> Json | None:
    if not several:
        return None
    return {name: [item for logprobs in several for item in logprobs[name]] for name in several[0]}


async def complete(request: Request) -> Response:
    """Continue one or more texts; at once or as a stream."""
    context = context_of(request)
    body = await read_json(request, CompletionBody)
    call = _call_of(body)
    answer = CompletionAnswer(body, call, Head(f"cmpl-{context.request_id}", int(time.time()), body.model))
    pieces = await open_pieces(context, call)
    if not body.stream:
        async for run, piece in pieces:
            for _ in answer.on(run, piece):
                pass
        return JSONResponse(answer.body())
    await pieces.begin()

    def to_bytes(run: int, piece: Piece) -> Iterable[bytes]:
        return map(sse.data, answer.on(run, piece))

    return sse.response(sse.body(context.services.pools, pieces, to_bytes, last=sse.DONE))


def _call_of(body: CompletionBody) -> BackendCall:
    """The call. Raises ApiError naming the parameter."""
    if body.echo:
        raise unsupported("echo", "'echo' is not supported: put the prompt before the text yourself.")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", f"'best_of' may only be 'n' ({body.n or 1}): completions are not ranked here.")
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    prompts = [prompt for prompt in given if isinstance(prompt, str)]
    if len(prompts) < len(given):
        raise unsupported("prompt", "'prompt' must be a text or a list of texts: token ids are not supported.")
    runs = len(prompts) * (body.n or 1)
    if runs > MAX_RUNS:
        raise invalid("prompt", f"A request may have {MAX_RUNS} completions: 'n' for each prompt (got {runs}).")
    request = GenerateRequest(
        operation="completion",
        sampling=sampling_of(body, body.max_tokens or DEFAULT_TOKENS, body.logprobs),
        stages=body.stages or {},
        deadlines=body.deadlines or Deadlines(),
        priority=body.priority or 0,
    )
    return BackendCall(body.model, request, PARAMS, runs=runs, inputs=prompts)


async def embed(request: Request) -> Response:
    """POST /v1/embeddings: no pipeline offers it yet, so every model is refused by name."""
    body = await read_json(request, EmbeddingBody)
    catalogue = context_of(request).services.catalogue
    await catalogue.pipeline_of(body.model)
    raise unsupported("model", f"The model '{body.model}' makes no embeddings, nor does any other pipeline here.")
