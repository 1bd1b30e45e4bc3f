# SPDX-License-Identifier: Apache-2.0
"""Stage `thinker`: Qwen3-Omni's thinker on the AR engine, and what it sends to the talker while it generates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from triton_omni.backends.ar import tools
from triton_omni.backends.ar.chat_prompts import read_chat_template
from triton_omni.backends.ar.engine import ArEngine, ArRunState, RequestOutput
from triton_omni.backends.ar.taps import TokenTaps
from triton_omni.backends.ar.upstream import attach_taps, hook_arguments, media_features
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import EngineChunk, OptionsError
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_omni.adapters import MEDIA_SHAPES
from triton_omni.backends.pipelines.qwen3_omni.chats import OmniPromptBuilder
from triton_omni.backends.pipelines.qwen3_omni.checkpoints import omni_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.multimodal.inputs import MultiModalFeatureSpec


def make_thinker(context: EngineContext) -> ArEngine:
    """The engine of stage `thinker`. A checkpoint without a talker (Captioner, Thinking) needs no taps."""
    config = omni_config(context)
    template = read_chat_template(str(config.name_or_path))
    prompts = partial(OmniPromptBuilder, template=template)
    thinker = config.thinker_config
    if not config.enable_audio_output:
        return ArEngine(context, prompts)
    layer, deep = config.talker_config.accept_hidden_layer, len(thinker.vision_config.deepstack_visual_indexes)
    if layer <= deep:  # there vLLM's rows already hold what the next layers add for images, transformers' do not
        raise OptionsError(f"accept_hidden_layer is {layer}; it must come after the {deep} layers that read images")
    engine = ArEngine(context, prompts, lambda state: TalkerFeed(state, *tags), hook_arguments([layer]))
    tags: list[int] = engine.llm.engine.renderer.get_tokenizer().convert_tokens_to_ids([tools.OPEN, tools.CLOSE])
    media_ids = [thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]
    attach_taps(engine.llm.engine, TokenTaps(media_ids), engine.on_tapped)
    return engine


class TalkerFeed:
    """triton_omni.backends.ar.engine.RunFeed: new text tokens, and with the first ones the prompt.

    The last token, whichever it is, is never spoken, and neither are function calls.
    """

    def __init__(self, state: ArRunState, call_begin: int, call_end: int) -> None:
        self._state = state
        self._call_begin, self._call_end = call_begin, call_end
        self._in_call = False
        self._prompt_sent = False
        self._media_positions: list[int] = []
        self._media_rows: list[torch.Tensor] = []
        """Rows of `_media_positions`, on the network's device, until they leave with the first chunk."""

    def on_tapped(self, positions: Sequence[int], rows: torch.Tensor) -> None:
        self._media_positions += positions
        self._media_rows.append(rows)

    def chunks(self, output: RequestOutput) -> Iterable[EngineChunk]:
        tokens = list(output.outputs[0].token_ids)
        if output.finished:
            del tokens[-1:]
        if self._state.scanner is not None:
            tokens = self._outside_calls(tokens)
        tensors: list[Tensor] = []
        if not self._prompt_sent:
            self._prompt_sent = True
            assert output.prompt_token_ids is not None, "vLLM returns the prompt with every output"
            tensors.append(_ids("prompt_ids", output.prompt_token_ids))
            if self._media_rows:
                tensors.append(Tensor.of_torch("media", in_order(self._media_positions, self._media_rows)))
                self._media_rows.clear()
                tensors += media_shapes(media_features(self._state.scheduled))
        if tokens:
            tensors.append(_ids("token_ids", tokens))
        return (EngineChunk(self._state.run, tuple(tensors)),) if tensors else ()

    def _outside_calls(self, tokens: Sequence[int]) -> list[int]:
        if self._state.run.request.tool_choice != tools.ANY:
            return []  # a grammar lets the model spell the tags with any tokens, but then there is nothing else
        spoken: list[int] = []
        for token in tokens:
            self._in_call |= token == self._call_begin
            if not self._in_call:
                spoken.append(token)
            self._in_call &= token != self._call_end
        return spoken


def in_order(positions: Sequence[int], blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows (positions, hidden) by rising position. Of a position that a preempted run computed twice, the last one."""
    row_of = {position: row for row, position in enumerate(positions)}
    return torch.cat(list(blocks))[[row_of[position] for position in sorted(row_of)]]


def media_shapes(features: Sequence[MultiModalFeatureSpec]) -> list[Tensor]:
    """What the talker's positions depend on, in order (MEDIA_SHAPES): grids (time, height, width) of images and videos,
    seconds per grid of videos, lengths of audio in feature frames."""
    shapes: dict[str, list[object]] = {name: [] for name in MEDIA_SHAPES}
    for feature in features:
        assert feature.data is not None, "the scheduler keeps the data of media"
        data = cast("Mapping[str, torch.Tensor]", feature.data.get_data())
        if feature.modality == "image":
            shapes["image_grids"].append(data["image_grid_thw"].flatten().tolist())
        elif feature.modality == "video":
            shapes["video_grids"].append(data["video_grid_thw"].flatten().tolist())
            shapes["video_steps_s"].append(float(data["second_per_grid_ts"]))
        else:
            shapes["audio_lengths"].append(int(data["audio_feature_lengths"]))
    return [Tensor.of(name, np.array(rows, MEDIA_SHAPES[name])) for name, rows in shapes.items()]


def _ids(name: str, ids: Sequence[int]) -> Tensor:
    return Tensor.of(name, np.array(ids, np.int32))
