# SPDX-License-Identifier: Apache-2.0
"""Stage `thinker`: Qwen3-Omni's thinker on the AR engine, and what it hands to the talker while it writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from transformers import AutoConfig

from backends.ar.engine import ArEngine, Live, RequestOutput
from backends.ar.options import checkpoint, read_options
from backends.ar.upstream import Span, attach_taps, hook_arguments
from backends.core.chunk import Tensor
from backends.core.engine import Send
from backends.core.pipeline import EngineContext
from backends.pipelines.qwen3_omni.chats import ChatPrompts


def make_thinker(context: EngineContext) -> ArEngine:
    """The engine of stage `thinker`. A checkpoint without a talker (Captioner, Thinking) needs no taps."""
    config = AutoConfig.from_pretrained(checkpoint(read_options(context.options, context.stage), context.models_dir))
    thinker = config.thinker_config
    if not config.enable_audio_output:
        return ArEngine(context, ChatPrompts)
    needed = hook_arguments([config.talker_config.accept_hidden_layer])
    engine = ArEngine(context, ChatPrompts, to_talker, needed)
    media_ids = [thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]
    attach_taps(engine.llm, MediaRows(engine.live, media_ids))
    return engine


class MediaRows:
    """Keeps the accept layer's rows of media positions with their run until its prompt is complete."""

    def __init__(self, live: dict[str, Live], media_ids: Sequence[int]) -> None:
        self._live = live
        self._media_ids = torch.tensor(media_ids)

    def tapped(self, spans: Sequence[Span], token_ids: torch.Tensor, layers: Sequence[torch.Tensor]) -> None:
        wanted = torch.isin(token_ids, self._media_ids.to(token_ids.device))
        if not wanted.any():
            return
        for span in spans:
            live = self._live.get(span.key)
            if live is None or not live.run.feeds:
                continue
            places = wanted[span.start : span.start + span.count].nonzero()[:, 0].tolist()
            rows = layers[0][[span.start + place for place in places]].float().cpu()
            live.hidden |= {span.position + place: row for place, row in zip(places, rows, strict=True)}


def to_talker(live: Live, output: RequestOutput) -> Iterable[Send]:
    """The new words, and with the first ones the prompt. The last token, whatever it is, is never spoken."""
    words = list(output.outputs[0].token_ids)
    is_first = live.completion_tokens == len(words)
    if output.finished:
        del words[-1:]
    tensors: list[Tensor] = []
    if is_first:
        assert output.prompt_token_ids is not None, "vLLM names the prompt in every output"
        tensors.append(_ids("prompt_ids", output.prompt_token_ids))
        if live.hidden:
            rows = torch.stack([live.hidden[place] for place in sorted(live.hidden)])
            tensors.append(Tensor.of("media", rows.numpy()))
            live.hidden.clear()
    if words:
        tensors.append(_ids("token_ids", words))
    return (Send(live.run, tuple(tensors)),) if tensors else ()


def _ids(name: str, ids: Sequence[int]) -> Tensor:
    return Tensor.of(name, np.array(ids, np.int32))
