# SPDX-License-Identifier: Apache-2.0
"""The diffusion engine: all running requests advance together, one denoise step at a time."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backends.core.chunk import Tensor
from backends.core.engine import Event, Failed, Finished, Output, Progress, Run
from backends.core.errors import BadRequest, Internal, StageFailed
from backends.core.pipeline import EngineContext
from backends.diffusion.calibrate import Weights, measured_weights
from backends.diffusion.drawing import Drawing
from backends.diffusion.fairness import choose
from backends.diffusion.forward import COMPUTE_ERRORS, Prediction
from backends.diffusion.model import Model, find_model
from backends.diffusion.options import read_options
from backends.diffusion.text import Prompt
from backends.diffusion.wish import MAX_SEED, Wish, read_wish

log = logging.getLogger("triton_omni.diffusion")

@dataclass(slots=True)
class Decode:
    """Pictures of a drawing that wait for the VAE, from `index` on: finished ones, or preview number `partial`."""

    drawing: Drawing
    latents: torch.Tensor
    index: int
    step: int
    partial: int | None


class DiffusionEngine:
    """Draws pictures for the `image` output. Between two steps at most one prompt and one picture go through their
    networks, so a step never stalls for longer than that."""

    def __init__(self, context: EngineContext, package_dir: str = "") -> None:
        self.stage = context.stage
        self.options = read_options(context.options, context.stage)
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
        log.info("%s: a run adds to a step: %s of its fixed cost", context.stage, self.weights)

    def _weights(self) -> Weights:
        overhead = self.options.step_overhead_tokens
        if overhead or self.options.max_batch_tokens == 1:
            return Weights.of_overhead(overhead or 1)
        with torch.inference_mode():
            return measured_weights(self.model, self.options.limits)

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
        picture = wish.picture_tokens + wish.source_tokens
        tokens = sum(picture + p.tokens for p in (prompt, negative) if p is not None) * wish.n
        seed = secrets.randbelow(MAX_SEED + 1) if wish.seed is None else wish.seed
        drawing = Drawing(run, wish, seed, prompt, negative, tokens, self.weights(tokens), self.tokens_done)
        run.state = drawing
        self._drawings.append(drawing)

    def feed(self, run: Run, inputs: Any, last: bool) -> bool:
        raise Internal("a diffusion stage works from the request; it takes no chunks", self.stage)

    def stop(self, run: Run) -> None:
        self._drop(run.state)

    @property
    def busy(self) -> bool:
        return bool(self._decodes) or any(self._can_step(d) for d in self._drawings)

    def step(self) -> Sequence[Event]:
        """Decode one picture, encode one prompt, then one denoise step for the drawings chosen."""
        events: list[Event] = []
        with torch.inference_mode():
            self._decode(events)
            chosen = choose([d for d in self._drawings if self._can_step(d)], self.tokens_done, self.most_tokens)
            if self._prepare(chosen, events):
                self._denoise([d for d in chosen if d.is_prepared and d in self._drawings], events)
        return events

    def close(self) -> None:
        self._drawings.clear()
        self._decodes.clear()
        self.model.close()

    # --- parts of a step -----------------------------------------------------------------------------------------
    def _decode(self, events: list[Event]) -> None:
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
            events.append(Output(drawing.run, "image", (Tensor.of("image", picture),), _meta(decode)))
            decode.index += 1
        if decode.index < len(decode.latents):
            self._decodes.append(decode)
        elif decode.partial is None:
            self._drop(drawing)
            events.append(Finished(drawing.run, "stop", _usage(drawing)))

    def _prepare(self, chosen: Sequence[Drawing], events: list[Event]) -> bool:
        """Prepare new drawings, one encode at most; False if a fresh batch should wait for its last member."""
        may_encode = True
        for drawing in chosen:
            if drawing.is_prepared:
                continue
            known = self.model.text.knows(drawing.prompt) and self.model.text.knows(drawing.negative_prompt)
            if not known and not may_encode:
                continue
            may_encode = may_encode and known
            try:
                self.model.prepare(drawing)
            except COMPUTE_ERRORS as error:
                log.exception("request %s: prepare failed", drawing.run.request_id)
                self._fail(drawing, f"preparing failed: {error}", events)
        left = [d for d in chosen if not d.is_prepared and d in self._drawings]
        return not left or any(d.step for d in chosen)

    def _denoise(self, batch: list[Drawing], events: list[Event]) -> None:
        """One forward for all of `batch`, then guidance and scheduler one by one."""
        if not batch:
            return
        for drawing, prediction in self._predict(batch, events):
            due, number = _due_previews(drawing.wish), drawing.step + 1
            try:
                preview = self.model.update(drawing, prediction, number in due)
                events.append(Progress(drawing.run, {"step": number, "steps": drawing.wish.steps}))
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

    def _sketch(self, decode: Decode, events: list[Event]) -> None:
        """Fast previews, at once."""
        drawing = decode.drawing
        for picture in self.model.preview(decode.latents, drawing.wish.width, drawing.wish.height):
            meta = _meta(decode) | {"preview": "fast"}
            events.append(Output(drawing.run, "image", (Tensor.of("image", picture),), meta))
            decode.index += 1

    def _predict(self, batch: list[Drawing], events: list[Event]) -> list[tuple[Drawing, Prediction]]:
        """The batch's predictions; if the forward fails, each drawing's own, and only the culprits fail."""
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

    def _fail(self, drawing: Drawing, message: str, events: list[Event]) -> None:
        self._drop(drawing)
        events.append(Failed(drawing.run, StageFailed(message, self.stage)))

    def _drop(self, drawing: Drawing) -> None:
        """Forget a drawing and everything queued for it."""
        self._drawings = [d for d in self._drawings if d is not drawing]
        self._decodes = [d for d in self._decodes if d.drawing is not drawing]
        self.model.forget(drawing)
        if not self._drawings:
            self.model.forward.forget()

    def _drop_previews(self, drawing: Drawing) -> None:
        self._decodes = [d for d in self._decodes if d.drawing is not drawing or d.partial is None]


def _due_previews(wish: Wish) -> list[int]:
    """Steps after which a preview is made, evenly spread and none after the last."""
    if wish.preview_every:
        return list(range(wish.preview_every, wish.steps, wish.preview_every))
    parts = wish.partial_images + 1
    return sorted({max(1, wish.steps * k // parts) for k in range(1, parts)} - {wish.steps})


def _meta(decode: Decode) -> dict[str, Any]:
    """Facts about a picture."""
    drawing = decode.drawing
    meta: dict[str, Any] = {
        "index": decode.index, "partial": decode.partial is not None, "step": decode.step, "steps": drawing.wish.steps,
        "seed": drawing.seed, "cfg_applied": drawing.wish.has_guidance,
    }  # fmt: skip
    if drawing.wish.lora:
        meta["lora"] = drawing.wish.lora
    if drawing.wish.step_cache:
        meta["step_cache"] = True
    if decode.partial is not None:
        meta["partial_image_index"] = decode.partial
    if drawing.wish.guidance_scale is not None:
        meta["guidance_scale_applied"] = False
    return meta


def _usage(drawing: Drawing) -> dict[str, float]:
    wish = drawing.wish
    return {
        "prompt_tokens": drawing.prompt.tokens,
        "prompt_image_tokens": drawing.prompt.picture_tokens,
        "completion_tokens": wish.n * wish.picture_tokens,
        "images": wish.n,
        "steps": wish.steps,
    }
