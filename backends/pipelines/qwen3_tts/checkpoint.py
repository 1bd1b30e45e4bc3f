# SPDX-License-Identifier: Apache-2.0
"""The facts of a Qwen3-TTS checkpoint: its config.json, typed, as far as this pipeline reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from triton_omni.backends.ar.options import checkpoint_folder
from triton_omni.backends.core.engine import OptionsError

Kind = Literal["base", "custom_voice", "voice_design"]
MODEL_TYPE = "qwen3_tts"
TOKENIZER_TYPE = "qwen3_tts_tokenizer_12hz"
Size = Annotated[int, msgspec.Meta(ge=1)]


class DecoderFacts(msgspec.Struct, frozen=True):
    """A Qwen3 decoder, by transformers' names."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    num_code_groups: Size
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_position_embeddings: Size = 32768
    hidden_act: str = "silu"
    attention_bias: bool = False


class TalkerFacts(DecoderFacts, frozen=True, kw_only=True):
    """The talker: a Qwen3 decoder with text embeddings of a width of their own.

    codec_language_id  language or dialect → codec id
    spk_id             voice → codec id; empty unless the checkpoint has voices
    spk_is_dialect     voice → the dialect it speaks, or False
    """

    text_vocab_size: Size
    text_hidden_size: Size
    codec_bos_id: int
    codec_eos_token_id: int
    codec_pad_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    codec_language_id: dict[str, int]
    code_predictor_config: DecoderFacts
    spk_id: dict[str, int] = {}
    spk_is_dialect: dict[str, bool | str] = {}

    def dialect(self, voice: str) -> str:
        """The dialect of a voice; empty if it has none."""
        dialect = self.spk_is_dialect.get(voice)
        return dialect if isinstance(dialect, str) else ""


class SpeakerFacts(msgspec.Struct, frozen=True):
    """The network that makes a vector of a voice; the published checkpoints leave out what is as here."""

    mel_dim: Size = 128
    enc_dim: Size = 1024
    enc_channels: tuple[Size, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[Size, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[Size, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: Size = 128
    enc_res2net_scale: Size = 8
    enc_se_channels: Size = 128
    sample_rate: Size = 24_000


class TtsFacts(msgspec.Struct, frozen=True):
    """A checkpoint's config.json. `tts_model_type` says where its voices come from: a list of its own
    (`custom_voice`), a description (`voice_design`) or a recording (`base`)."""

    model_type: str
    tokenizer_type: str
    tts_model_type: Kind
    tts_model_size: str
    tts_pad_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int
    im_start_token_id: int
    im_end_token_id: int
    assistant_token_id: int
    talker_config: TalkerFacts
    speaker_encoder_config: SpeakerFacts = SpeakerFacts()

    @property
    def reads_instructions(self) -> bool:
        """Whether the model was trained to follow instructions; the smallest one with voices was not."""
        return self.tts_model_type == "voice_design" or (
            self.tts_model_type == "custom_voice" and self.tts_model_size != "0b6"
        )


def read_facts(folder: Path) -> TtsFacts:
    """Facts of a checkpoint's folder; raises OptionsError if it is another family's or unreadable."""
    try:
        facts = msgspec.json.decode((folder / "config.json").read_bytes(), type=TtsFacts)
    except (OSError, msgspec.DecodeError) as error:
        raise OptionsError(f"model '{folder}': its config.json cannot be read: {error}") from None
    if (facts.model_type, facts.tokenizer_type) != (MODEL_TYPE, TOKENIZER_TYPE):
        raise OptionsError(
            f"model '{folder}' is of the type '{facts.model_type}' with '{facts.tokenizer_type}', this pipeline needs "
            f"'{MODEL_TYPE}' with '{TOKENIZER_TYPE}'"
        )
    return facts


def speech_folder(model: str, models_dir: str) -> Path:
    """The folder of the codec inside a checkpoint's; raises OptionsError if it is missing."""
    folder = checkpoint_folder(model, models_dir) / "speech_tokenizer"
    if not (folder / "config.json").is_file():
        raise OptionsError(f"model '{model}': {folder / 'config.json'} is missing")
    return folder
