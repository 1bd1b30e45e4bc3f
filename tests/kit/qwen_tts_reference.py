# SPDX-License-Identifier: Apache-2.0
"""qwen-tts itself, in an environment of its own: `python qwen_tts_reference.py CHECKPOINT JOBS.json OUT.npz`.

A job is the keyword arguments of one call, and `call`, the method: generate_custom_voice, generate_voice_design or
generate_voice_clone. For clones `ref_audio` names an .npy of 24 kHz samples. OUT has codes_N (frames, books), wave_N
(samples,), and of clones vector_N (hidden,) and frames_N (frames, books).

This file runs on qwen-tts's own transformers and imports nothing of this project.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

GREEDY = {"do_sample": False, "subtalker_dosample": False, "repetition_penalty": 1.05}
UNUSED = ("sox", "onnxruntime", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")
"""What only the 25 Hz codec needs."""


def load(folder: str) -> Any:
    for name in UNUSED:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules.setdefault(name, module)
    import torch
    from qwen_tts import Qwen3TTSModel  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    return Qwen3TTSModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def main(folder: str, jobs: str, out: str) -> None:
    model = load(folder)
    kept: list[np.ndarray] = []
    generate = model.model.generate

    def recording(*args: Any, **kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        kept.append(result[0][0].cpu().numpy())
        return result

    model.model.generate = recording
    found: dict[str, Any] = {}
    for number, job in enumerate(json.loads(Path(jobs).read_text(encoding="utf-8"))):
        call = job.pop("call")
        if "ref_audio" in job:
            audio = (np.load(job.pop("ref_audio")), 24_000)
            items = model.create_voice_clone_prompt(
                ref_audio=audio, ref_text=job.pop("ref_text", None), x_vector_only_mode=job.pop("x_vector_only_mode")
            )
            found[f"vector_{number}"] = items[0].ref_spk_embedding.numpy()
            if items[0].ref_code is not None:
                found[f"frames_{number}"] = items[0].ref_code.numpy()
            job["voice_clone_prompt"] = items
        waves, _ = getattr(model, call)(**(GREEDY | job))
        found |= {f"codes_{number}": kept.pop(), f"wave_{number}": waves[0]}
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
