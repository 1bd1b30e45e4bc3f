# SPDX-License-Identifier: Apache-2.0
"""Images, audio and video for the tiny omni checkpoint: as transformers, our requests and OpenAI's take them."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

import numpy as np

from tests.kit.omni_chats import FRAMES
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.generate import GenerateRequest, Message, Part, Sampling

TOKENS = 16
AUDIO_HZ = 16_000
VIDEO_FPS = 2.0
_RNG = np.random.default_rng(3)
IMAGES = [_RNG.integers(0, 255, (96, 64, 3), dtype=np.uint8), _RNG.integers(0, 255, (64, 128, 3), dtype=np.uint8)]
VIDEOS = [_RNG.integers(0, 255, (4, 64, 64, 3), dtype=np.uint8), _RNG.integers(0, 255, (6, 64, 96, 3), dtype=np.uint8)]


def _tone(samples: int, period: float) -> np.ndarray:
    """Samples that 16-bit files hold exactly."""
    return (np.round(9000 * np.sin(np.arange(samples) / period)) / 32768).astype(np.float32)


AUDIO = [_tone(2 * AUDIO_HZ, 20), _tone(AUDIO_HZ, 7), _tone(20_077, 13)]
"""The last one is no whole number of the encoder's windows."""

CASES: dict[str, list[str]] = {
    "image": ["image0", "what is this"],
    "audio": ["audio0", "what is this"],
    "video": ["video0", "what is this"],
    "two images": ["hello", "image0", "and", "image1"],
    "image and audio": ["image1", "audio1", "speech and images"],
    "audio, image, audio": ["audio0", "image0", "audio1", "go"],
    "audio of any length": ["audio2", "what is this"],
    "video with its audio": ["video1", "videoaudio0", "what is this"],
    "short audio in a video": ["hello", "video0", "videoaudio1", "and", "image0"],
}
"""Words, and names of things; videoaudio0 is AUDIO[0] as the audio of the video before it."""


def item(word: str) -> tuple[Any, Any]:
    """(kind, thing): of a word itself, or of what it names."""
    kind, place = word[:-1], word[-1]
    if not place.isdigit():
        return "text", word
    return kind, {"image": IMAGES, "audio": AUDIO, "videoaudio": AUDIO, "video": VIDEOS}[kind][int(place)]


def transformers_chat(case, fps: float = VIDEO_FPS):
    """(messages, keyword arguments of the processor)."""
    from PIL import Image

    content, media = [], {}
    for kind, thing in map(item, case):
        if kind != "videoaudio":
            content.append({"type": kind} | ({"text": thing} if kind == "text" else {}))
        if kind != "text":
            name = {"image": "images", "audio": "audio", "videoaudio": "audio", "video": "videos"}[kind]
            media.setdefault(name, []).append(Image.fromarray(thing) if kind == "image" else thing)
            media |= {"use_audio_in_video": True} if kind == "videoaudio" else {}
            media |= {"fps": fps} if kind == "video" else {}
    return [{"role": "user", "content": content}], media


def our_request(case, fps: float = VIDEO_FPS, **more):
    """(request, media tensors)."""
    parts, flat = [], {}
    for kind, thing in map(item, case):
        if kind == "text":
            parts.append(Part("text", thing))
            continue
        name = "audio" if kind == "videoaudio" else kind
        before = flat.setdefault(name, [])
        offset = sum(piece.size for piece in before)
        before.append(thing.reshape(-1))
        about = (
            {"sample_rate": AUDIO_HZ, "in_video": kind == "videoaudio"} if name == "audio" else {"shape": thing.shape}
        )
        about |= {"fps": fps} if kind == "video" else {}
        parts.append(Part(name, offset=offset, length=thing.size, **about))
    inputs = {kind: Tensor.of(kind, np.concatenate(pieces)) for kind, pieces in flat.items()}
    messages = (Message("user", tuple(parts)),)
    given: dict[str, Any] = {"sampling": Sampling(temperature=0.0, max_tokens=TOKENS)} | more
    return GenerateRequest(messages=messages, **given), inputs


def see(reference, case):
    """What transformers makes of a case."""
    messages, media = transformers_chat(case)
    return reference.see(messages, TOKENS, FRAMES, **media)


def _lossless(frames: np.ndarray) -> bytes:
    """A video file that holds the pixels as they are."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        track = out.add_stream("ffv1", rate=int(VIDEO_FPS))
        track.height, track.width, track.pix_fmt = frames.shape[1], frames.shape[2], "bgr0"
        for pixels in frames:
            out.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(track.encode(None))
    return file.getvalue()


def openai_content(case):
    """A case without audio in videos as the content of an OpenAI message; nothing is lost on the way."""
    from PIL import Image

    content = []
    for kind, thing in map(item, case):
        if kind == "text":
            content.append({"type": "text", "text": thing})
            continue
        file = io.BytesIO()
        if kind == "video":
            url = "data:video/x-matroska;base64," + base64.b64encode(_lossless(thing)).decode()
            content.append({"type": "video_url", "video_url": {"url": url}})
        elif kind == "image":
            Image.fromarray(thing).save(file, "PNG")
            url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
            content.append({"type": "image_url", "image_url": {"url": url}})
        else:
            with wave.open(file, "wb") as out:
                out.setparams((1, 2, AUDIO_HZ, 0, "NONE", ""))
                out.writeframes((thing * 32768).astype("<i2").tobytes())
            data = base64.b64encode(file.getvalue()).decode()
            content.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    return content
