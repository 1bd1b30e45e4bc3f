# SPDX-License-Identifier: Apache-2.0
"""Stage `thinker`: Qwen3-Omni's thinker on the AR engine, and what it hands to the talker while it writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from triton_omni.backends.ar import tools
from triton_omni.backends.ar.engine import ArEngine, Live, RequestOutput
from triton_omni.backends.ar.taps import Tapped, TokenTaps
from triton_omni.backends.ar.upstream import attach_taps, hook_arguments, media_features
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import EngineChunk, OptionsError
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_omni.chats import ChatPrompts
from triton_omni.backends.pipelines.qwen3_omni.checkpoints import omni_config


def make_thinker(context: EngineContext) -> ArEngine:
    """The engine of stage `thinker`. A checkpoint without a talker (Captioner, Thinking) needs no taps."""
    config = omni_config(context)
    thinker = config.thinker_config
    if not config.enable_audio_output:
        return ArEngine(context, ChatPrompts)
    layer, deep = config.talker_config.accept_hidden_layer, len(thinker.vision_config.deepstack_visual_indexes)
    if layer <= deep:  # there vLLM's rows already hold what the next layers add for pictures, transformers' do not
        raise OptionsError(f"accept_hidden_layer is {layer}; it must come after the {deep} layers that read pictures")
    needed = hook_arguments([layer])
    engine = ArEngine(context, ChatPrompts, lambda live, output: to_talker(live, output, *tags), needed)
    tags: list[int] = engine.llm.renderer.get_tokenizer().convert_tokens_to_ids([tools.OPEN, tools.CLOSE])
    media_ids = [thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]
    attach_taps(engine.llm, TokenTaps(media_ids), lambda tapped: keep_media(engine.live, tapped))
    return engine


def keep_media(runs: Mapping[str, Live], tapped: Sequence[Tapped]) -> None:
    """Keep the accept layer's rows of media positions with their run until its prompt is complete."""
    for key, positions, rows in tapped:
        live = runs.get(key)
        if live is not None and not live.completion_tokens:  # else they are sent; preempted, it comes here again
            live.hidden |= zip(positions, rows, strict=True)


def to_talker(live: Live, output: RequestOutput, call_begins: int, call_ends: int) -> Iterable[EngineChunk]:
    """The new words, and with the first ones the prompt. The last token, whatever it is, is never spoken."""
    words = list(output.outputs[0].token_ids)
    is_first = live.completion_tokens == len(words)
    if output.finished:
        del words[-1:]
    if live.calls is not None:
        words = _outside_calls(live, words, call_begins, call_ends)
    tensors: list[Tensor] = []
    meta: dict[str, Any] = {}
    if is_first:
        assert output.prompt_token_ids is not None, "vLLM names the prompt in every output"
        tensors.append(_ids("prompt_ids", output.prompt_token_ids))
        if live.hidden:
            rows = np.stack([live.hidden[place] for place in sorted(live.hidden)])
            tensors.append(Tensor.of("media", rows))
            live.hidden.clear()
            meta = media_shapes(media_features(live.scheduled))
    if words:
        tensors.append(_ids("token_ids", words))
    return (EngineChunk(live.run, tuple(tensors), meta),) if tensors else ()


def _outside_calls(live: Live, words: Sequence[int], call_begins: int, call_ends: int) -> list[int]:
    if live.run.request.tool_choice != tools.ANY:
        return []  # a grammar lets the model spell the tags with any tokens, but then there is nothing else
    spoken: list[int] = []
    for word in words:
        live.in_call |= word == call_begins
        if not live.in_call:
            spoken.append(word)
        live.in_call &= word != call_ends
    return spoken


def media_shapes(features: Sequence[Any]) -> dict[str, Any]:
    """What the talker's positions depend on: the grids of pictures, the lengths of sounds, in order."""
    found: dict[str, Any] = {"image_grids": [], "video_grids": [], "video_steps_s": [], "audio_lengths": []}
    for feature in features:
        data = feature.data.get_data()
        if feature.modality == "image":
            found["image_grids"].append(data["image_grid_thw"].flatten().tolist())
        elif feature.modality == "video":
            found["video_grids"].append(data["video_grid_thw"].flatten().tolist())
            found["video_steps_s"].append(float(data["second_per_grid_ts"]))
        else:
            found["audio_lengths"].append(int(data["audio_feature_lengths"]))
    return found


def _ids(name: str, ids: Sequence[int]) -> Tensor:
    return Tensor.of(name, np.array(ids, np.int32))
