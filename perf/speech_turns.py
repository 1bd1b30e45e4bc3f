# SPDX-License-Identifier: Apache-2.0
"""How much later the audio of a short text starts because a long one is being spoken: `python -m perf.speech_turns`.

Talker and code2wav of `chat` in one process, in turns. The short request arrives as a phrase of the long one begins,
which is the worst moment; alone and beside it alternate in the same run.
"""

from __future__ import annotations

import statistics
import time

from tests.kit import engine_driver as drive
from triton_omni.backends.codec.engine import CodecEngine, CodecOptions
from triton_omni.backends.config.paths import models_dir
from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.engine import EngineChunk, EngineFinished, EngineOutput, Run
from triton_omni.backends.core.generate import GenerateRequest, SpeechParams
from triton_omni.backends.pipelines.chat.code2wav import HibariDecoder
from triton_omni.backends.pipelines.chat.rvq import Codebooks
from triton_omni.backends.pipelines.chat.talker import TalkerEngine
from triton_omni.backends.pipelines.chat.voice import Voice

SHORT = "Hello there, how are you today?"
LONG = {
    "4,096 digits at speed 0.25": ("1234567890" * 410, 0.25),
    "digits at speed 1": ("12345678 " * 400, 1.0),
    "sentences": ("The quick brown fox jumps over the lazy dog and runs away from the bear in the north. " * 40, 1.0),
}
ROUNDS = 9


class Chain:
    """Both engines; every turn steps each once."""

    def __init__(self, voice: Voice, codebooks: Codebooks) -> None:
        self.talker = TalkerEngine("talker", voice, codebooks)
        self.codec = CodecEngine("code2wav", HibariDecoder(codebooks), CodecOptions())
        self.runs: dict[Run, Run] = {}

    def open(self, text: str, speed: float = 1.0) -> Run:
        run = drive.new_run(GenerateRequest("speech", input=text, speech=SpeechParams(speed=speed)))
        decoded = drive.new_run(upstream=("talker",))
        self.talker.open(run)
        self.codec.open(decoded)
        self.runs[run] = decoded
        return decoded

    def close(self) -> None:
        self.talker.close()
        self.codec.close()

    def turn(self) -> set[Run]:
        """Runs of code2wav that gave audio."""
        for event in self.talker.step():
            decoded = self.runs[event.run]
            if isinstance(event, EngineChunk):
                event.run.blocked = not self.codec.feed(decoded, Chunk(b"", "talker", tensors=event.tensors), False)
            elif isinstance(event, EngineFinished):
                self.codec.feed(decoded, Chunk(b"", "talker", last=True), True)
        return {event.run for event in self.codec.step() if isinstance(event, EngineOutput)}


def first_audio_ms(chain: Chain, beside: bool) -> float:
    """Ms from the arrival of the short request to its first audio."""
    began = time.perf_counter()
    if beside:
        chain.turn()  # the long request's phrase during which it arrives
    short = chain.open(SHORT)
    for _ in range(1000):
        if short in chain.turn():
            return (time.perf_counter() - began) * 1e3
    raise AssertionError("the short request never had audio")


def main() -> None:
    voice, codebooks = Voice(), Codebooks.load(models_dir() / "hibari-rvq")
    print("| long request | alone ms | beside it ms | ratio | worst |\n|---|---|---|---|---|")
    first_audio_ms(Chain(voice, codebooks), False)
    for name, (text, speed) in LONG.items():
        alone, beside = [], []
        for _ in range(ROUNDS):
            chain = Chain(voice, codebooks)
            alone.append(first_audio_ms(chain, False))
            chain.close()
            chain = Chain(voice, codebooks)
            chain.open(text, speed)
            chain.turn()
            beside.append(first_audio_ms(chain, True))
            chain.close()
        a, b = statistics.median(alone), statistics.median(beside)
        print(f"| {name} | {a:.0f} | {b:.0f} | {b / a:.2f} | {max(beside) / a:.2f} |", flush=True)


if __name__ == "__main__":
    main()
