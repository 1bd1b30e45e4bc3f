# SPDX-License-Identifier: Apache-2.0
"""The diffusion engine: continuous batching of image requests, one denoise step at a time."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Sequence

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
from triton_omni.backends.diffusion.calibrate import measure_step_cost
from triton_omni.backends.diffusion.forward import COMPUTE_ERRORS, Prediction
from triton_omni.backends.diffusion.image_params import MAX_SEED, ImageSpec, field_name, resolve
from triton_omni.backends.diffusion.image_run import ImageRun, PendingDecode, image_piece, usage
from triton_omni.backends.diffusion.memory import admit
from triton_omni.backends.diffusion.model import ImageModel, find_model
from triton_omni.backends.diffusion.options import read_options
from triton_omni.backends.diffusion.parallel.ranks import check_gpus
from triton_omni.backends.diffusion.scheduling import by_priority, select_batch
from triton_omni.backends.diffusion.step_cost import StepCost
from triton_omni.backends.diffusion.text import Prompt

log = logging.getLogger("triton_omni.diffusion")


class DiffusionEngine:
    """Generates images for the output `image`.

    Between two steps at most one encode (the prompts of a request, or one source image) and one decode (one image) are
    computed, which bounds how long running requests wait for others.
    """

    def __init__(self, context: EngineContext, package_dir: str = "") -> None:
        self.stage = context.stage
        self.options = read_options(context.options, context.stage)
        on_gpu = context.device == "cuda"
        check_gpus(self.options.parallel, torch.cuda.device_count() if on_gpu else 0, context.stage)
        torch.set_num_threads(self.options.threads)
        folder = find_model(self.options.model, package_dir, context.models_dir)
        self.model = ImageModel(folder, self.options, context.device, context.models_dir)
        self._limits = self.model.restrict(self.options.limits)
        self.forwards = 0
        self.tokens_done = 0
        self._image_runs: list[ImageRun] = []
        self._decodes: list[PendingDecode] = []
        self.step_cost = self._step_cost()
        self.max_tokens = self.options.max_batch_tokens or sys.maxsize

    def _step_cost(self) -> StepCost:
        overhead = self.options.step_overhead_tokens
        if overhead or self.options.max_batch_tokens == 1 or self.options.batching == "seq":  # no batching: not needed
            return StepCost.from_overhead(overhead or 1)
        with torch.inference_mode():
            cost = measure_step_cost(self.model, self.options.limits)
        log.info("%s: marginal cost of an image in a step, in units of the fixed cost: %s", self.stage, cost)
        return cost

    # --- contract ------------------------------------------------------------------------------------------------
    def open(self, run: Run) -> None:
        """Accept a run. Only its token ids are computed here."""
        at = field_name(run.request, self.stage)
        spec = resolve(run.request, self.stage, self._limits, self.options.defaults)
        self.model.check(spec, at)
        if spec.source_images and "image" not in run.inputs:
            raise BadRequest("images must be in the input tensor 'image'", "messages")
        prompt = self._prompt(spec, spec.prompt, "input" if run.request.operation == "image" else "messages")
        negative = None
        if spec.has_guidance:
            assert spec.negative_prompt is not None
            negative = self._prompt(spec, spec.negative_prompt, at("negative_prompt"))
        prompts = [prompt] if negative is None else [prompt, negative]
        rows = [spec.image_tokens + spec.source_tokens + p.tokens for p in prompts]
        image_run = ImageRun(
            run=run,
            spec=spec,
            seed=secrets.randbelow(MAX_SEED + 1) if spec.seed is None else spec.seed,
            prompt=prompt,
            negative_prompt=negative,
            tokens=spec.n * sum(rows),
            step_cost=spec.n * sum(self.step_cost(tokens) for tokens in rows),
            arrival_tokens=self.tokens_done,
            needs=self.model.memory.check(spec, prompts, at),
        )
        run.state = image_run
        self._image_runs.append(image_run)

    def feed(self, run: Run, inputs: object, last: bool) -> bool:
        raise Internal("a diffusion stage takes no chunks from other stages", self.stage)

    def stop(self, run: Run) -> None:
        self._drop(run.state)

    @property
    def has_work(self) -> bool:
        """Cheap except where every admitted run is blocked: then a new run may have to wait for memory."""
        if self._decodes:
            return True
        ready = [r for r in self._image_runs if r.can_step]
        if any(r.is_admitted for r in ready) or not any(r.is_admitted for r in self._image_runs):
            return bool(ready)
        return bool(self._admit(ready)[0])

    def step(self) -> Sequence[EngineEvent]:
        """Decode one image, encode for one new run, and denoise one batch."""
        events: list[EngineEvent] = []
        with torch.inference_mode():
            self._decode(events)
            self._denoise(self._next_batch(events), events)
        return events

    def close(self) -> None:
        self._image_runs.clear()
        self._decodes.clear()
        self.model.close()

    # --- decode --------------------------------------------------------------------------------------------------
    def _decode(self, events: list[EngineEvent]) -> None:
        """Decode one image: final images before previews."""
        if not self._decodes:
            return
        decode = next((d for d in self._decodes if d.partial is None), self._decodes[0])
        self._decodes.remove(decode)
        image_run = decode.image_run
        end = len(decode.latents) if self.options.batching == "seq" else decode.index + 1
        latents = decode.latents[decode.index : end]
        if not bool(torch.isfinite(latents).all()):
            self._fail(image_run, "the model produced values that are not finite", events)
            return
        try:
            images = self.model.decode(latents, image_run.spec.width, image_run.spec.height)
        except COMPUTE_ERRORS as error:
            log.exception("request %s: decode failed", image_run.run.request_id)
            self._fail(image_run, f"decode failed: {error}", events)
            return
        for image in images:
            events.append(EngineOutput(image_run.run, image_piece(decode), (Tensor.of("image", image),)))
            decode.index += 1
        if decode.index < len(decode.latents):
            self._decodes.append(decode)
        elif decode.partial is None:
            self._drop(image_run)
            events.append(EngineFinished(image_run.run, "stop", usage(image_run)))

    def _send_fast_preview(self, decode: PendingDecode, events: list[EngineEvent]) -> None:
        image_run = decode.image_run
        for image in self.model.preview(decode.latents, image_run.spec.width, image_run.spec.height):
            piece = image_piece(decode, preview="fast")
            events.append(EngineOutput(image_run.run, piece, (Tensor.of("image", image),)))
            decode.index += 1

    # --- batch ---------------------------------------------------------------------------------------------------
    def _next_batch(self, events: list[EngineEvent]) -> list[ImageRun]:
        """Runs of the next step. A batch starts when all its runs are prepared; started runs do not wait for that."""
        ready = [r for r in self._image_runs if r.can_step]
        batch = self._select(ready)
        if any(not r.is_prepared for r in batch):
            self._prepare(batch, events)
            batch = [r for r in batch if r in self._image_runs]  # without those that failed
        if all(r.is_prepared for r in batch):
            return batch
        has_started = any(r.step for r in ready)
        return self._select([r for r in ready if r.is_prepared]) if has_started else []

    def _select(self, ready: list[ImageRun]) -> list[ImageRun]:
        """The run with the highest priority, and those that share its step, within memory."""
        fitting, free = self._admit(ready)
        return select_batch(fitting, self.max_tokens, free)

    def _admit(self, ready: list[ImageRun]) -> tuple[list[ImageRun], int]:
        """Ready runs that fit into memory, by priority, and the bytes left for their step."""
        admitted = [r for r in self._image_runs if r.is_admitted]
        return admit(by_priority(ready, self.tokens_done), admitted, self.model.memory.limit_bytes)

    def _prepare(self, batch: Sequence[ImageRun], events: list[EngineEvent]) -> None:
        """Prepare the new runs of a batch, with at most one encode."""
        may_encode = True
        for image_run in [r for r in batch if not r.is_prepared]:
            try:
                if may_encode and self.model.missing(image_run):
                    self.model.encode(image_run)
                    may_encode = False
                if not self.model.missing(image_run):
                    self.model.prepare(image_run)
            except COMPUTE_ERRORS as error:
                log.exception("request %s: prepare failed", image_run.run.request_id)
                self._fail(image_run, f"prepare failed: {error}", events)

    # --- denoise -------------------------------------------------------------------------------------------------
    def _denoise(self, batch: list[ImageRun], events: list[EngineEvent]) -> None:
        """One forward for the batch, then guidance and scheduler run by run."""
        for image_run, prediction in self._predict(batch, events):
            preview_steps, step = image_run.spec.preview_steps, image_run.step + 1
            try:
                preview = self.model.update(image_run, prediction, step in preview_steps)
                events.append(EngineProgress(image_run.run, step, image_run.spec.steps))
                if preview is not None:
                    self._preview(PendingDecode(image_run, preview, 0, step, preview_steps.index(step)), events)
            except COMPUTE_ERRORS as error:
                log.exception("request %s: step failed", image_run.run.request_id)
                self._fail(image_run, f"step {step} failed: {error}", events)
                continue
            if not image_run.steps_left:
                self._drop_previews(image_run)
                self._decodes.append(PendingDecode(image_run, image_run.current_latents(), 0, step, None))

    def _preview(self, decode: PendingDecode, events: list[EngineEvent]) -> None:
        """Send a fast preview now, or queue an exact one in place of an older one."""
        if decode.image_run.spec.preview_every:
            self._send_fast_preview(decode, events)
            return
        self._drop_previews(decode.image_run)
        self._decodes.append(decode)

    def _predict(self, batch: list[ImageRun], events: list[EngineEvent]) -> list[tuple[ImageRun, Prediction]]:
        """Predictions of the batch. If the forward fails, the runs are retried one by one and only culprits fail."""
        if not batch:
            return []
        try:
            predictions = self.model.predict(batch)
        except COMPUTE_ERRORS as error:
            self.model.forward.forget()
            if len(batch) == 1:
                log.exception("request %s: step failed", batch[0].run.request_id)
                self._fail(batch[0], f"step {batch[0].step + 1} failed: {error}", events)
                return []
            log.warning("a step of %d requests failed; retrying them one by one: %s", len(batch), error)
            return [pair for image_run in batch for pair in self._predict([image_run], events)]
        self.forwards += 1
        self.tokens_done += sum(r.tokens for r in batch)
        return list(zip(batch, predictions, strict=True))

    # --- bookkeeping ---------------------------------------------------------------------------------------------
    def _prompt(self, spec: ImageSpec, text: str, field: str) -> Prompt:
        prompt = self.model.prompt(spec, text)
        tokens, limit = prompt.tokens - prompt.image_tokens, self.options.max_prompt_tokens
        if tokens > limit:
            raise BadRequest(f"prompt must be at most {limit} tokens (got {tokens})", field)
        return prompt

    def _fail(self, image_run: ImageRun, message: str, events: list[EngineEvent]) -> None:
        self._drop(image_run)
        events.append(EngineFailed(image_run.run, StageFailed(message, self.stage)))

    def _drop(self, image_run: ImageRun) -> None:
        """Remove a run and everything queued for it."""
        self._image_runs = [r for r in self._image_runs if r is not image_run]
        self._decodes = [d for d in self._decodes if d.image_run is not image_run]
        self.model.forget(image_run)
        if not self._image_runs:
            self.model.forward.forget()

    def _drop_previews(self, image_run: ImageRun) -> None:
        self._decodes = [d for d in self._decodes if d.image_run is not image_run or d.partial is None]
