# SPDX-License-Identifier: Apache-2.0
"""The diffusion engine: all running requests advance together, one denoise step at a time."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Sequence
from typing import Any

import torch

from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import (
    EngineEvent,
    EngineFailed,
    EngineFinished,
    EngineOutput,
    EngineProgress,
    Run,
)
from triton_omni.backends.core.errors import BadRequest, Internal, StageFailed
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.diffusion.answer import Decode, due_previews, meta, usage
from triton_omni.backends.diffusion.calibrate import measured_weights
from triton_omni.backends.diffusion.forward import COMPUTE_ERRORS, Prediction
from triton_omni.backends.diffusion.image_params import MAX_SEED, Wish, read_wish
from triton_omni.backends.diffusion.image_run import Drawing
from triton_omni.backends.diffusion.memory import fitting
from triton_omni.backends.diffusion.model import Model, find_model
from triton_omni.backends.diffusion.options import read_options
from triton_omni.backends.diffusion.parallel.ranks import check_gpus
from triton_omni.backends.diffusion.scheduling import choose, ranked
from triton_omni.backends.diffusion.step_cost import Weights
from triton_omni.backends.diffusion.text import Prompt

log = logging.getLogger("triton_omni.diffusion")


class DiffusionEngine:
    """Draws pictures for the `image` output. Between two steps the prompts of one request, or one picture to edit, are
    encoded and one picture is decoded, so a step never stalls for longer than that."""

    def __init__(self, context: EngineContext, package_dir: str = "") -> None:
        self.stage = context.stage
        self.options = read_options(context.options, context.stage)
        on_gpu = context.device == "cuda"
        check_gpus(self.options.parallel, torch.cuda.device_count() if on_gpu else 0, context.stage)
        torch.set_num_threads(self.options.threads)
        folder = find_model(self.options.model, package_dir, context.models_dir)
        self.model = Model(folder, self.options, context.device, context.models_dir)
        self._limits = self.model.within(self.options.limits)
        self.forwards = 0
        self.tokens_done = 0
        self._drawings: list[Drawing] = []
        self._decodes: list[Decode] = []
        self.weights = self._weights()
        self.most_tokens = self.options.max_batch_tokens or sys.maxsize

    def _weights(self) -> Weights:
        overhead = self.options.step_overhead_tokens
        if overhead or self.options.max_batch_tokens == 1 or self.options.batching == "seq":  # nothing is shared then
            return Weights.of_overhead(overhead or 1)
        with torch.inference_mode():
            found = measured_weights(self.model, self.options.limits)
        log.info("%s: what a picture adds to a step, in fixed costs of one: %s", self.stage, found)
        return found

    # --- contract ------------------------------------------------------------------------------------------------
    def open(self, run: Run) -> None:
        """Take a run; nothing is computed yet but token ids."""
        wish = read_wish(run.request, self.stage, self._limits, self.options.defaults)
        self.model.check(wish, f"stages.{self.stage}")
        if wish.pictures and "image" not in run.inputs:
            raise BadRequest("pictures come in the input tensor 'image'", "messages")
        prompt = self._prompt(wish, wish.prompt, "input" if run.request.operation == "image" else "messages")
        negative = None
        if wish.has_guidance:
            assert wish.negative_prompt is not None
            negative = self._prompt(wish, wish.negative_prompt, f"stages.{self.stage}.negative_prompt")
        prompts = [prompt] if negative is None else [prompt, negative]
        needs = self.model.memory.check(wish, prompts, f"stages.{self.stage}")
        rows = [wish.picture_tokens + wish.source_tokens + p.tokens for p in prompts]
        weight = wish.n * sum(self.weights(tokens) for tokens in rows)
        seed = secrets.randbelow(MAX_SEED + 1) if wish.seed is None else wish.seed
        drawing = Drawing(run, wish, seed, prompt, negative, wish.n * sum(rows), weight, self.tokens_done, needs)
        run.state = drawing
        self._drawings.append(drawing)

    def feed(self, run: Run, inputs: Any, last: bool) -> bool:
        raise Internal("a diffusion stage works from the request; it takes no chunks", self.stage)

    def stop(self, run: Run) -> None:
        self._drop(run.state)

    @property
    def has_work(self) -> bool:
        return bool(self._decodes or self._choose())

    def step(self) -> Sequence[EngineEvent]:
        """Decode a picture, encode something for a drawing, then one denoise step for the drawings chosen."""
        events: list[EngineEvent] = []
        with torch.inference_mode():
            self._decode(events)
            self._denoise(self._batch(events), events)
        return events

    def close(self) -> None:
        self._drawings.clear()
        self._decodes.clear()
        self.model.close()

    # --- parts of a step -----------------------------------------------------------------------------------------
    def _decode(self, events: list[EngineEvent]) -> None:
        """Decode what is due: finished pictures first, then previews."""
        if not self._decodes:
            return
        decode = next((d for d in self._decodes if d.partial is None), self._decodes[0])
        self._decodes.remove(decode)
        drawing = decode.drawing
        latents = (
            decode.latents[decode.index :] if self.options.batching == "seq" else decode.latents[decode.index :][:1]
        )
        if not bool(torch.isfinite(latents).all()):
            self._fail(drawing, "the model produced numbers that are not finite", events)
            return
        try:
            pictures = self.model.decode(latents, drawing.wish.width, drawing.wish.height)
        except COMPUTE_ERRORS as error:
            log.exception("request %s: decode failed", drawing.run.request_id)
            self._fail(drawing, f"decoding failed: {error}", events)
            return
        for picture in pictures:
            events.append(EngineOutput(drawing.run, "image", (Tensor.of("image", picture),), meta(decode)))
            decode.index += 1
        if decode.index < len(decode.latents):
            self._decodes.append(decode)
        elif decode.partial is None:
            self._drop(drawing)
            events.append(EngineFinished(drawing.run, "stop", usage(drawing)))

    def _batch(self, events: list[EngineEvent]) -> list[Drawing]:
        """Whose turn the next step is. A batch begins with its last member; who has begun waits for nobody."""
        chosen = self._choose()
        if any(not d.is_prepared for d in chosen):
            self._prepare(chosen, events)
            chosen = [d for d in chosen if d in self._drawings]  # but those that failed
        if all(d.is_prepared for d in chosen):
            return chosen
        has_begun = any(d.step for d in self._drawings if self._can_step(d))
        return self._choose(only_prepared=True) if has_begun else []

    def _choose(self, only_prepared: bool = False) -> list[Drawing]:
        """The neediest and those that may share its step, as far as there is memory for them."""
        ready = [d for d in self._drawings if self._can_step(d) and (d.is_prepared or not only_prepared)]
        inside = [d for d in self._drawings if d.is_inside]
        fit, room = fitting(ranked(ready, self.tokens_done), inside, self.model.memory.most)
        return choose(fit, self.tokens_done, self.most_tokens, room)

    def _prepare(self, chosen: Sequence[Drawing], events: list[EngineEvent]) -> None:
        """Make new drawings ready, or one of them readier by an encode: there is no second one."""
        may_encode = True
        for drawing in [d for d in chosen if not d.is_prepared]:
            try:
                if may_encode and self.model.missing(drawing):
                    self.model.encode(drawing)
                    may_encode = False
                if not self.model.missing(drawing):
                    self.model.prepare(drawing)
            except COMPUTE_ERRORS as error:
                log.exception("request %s: prepare failed", drawing.run.request_id)
                self._fail(drawing, f"preparing failed: {error}", events)

    def _denoise(self, batch: list[Drawing], events: list[EngineEvent]) -> None:
        """One forward for all of `batch`, then guidance and scheduler one by one."""
        for drawing, prediction in self._predict(batch, events):
            due, number = due_previews(drawing.wish), drawing.step + 1
            try:
                preview = self.model.update(drawing, prediction, number in due)
                events.append(EngineProgress(drawing.run, {"step": number, "steps": drawing.wish.steps}))
                if preview is not None and drawing.wish.preview_every:
                    self._sketch(Decode(drawing, preview, 0, number, due.index(number)), events)
            except COMPUTE_ERRORS as error:
                log.exception("request %s: step failed", drawing.run.request_id)
                self._fail(drawing, f"step {number} failed: {error}", events)
                continue
            if preview is not None and not drawing.wish.preview_every:
                self._drop_previews(drawing)  # an older one would only come late
                self._decodes.append(Decode(drawing, preview, 0, number, due.index(number)))
            if not drawing.steps_left:
                self._drop_previews(drawing)
                self._decodes.append(Decode(drawing, drawing.noisy(), 0, number, None))

    def _sketch(self, decode: Decode, events: list[EngineEvent]) -> None:
        """Fast previews, at once."""
        drawing = decode.drawing
        for picture in self.model.preview(decode.latents, drawing.wish.width, drawing.wish.height):
            said = meta(decode) | {"preview": "fast"}
            events.append(EngineOutput(drawing.run, "image", (Tensor.of("image", picture),), said))
            decode.index += 1

    def _predict(self, batch: list[Drawing], events: list[EngineEvent]) -> list[tuple[Drawing, Prediction]]:
        """The batch's predictions; if the forward fails, each drawing's own, and only the culprits fail."""
        if not batch:
            return []
        try:
            found = self.model.predict(batch)
            self._count(batch)
            return list(zip(batch, found, strict=True))
        except COMPUTE_ERRORS as error:
            self.model.forward.forget()
            if len(batch) == 1:
                log.exception("request %s: step failed", batch[0].run.request_id)
                self._fail(batch[0], f"step {batch[0].step + 1} failed: {error}", events)
                return []
            log.warning("a step of %d requests failed, each goes alone: %s", len(batch), error)
        return [pair for drawing in batch for pair in self._predict([drawing], events)]

    # --- bookkeeping ---------------------------------------------------------------------------------------------
    def _can_step(self, drawing: Drawing) -> bool:
        return drawing.steps_left > 0 and not drawing.run.blocked

    def _count(self, batch: Sequence[Drawing]) -> None:
        self.forwards += 1
        self.tokens_done += sum(d.tokens for d in batch)

    def _prompt(self, wish: Wish, text: str, field: str) -> Prompt:
        prompt = self.model.prompt(wish, text)
        count = prompt.tokens - prompt.picture_tokens
        if count > self.options.max_prompt_tokens:
            raise BadRequest(f"{count} tokens long; at most {self.options.max_prompt_tokens} are read", field)
        return prompt

    def _fail(self, drawing: Drawing, message: str, events: list[EngineEvent]) -> None:
        self._drop(drawing)
        events.append(EngineFailed(drawing.run, StageFailed(message, self.stage)))

    def _drop(self, drawing: Drawing) -> None:
        """Forget a drawing and everything queued for it."""
        self._drawings = [d for d in self._drawings if d is not drawing]
        self._decodes = [d for d in self._decodes if d.drawing is not drawing]
        self.model.forget(drawing)
        if not self._drawings:
            self.model.forward.forget()

    def _drop_previews(self, drawing: Drawing) -> None:
        self._decodes = [d for d in self._decodes if d.drawing is not drawing or d.partial is None]
