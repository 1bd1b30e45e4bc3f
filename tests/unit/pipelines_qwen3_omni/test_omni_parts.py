# SPDX-License-Identifier: Apache-2.0
"""The parts of qwen3_omni that a stub without torch uses: graph, adapters, checks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from msgspec import structs

from tests.kit.expect import accepts
from triton_omni.backends.core.chunk import Chunk, Tensor, TensorSpec
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Message, Part, SpeechParams
from triton_omni.backends.pipelines.qwen3_omni.adapters import MEDIA_SHAPES, talker_input
from triton_omni.backends.pipelines.qwen3_omni.pipeline import PIPELINE
from triton_omni.backends.pipelines.qwen3_omni_text.pipeline import PIPELINE as TEXT_ALONE

SHAPES = {"image_grids": [[1, 2, 2]], "video_grids": [], "video_steps_s": [], "audio_lengths": []}
CHAT = GenerateRequest(messages=(Message("user", "hello"),))


def said(*parts):
    return GenerateRequest(messages=(Message("user", parts),))


def test_text_alone_opens_no_speech_stage():
    assert PIPELINE.plan(CHAT).needed == {"thinker"}
    both = GenerateRequest(messages=CHAT.messages, modalities=("text", "audio"))
    assert PIPELINE.plan(both).needed == {"thinker", "talker", "code2wav"}


def test_the_graph_needs_no_engine_library():
    code = (
        "import sys, triton_omni.backends.pipelines.qwen3_omni.pipeline; "
        "assert not {'torch', 'vllm', 'transformers', 'PIL', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_piece_is_what_its_chunk_carries():
    ids, words = np.array([5, 6, 7], np.int32), np.array([8], np.int32)
    rows = np.ones((2, 3), np.float32)
    tensors = tuple(Tensor.of(n, a) for n, a in (("prompt_ids", ids), ("token_ids", words), ("media", rows)))
    shapes = [Tensor.of(name, np.array(SHAPES[name], dtype)) for name, dtype in MEDIA_SHAPES.items()]
    piece = talker_input(Chunk(b"", "thinker", tensors=(*tensors, *shapes)))
    assert (piece.prompt_ids, piece.token_ids) == ([5, 6, 7], [8])
    assert piece.shapes == SHAPES
    rows[:] = 0  # the link reuses its buffer once the chunk is released
    assert piece.media is not None and piece.media.min() == 1


def test_media_rows_are_read_where_the_carrier_left_them():
    """In any dtype, and as a copy: "cpu:0" stands for a GPU, whose memory no numpy reader could take."""
    torch = pytest.importorskip("torch")
    rows = torch.ones(2, 3, dtype=torch.bfloat16)
    media = Tensor(TensorSpec("media", "bfloat16", (2, 3)), rows.reshape(-1).view(torch.uint8), "cpu:0")
    shapes = [Tensor.of(name, np.array(SHAPES[name], dtype)) for name, dtype in MEDIA_SHAPES.items()]
    ids = Tensor.of("prompt_ids", np.array([5], np.int32))
    piece = talker_input(Chunk(b"", "thinker", tensors=(ids, media, *shapes)))
    rows[:] = 0
    assert piece.media is not None and piece.media.dtype == torch.bfloat16
    assert piece.media.min() == 1


def test_a_pipeline_without_a_voice_has_no_stage_for_one():
    with pytest.raises(BadRequest) as caught:
        TEXT_ALONE.check(GenerateRequest(messages=CHAT.messages, stages={"talker": {}}))
    assert caught.value.where == "stages.talker"
    assert [stage.name for stage in TEXT_ALONE.stages] == ["thinker"]


def test_a_voice_that_the_checkpoint_has_not_is_refused_before_any_stage_works(tmp_path):
    talker, engine = PIPELINE.stage("talker"), {"model": str(tmp_path)}
    (tmp_path / "config.json").write_text('{"talker_config": {"speaker_id": {"Ethan": 7, "Aiden": 8}}}')
    for voice in ("ethan", "AIDEN", None):
        talker.check(structs.replace(CHAT, speech=SpeechParams(voice=voice)), engine)
    with pytest.raises(BadRequest, match="unknown voice 'Bob'; available: aiden, ethan") as caught:
        talker.check(structs.replace(CHAT, speech=SpeechParams(voice="Bob")), engine)
    assert caught.value.where == "speech.voice"


def test_voices_of_a_checkpoint_that_is_not_here_are_left_to_the_talker(tmp_path):
    bob = structs.replace(CHAT, speech=SpeechParams(voice="Bob"))
    PIPELINE.stage("talker").check(bob, {"model": str(tmp_path / "nowhere")})
    (tmp_path / "config.json").write_text("{}")
    PIPELINE.stage("talker").check(bob, {"model": str(tmp_path)})


def test_audio_of_videos_is_accepted():
    video_with_audio = (Part("video"), Part("audio", in_video=True))
    accepts(PIPELINE.check, said(*video_with_audio, *video_with_audio))


def test_an_empty_last_chunk_is_a_piece_without_words():
    piece = talker_input(Chunk(b"", "thinker", last=True))
    assert (piece.prompt_ids, piece.token_ids, piece.media) == ([], [], None)


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        (GenerateRequest(), "messages"),
        (GenerateRequest(messages=(Message("assistant", (Part("image"),)),)), "messages[0]"),
        (GenerateRequest(messages=CHAT.messages, stages={"talk": {}}), "stages.talk"),
        (said(Part("audio", in_video=True)), "messages[0]"),
        (said(Part("audio", sample_rate=1)), "messages[0]"),
        (said(Part("audio", sample_rate=384_000)), "messages[0]"),
        (said(Part("video"), Part("text"), Part("audio", in_video=True)), "messages[0]"),
        (said(Part("video"), Part("image", in_video=True)), "messages[0]"),
        (said(Part("video", fps=1), Part("video", fps=2)), "messages"),
        (said(Part("video"), Part("audio", in_video=True), Part("video")), "messages"),
        (said(Part("video"), Part("audio", in_video=True), Part("audio")), "messages"),
    ],
)
def test_what_can_be_refused_at_once_names_its_field(request_, where):
    with pytest.raises(BadRequest) as caught:
        PIPELINE.check(request_)
    assert caught.value.where == where
