# SPDX-License-Identifier: Apache-2.0
"""Reads a CTranslate2 `model.bin` and names Whisper's weights as transformers does.

The file: version, name and revision of the model's kind, then variables (name, shape, type, bytes), then aliases.
Integers are little-endian; a text has its length (16 bits, a closing zero counted) in front.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VERSION = 6
TYPES = {0: np.dtype("<f4"), 1: np.dtype("i1"), 2: np.dtype("<i2"), 3: np.dtype("<i4"), 4: np.dtype("<f2")}


class FormatError(ValueError):
    """The file is not what this reader knows."""


def read_variables(path: Path) -> dict[str, np.ndarray]:
    """The variables of a model file by name; aliases stand beside what they mean."""
    cursor = _Cursor(path.read_bytes())
    version = cursor.integer("<I")
    if version != VERSION:
        raise FormatError(f"{path}: format version {version}; this reader knows {VERSION}")
    kind = cursor.text()
    if kind != "WhisperSpec":
        raise FormatError(f"{path}: a model of kind {kind}, not WhisperSpec")
    cursor.integer("<I")  # the kind's revision
    variables: dict[str, np.ndarray] = {}
    for _ in range(cursor.integer("<I")):
        name = cursor.text()
        shape = tuple(cursor.integer("<I") for _ in range(cursor.integer("<B")))
        type_id = cursor.integer("<B")
        if type_id not in TYPES:
            raise FormatError(f"{path}: variable {name} has the unknown type {type_id}")
        raw = cursor.take(cursor.integer("<I"))
        variables[name] = np.frombuffer(raw, TYPES[type_id]).reshape(shape)
    for _ in range(cursor.integer("<I")):
        alias, name = cursor.text(), cursor.text()
        variables[alias] = variables[name]
    return variables


@dataclass(slots=True)
class _Cursor:
    data: bytes
    at: int = 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise FormatError("the file ends too early")
        self.at += size
        return self.data[self.at - size : self.at]

    def integer(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.integer("<H")).rstrip(b"\0").decode("utf-8")


def whisper_state(variables: Mapping[str, np.ndarray], layers: int) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of transformers' WhisperForConditionalGeneration (`layers` in encoder and decoder each)."""
    for name in ("conv1", "conv2"):
        yield from _pair(variables, f"encoder/{name}", f"model.encoder.{name}")
    yield "model.encoder.embed_positions.weight", variables["encoder/position_encodings/encodings"]
    yield "model.decoder.embed_positions.weight", variables["decoder/position_encodings/encodings"]
    yield "model.decoder.embed_tokens.weight", variables["decoder/embeddings/weight"]
    for half in ("encoder", "decoder"):
        yield from _norm(variables, f"{half}/layer_norm", f"model.{half}.layer_norm")
        for index in range(layers):
            ours, theirs = f"{half}/layer_{index}", f"model.{half}.layers.{index}"
            yield from _self_attention(variables, f"{ours}/self_attention", theirs)
            if half == "decoder":
                yield from _cross_attention(variables, f"{ours}/attention", theirs)
            yield from _norm(variables, f"{ours}/ffn/layer_norm", f"{theirs}.final_layer_norm")
            yield from _pair(variables, f"{ours}/ffn/linear_0", f"{theirs}.fc1")
            yield from _pair(variables, f"{ours}/ffn/linear_1", f"{theirs}.fc2")


def _pair(variables: Mapping[str, np.ndarray], ours: str, theirs: str) -> Iterator[tuple[str, np.ndarray]]:
    for part in ("weight", "bias"):
        yield f"{theirs}.{part}", variables[f"{ours}/{part}"]


def _norm(variables: Mapping[str, np.ndarray], ours: str, theirs: str) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{theirs}.weight", variables[f"{ours}/gamma"]
    yield f"{theirs}.bias", variables[f"{ours}/beta"]


def _split(variables: Mapping[str, np.ndarray], ours: str, theirs: str, names: str) -> Iterator[tuple[str, np.ndarray]]:
    """One fused projection as its parts, `names` being letters of q, k, v. Whisper's key has no bias."""
    weights = np.split(variables[f"{ours}/weight"], len(names))
    biases = np.split(variables[f"{ours}/bias"], len(names))
    for name, weight, bias in zip(names, weights, biases, strict=True):
        yield f"{theirs}.{name}_proj.weight", weight
        if name != "k":
            yield f"{theirs}.{name}_proj.bias", bias


def _self_attention(variables: Mapping[str, np.ndarray], ours: str, layer: str) -> Iterator[tuple[str, np.ndarray]]:
    yield from _norm(variables, f"{ours}/layer_norm", f"{layer}.self_attn_layer_norm")
    yield from _split(variables, f"{ours}/linear_0", f"{layer}.self_attn", "qkv")
    yield from _pair(variables, f"{ours}/linear_1", f"{layer}.self_attn.out_proj")


def _cross_attention(variables: Mapping[str, np.ndarray], ours: str, layer: str) -> Iterator[tuple[str, np.ndarray]]:
    yield from _norm(variables, f"{ours}/layer_norm", f"{layer}.encoder_attn_layer_norm")
    yield from _split(variables, f"{ours}/linear_0", f"{layer}.encoder_attn", "q")
    yield from _split(variables, f"{ours}/linear_1", f"{layer}.encoder_attn", "kv")
    yield from _pair(variables, f"{ours}/linear_2", f"{layer}.encoder_attn.out_proj")
