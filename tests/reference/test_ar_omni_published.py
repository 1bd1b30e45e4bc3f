# SPDX-License-Identifier: Apache-2.0
"""The talker with the published values of Qwen3-Omni-30B-A3B-Instruct, on torch's meta device: positions as
transformers computes them, and every tensor of the checkpoint accounted for, both ways."""

from __future__ import annotations

import json
import re

import pytest

from tests.kit.ar_worker import become_ar_worker

become_ar_worker()

import torch  # noqa: E402
from transformers import Qwen3OmniMoeConfig  # noqa: E402
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (  # noqa: E402
    Qwen3OmniMoeTalkerForConditionalGeneration,
)

from triton_omni.backends.ar.code_predictor import CodePredictor  # noqa: E402
from triton_omni.backends.core.engine import OptionsError  # noqa: E402
from triton_omni.backends.pipelines.qwen3_omni.network import ARCHITECTURE, TalkerNetwork, talker_config  # noqa: E402

VOCABULARY, THINKER_HIDDEN = 152_064, 2048
IDS = {
    "audio_token_id": 151675, "image_token_id": 151655, "video_token_id": 151656, "audio_start_token_id": 151669,
    "audio_end_token_id": 151670, "vision_start_token_id": 151652, "position_id_per_seconds": 13,
}  # fmt: skip
PUBLISHED = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe", "dtype": "bfloat16",
    "enable_audio_output": True, "im_start_token_id": 151644, "im_end_token_id": 151645, "system_token_id": 8948,
    "user_token_id": 872, "assistant_token_id": 77091, "tts_pad_token_id": 151671, "tts_bos_token_id": 151672,
    "tts_eos_token_id": 151673,
    "thinker_config": IDS | {
        "audio_config": {"n_window": 50, "n_window_infer": 800, "output_dim": 2048},
        "text_config": {"vocab_size": VOCABULARY, "hidden_size": THINKER_HIDDEN},
    },
    "talker_config": IDS | {
        "accept_hidden_layer": 24, "num_code_groups": 16, "thinker_hidden_size": THINKER_HIDDEN,
        "spatial_merge_size": 2, "seconds_per_chunk": 2, "output_router_logits": False, "codec_bos_id": 2149,
        "codec_eos_token_id": 2150, "codec_pad_id": 2148, "codec_nothink_id": 2155, "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157, "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
        "text_config": {
            "vocab_size": 3072, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 20,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 6, "moe_intermediate_size": 384, "shared_expert_intermediate_size": 768,
            "norm_topk_prob": True, "max_position_embeddings": 65536, "rope_theta": 1000000,
            "rope_scaling": {"interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
        "code_predictor_config": {
            "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_code_groups": 16,
            "rope_theta": 1000000, "max_position_embeddings": 32768,
        },
    },
}  # fmt: skip
"""What the talker depends on, as the checkpoint's config.json has it."""
PER_EXPERT = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@pytest.fixture(scope="module")
def config():
    return Qwen3OmniMoeConfig(**PUBLISHED)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Our talker on the meta device."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    from triton_omni.backends.ar.upstream import register_model

    folder = tmp_path_factory.mktemp("published")
    (folder / "config.json").write_text(json.dumps(PUBLISHED), encoding="utf-8")
    register_model(ARCHITECTURE, TalkerNetwork)
    vllm_config = EngineArgs(
        str(folder), hf_overrides=talker_config, skip_tokenizer_init=True, enforce_eager=True, max_model_len=4096
    ).create_engine_config()
    rendezvous = f"file://{folder / 'rendezvous'}"
    was_initialized = torch.distributed.is_initialized()  # by an engine of another module
    with set_current_vllm_config(vllm_config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(CodePredictor, "_rotations", lambda self: torch.empty(0))  # computes; meta tensors cannot
        init_distributed_environment(1, 0, rendezvous, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"):
            yield TalkerNetwork(vllm_config=vllm_config)
    if not was_initialized:
        destroy_model_parallel()
        destroy_distributed_environment()


def checkpoint_tensors(config):
    """(name, shape) of the talker's tensors as the checkpoint has them: experts one by one, and the text embeddings."""
    with torch.device("meta"):
        reference = Qwen3OmniMoeTalkerForConditionalGeneration(config.talker_config)
    yield "thinker.model.embed_tokens.weight", (VOCABULARY, THINKER_HIDDEN)
    for name, tensor in reference.state_dict().items():
        stacked = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)", name)
        if stacked is None:
            yield f"talker.{name}", tuple(tensor.shape)
            continue
        parts = PER_EXPERT[stacked[2]]
        for expert in range(tensor.shape[0]):
            for part in parts:
                shape = (tensor.shape[1] // len(parts), tensor.shape[2])
                yield f"talker.{stacked[1]}.{expert}.{part}.weight", shape


def test_every_tensor_of_the_checkpoint_is_loaded_and_every_parameter_filled(config, network):
    tensors = dict(checkpoint_tensors(config))
    assert len(tensors) > 20 * 128 * 3
    given = [(name, torch.empty(shape, device="meta")) for name, shape in tensors.items()]
    assert not any(network.is_unused_checkpoint_weight(name) for name in tensors)
    loaded = network.load_weights(given)
    missing = {name for name, _ in network.named_parameters()} - loaded
    assert not missing, sorted(missing)[:5]


def test_a_tensor_that_the_network_does_not_know_is_an_error(config, network):
    with pytest.raises((ValueError, KeyError, AttributeError)):
        network.load_weights([("talker.model.layers.0.self_attn.unknown.weight", torch.empty(1, device="meta"))])


@pytest.mark.parametrize("name", ["thinker.model.layers.0.mlp.gate.weight", "code2wav.decoder.0.conv.weight"])
def test_files_of_other_networks_are_not_read(network, name):
    assert network.is_unused_checkpoint_weight(name)


def test_the_talkers_positions_are_interleaved(network):
    """transformers interleaves the sections always; vLLM reads a key that the checkpoint does not have."""
    rotary = network.model.layers[0].self_attn.rotary_emb
    assert rotary.mrope_section == [24, 20, 20]
    assert rotary.mrope_interleaved


def test_a_quantized_checkpoint_is_refused():
    config = Qwen3OmniMoeConfig(**PUBLISHED, quantization_config={"quant_method": "awq"})
    with pytest.raises(OptionsError, match="unquantized"):
        talker_config(config)
