# SPDX-License-Identifier: Apache-2.0
"""What the pieces of an output are: one struct per kind of output, the same from engine to client.

Samples and pixels travel beside a piece as tensors; a piece says what they are. Each kind can count what it delivers
(`usage`) and join the pieces of one output into one (`join`; None if there is none and an empty one would say nothing),
so that nothing between engine and client has to know the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import msgspec

PieceKind = Literal["text", "transcript", "audio", "words", "image"]


class FunctionCall(msgspec.Struct, frozen=True):
    """A complete function call. `arguments` is the text of a JSON object.

    id         made by the server
    name       of the function
    arguments  text of a JSON object
    """

    id: str
    name: str
    arguments: str


class Candidate(msgspec.Struct, frozen=True):
    """A token that was considered, and its log-probability.

    token_id  of the vocabulary
    token     its text
    logprob   natural logarithm of its probability
    """

    token_id: int
    token: str
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token that was chosen. `top` holds the most probable candidates, best first.

    token_id  of the chosen token
    token     its text
    logprob   natural logarithm of its probability
    top       the most probable candidates, best first
    """

    token_id: int
    token: str
    logprob: float
    top: tuple[Candidate, ...] = ()


class WordTime(msgspec.Struct, frozen=True):
    """A spoken word and when it was said, in seconds of all the audio.

    word     its text
    start_s  start, in seconds of all the audio
    end_s    end, in seconds of all the audio
    """

    word: str
    start_s: float
    end_s: float


class PieceBase(msgspec.Struct, frozen=True):
    """What all kinds of pieces have in common."""

    kind: ClassVar[PieceKind] = "text"
    """Name of the output; also the piece's tag and the event's type."""

    @property
    def playback_s(self) -> float:
        """Seconds of audio that this piece plays."""
        return 0.0

    @property
    def is_preview(self) -> bool:
        """True for a piece that a later one replaces: it does not belong to the joined output."""
        return False

    def usage(self) -> Mapping[str, float]:
        """What this piece delivers, by the names of the usage counts."""
        return {}


class TextPiece(PieceBase, frozen=True, omit_defaults=True, tag="text"):
    """New text of a language model, and the tokens it was decoded from.

    text        what is new; also in `text_output`
    token_ids   tokens it was decoded from
    logprobs    one per token, if the request asked for them
    tool_calls  function calls that are complete now
    prompt_tokens  tokens of the prompt; with the first piece, so that an answer cut short has counted them
    """

    kind: ClassVar[PieceKind] = "text"

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[FunctionCall, ...] = ()
    prompt_tokens: int = 0

    def usage(self) -> Mapping[str, float]:
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.token_ids)}
        return {name: count for name, count in counts.items() if count}

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self:
        return cls(
            "".join(piece.text for piece in pieces),
            tuple(token for piece in pieces for token in piece.token_ids),
            tuple(entry for piece in pieces for entry in piece.logprobs),
            tuple(call for piece in pieces for call in piece.tool_calls),
            sum(piece.prompt_tokens for piece in pieces),
        )


class AudioPiece(PieceBase, frozen=True, tag="audio"):
    """Audio that follows on the piece before. The tensor `audio` is float32 [samples], mono, in -1..1.

    sample_rate  samples per second
    samples      number of samples in the tensor `audio`
    """

    kind: ClassVar[PieceKind] = "audio"

    sample_rate: int
    samples: int

    @property
    def playback_s(self) -> float:
        return self.samples / self.sample_rate if self.sample_rate else 0.0

    def usage(self) -> Mapping[str, float]:
        return {"audio_samples": self.samples}

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self | None:
        return cls(pieces[0].sample_rate, sum(piece.samples for piece in pieces)) if pieces else None


class ImagePiece(PieceBase, frozen=True, tag="image"):
    """One image, or a preview of it. The tensor `image` is uint8 [height, width, 3], RGB.

    index                   which image of the request, from 0
    partial                 a preview, which a later image replaces
    partial_image_index     counts the previews of one image from 0
    preview                 `fast` if the preview is approximate
    step                    denoising steps done
    steps                   denoising steps in all
    seed                    the seed that gives this image again
    cfg_applied             classifier-free guidance was used
    guidance_scale_applied  false: a guidance scale was sent and the model has no use for it
    lora                    adapter that the request chose
    step_cache              steps were cached, as the request chose
    """

    kind: ClassVar[PieceKind] = "image"

    index: int = 0
    partial: bool = False
    partial_image_index: int | None = None
    preview: str = ""
    step: int = 0
    steps: int = 0
    seed: int | None = None
    cfg_applied: bool = False
    guidance_scale_applied: bool | None = None
    lora: str = ""
    step_cache: bool = False

    @property
    def is_preview(self) -> bool:
        return self.partial

    def usage(self) -> Mapping[str, float]:
        return {} if self.partial else {"images": 1}

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self | None:
        return pieces[-1] if pieces else None


class SegmentDecoding(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a segment was decoded: fields of the segments of OpenAI's verbose_json.

    seek               where the decoded window begins, in hundredths of a second of all the audio
    tokens             ids of the text
    temperature        of sampling; 0 is greedy
    avg_logprob        mean log-probability of the window's tokens
    compression_ratio  of the window's text by zlib; repeats make it high
    no_speech_prob     probability that the window has no speech
    """

    seek: int = 0
    tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0


class TranscriptPiece(PieceBase, frozen=True, tag="transcript"):
    """A segment of transcribed audio, in seconds of all the audio.

    text      of the segment; also in `text_output`
    start_s   start, in seconds of all the audio
    end_s     end, in seconds of all the audio
    language  of the audio
    words     only with `transcription.word_timestamps`
    part      number of the audio part, for a consumer stage that takes the transcripts of the parts one by one
    decoding  how the segment was decoded, see `SegmentDecoding`
    """

    kind: ClassVar[PieceKind] = "transcript"

    text: str = ""
    start_s: float = 0.0
    end_s: float = 0.0
    language: str = ""
    words: tuple[WordTime, ...] = ()
    part: int = 0
    decoding: SegmentDecoding = SegmentDecoding()

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self:
        if not pieces:
            return cls()
        return cls(
            "".join(piece.text for piece in pieces), pieces[0].start_s, pieces[-1].end_s, pieces[-1].language,
            tuple(word for piece in pieces for word in piece.words),
        )  # fmt: skip


class WordsPiece(PieceBase, frozen=True, tag="words"):
    """When words of the audio output are said. Words come in their order, no later than the audio that they describe
    where the pipeline knows them early, else behind it.

    words  as written, with times in seconds of all the audio output; no two overlap
    """

    kind: ClassVar[PieceKind] = "words"

    words: tuple[WordTime, ...] = ()

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self:
        return cls(tuple(word for piece in pieces for word in piece.words))


OutputPiece = TextPiece | AudioPiece | ImagePiece | TranscriptPiece | WordsPiece
JOIN: Mapping[str, Callable[[Sequence[Any]], OutputPiece | None]] = {
    kind.kind: kind.join for kind in (TextPiece, TranscriptPiece, AudioPiece, WordsPiece, ImagePiece)
}
"""Output → how its pieces become one."""
