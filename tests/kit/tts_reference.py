# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS in plain torch: rows joined as qwen-tts joins them, transformers' Qwen3 decoder, all computed again for
each code. Greedy. Nothing here is the served code but the checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FRAMES = 30


@dataclass(frozen=True)
class Speech:
    """What is said and how. `text_per_frame` None: as qwen-tts does by default."""

    text: str
    voice: str = ""
    language: str = "auto"
    instructions: str = ""
    transcript: str = ""
    text_per_frame: bool | None = None


class TtsReference:
    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file
        from transformers import Qwen2Tokenizer

        self.facts: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.talker_facts = self.facts["talker_config"]
        self.weights = load_file(folder / "model.safetensors")
        self.tokenizer = Qwen2Tokenizer.from_pretrained(folder)
        self.talker = self._decoder(self.talker_facts, "talker.model.")
        self.predictor = self._decoder(self.talker_facts["code_predictor_config"], "talker.code_predictor.model.")

    def _decoder(self, facts: dict[str, Any], prefix: str) -> Any:
        from transformers import Qwen3Config, Qwen3Model

        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        config = Qwen3Config(
            **{name: facts[name] for name in (*names, "head_dim", "rms_norm_eps")}, vocab_size=1,
            rope_parameters={"rope_type": "default", "rope_theta": facts["rope_theta"]},
        )  # fmt: skip
        model: Any = Qwen3Model(config).float().eval()
        names = [n for n in self.weights if n.startswith((f"{prefix}layers.", f"{prefix}norm."))]
        model.load_state_dict({n.removeprefix(prefix): self.weights[n] for n in names}, strict=False)
        return model

    def _text(self, text: str) -> Any:
        """Rows of a text with its marks, or of token ids."""
        import torch.nn.functional as F

        ids = self.tokenizer.encode(text)
        w, p = self.weights, "talker.text_projection.linear_fc"
        rows = w["talker.model.text_embedding.weight"][ids]
        rows = F.silu(F.linear(rows, w[f"{p}1.weight"], w[f"{p}1.bias"]))
        return F.linear(rows, w[f"{p}2.weight"], w[f"{p}2.bias"])

    def _codec(self, *ids: int) -> Any:
        return self.weights["talker.model.codec_embedding.weight"][list(ids)]

    def rows(self, speech: Speech, vector: np.ndarray | None, frames: np.ndarray | None) -> tuple[Any, Any]:
        """Rows of the prompt, and of the text of later steps."""
        import torch

        t, text = self.talker_facts, self._text
        answer = text(f"<|im_start|>assistant\n{speech.text}<|im_end|>\n<|im_start|>assistant\n")
        pad, bos, eos = text("<tts_pad>"), text("<tts_text_bos>"), text("<tts_text_eod>")
        language = speech.language
        if speech.voice and language in ("auto", "chinese"):
            language = t["spk_is_dialect"][speech.voice] or language
        tags = [t["codec_nothink_id"], t["codec_think_bos_id"], t["codec_think_eos_id"]]
        if language != "auto":
            tags = [t["codec_think_id"], tags[1], t["codec_language_id"][language], tags[2]]
        codec = [self._codec(*tags)]
        codec += [self._codec(t["spk_id"][speech.voice])] if speech.voice else []
        codec += [] if vector is None else [torch.from_numpy(vector)[None]]
        above = torch.cat([*codec, self._codec(t["codec_pad_id"])])
        below = torch.cat([pad.expand(len(above) - 1, -1), bos])
        start = [text(f"<|im_start|>user\n{speech.instructions}<|im_end|>\n")] if speech.instructions else []
        start += [answer[:3], above + below]
        words, codes = [answer[3:-5], eos], [self._codec(t["codec_bos_id"])]
        if frames is not None:
            words.insert(0, text(f"<|im_start|>assistant\n{speech.transcript}<|im_end|>\n")[3:-2])
            codes.append(self._sums(torch.from_numpy(frames.astype(np.int64))))
        said, spoken = torch.cat(words), torch.cat(codes)
        per_frame = self.facts["tts_model_type"] == "base" if speech.text_per_frame is None else speech.text_per_frame
        if not per_frame:
            whole = [said + self._codec(t["codec_pad_id"]), spoken + pad]
            return torch.cat([*start, *whole]), said[:0]
        padded = torch.cat([said, pad.expand(len(spoken), -1)])[: len(spoken)]
        return torch.cat([*start, padded + spoken]), said[len(spoken) :]

    def _sums(self, codes: Any) -> Any:
        """Summed embeddings of frames (n, books)."""
        total = self._codec(*codes[:, 0].tolist())
        for book in range(1, codes.shape[1]):
            table = self.weights[f"talker.code_predictor.model.codec_embedding.{book - 1}.weight"]
            total = total + table[codes[:, book]]
        return total

    def speak(
        self,
        speech: Speech,
        frames: int = FRAMES,
        vector: np.ndarray | None = None,
        recording: np.ndarray | None = None,
    ) -> np.ndarray:
        """Codes (frames - 1 at most, books): the frame of the last allowed code is not made. `vector` (hidden,) and
        `recording` (frames, books) are a clone's."""
        import torch

        t = self.talker_facts
        end = t["codec_eos_token_id"]
        pad = self._text("<tts_pad>")[0]
        rows, later = self.rows(speech, vector, recording)
        first: list[int] = []
        done: list[list[int]] = []
        with torch.no_grad():
            while True:
                hidden = self.talker(inputs_embeds=rows[None]).last_hidden_state[0, -1]
                logits = torch.nn.functional.linear(hidden, self.weights["talker.codec_head.weight"])
                seen = sorted(set(first))
                logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.05, logits[seen] * 1.05)
                banned = torch.arange(len(logits)) >= len(logits) - 1024
                banned[end] = len(first) < 2
                first.append(int(logits.masked_fill(banned, -torch.inf).argmax()))
                if first[-1] == end or len(first) == frames:
                    return np.array(done)
                done.append(self._frame(hidden, first[-1]))
                step = len(done) - 1
                text = later[step] if step < len(later) else pad
                rows = torch.cat([rows, self._sums(torch.tensor(done[-1:])) + text])

    def _frame(self, hidden: Any, first: int) -> list[int]:
        import torch
        import torch.nn.functional as F

        w, p = self.weights, "talker.code_predictor."
        codes, rows = [first], torch.stack([hidden, self._codec(first)[0]])
        for book in range(self.talker_facts["num_code_groups"] - 1):
            inputs = rows
            if f"{p}small_to_mtp_projection.weight" in w:
                names = (f"{p}small_to_mtp_projection.weight", f"{p}small_to_mtp_projection.bias")
                inputs = F.linear(rows, *(w[name] for name in names))
            last = self.predictor(inputs_embeds=inputs[None]).last_hidden_state[0, -1]
            codes.append(int(F.linear(last, w[f"{p}lm_head.{book}.weight"]).argmax()))
            rows = torch.cat([rows, w[f"{p}model.codec_embedding.{book}.weight"][codes[-1:]]])
        return codes
