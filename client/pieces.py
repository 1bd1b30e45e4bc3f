# SPDX-License-Identifier: Apache-2.0
"""One response of a public model as a value, and requests as Triton inputs."""

# tritonclient has no types
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from tritonclient.grpc import InferInput, InferResult

from triton_omni.backends import wire
from triton_omni.backends.wire import AudioPiece, Event, GenerateRequest

FINAL = "triton_final_response"
NO_MEDIA: Mapping[str, np.ndarray] = {}
_MEDIA_TYPES = {wire.AUDIO: (np.float32, "FP32"), wire.IMAGE: (np.uint8, "UINT8"), wire.VIDEO: (np.uint8, "UINT8")}


@dataclass(frozen=True, slots=True)
class Piece:
    """An event, and the text, samples or pixels that it is about.

    audio  (samples,) float32, mono, at `sample_rate_hz`
    image  (height, width, 3) uint8; with stream=false several images of one size are stacked along the height
    """

    event: Event
    text: str | None = None
    audio: np.ndarray | None = None
    image: np.ndarray | None = None

    @property
    def sample_rate_hz(self) -> int:
        """Of `audio`; 0 for a piece without."""
        piece = self.event.piece or self.event.joined.get(wire.AUDIO)
        return piece.sample_rate if isinstance(piece, AudioPiece) else 0

    @property
    def is_preview(self) -> bool:
        """True for an image that a later one replaces."""
        return self.event.piece is not None and self.event.piece.is_preview


def inputs_of(request: GenerateRequest, media: Mapping[str, np.ndarray]) -> list[InferInput]:
    """A request and its media as inputs of the public model. Raises ValueError for media of a wrong type."""
    request = msgspec.structs.replace(request, version=wire.WIRE_VERSION)
    inputs = [_input(wire.REQUEST, np.array([wire.encode_request(request)], dtype=np.object_), "BYTES")]
    for name, data in media.items():
        if name not in _MEDIA_TYPES:
            raise ValueError(f"media must be {', '.join(_MEDIA_TYPES)}, not {name}")
        dtype, datatype = _MEDIA_TYPES[name]
        if data.dtype != dtype or (name == wire.AUDIO and data.ndim != 1):
            raise ValueError(f"{name} must be {np.dtype(dtype)}, audio of one dimension, not {data.dtype} {data.shape}")
        inputs.append(_input(name, data.reshape(-1), datatype))
    return inputs


def piece_of(result: InferResult) -> Piece:
    """Response as a Piece. Raises msgspec.ValidationError if its event is invalid."""
    event = result.as_numpy(wire.EVENT)
    if event is None:
        return Piece(Event("end", outcome="completed"))  # an empty final response
    text = result.as_numpy(wire.TEXT_OUTPUT)
    return Piece(
        wire.decode_event(event.reshape(-1)[0]),
        None if text is None else text.reshape(-1)[0].decode("utf-8"),
        result.as_numpy(wire.AUDIO),
        result.as_numpy(wire.IMAGE),
    )


def is_final(result: InferResult) -> bool:
    """True for the last response of a request."""
    return bool(result.get_response().parameters[FINAL].bool_param)  # pyright: ignore[reportAttributeAccessIssue]


def _input(name: str, data: np.ndarray, datatype: str) -> InferInput:
    tensor = InferInput(name, list(data.shape), datatype)
    tensor.set_data_from_numpy(data)
    return tensor
