# SPDX-License-Identifier: Apache-2.0
"""`Omni`: a server in a notebook. It is found on this machine, or started and ended with the `with` body.

    from triton_omni import Omni

    with Omni("chat") as omni:
        print(omni.chat("What is the capital of France?"))
        omni.speak("Hello there.").save("hello.wav")
        omni.draw("a seven").save("seven.png")

Each method has a twin for async code: `achat`, `aspeak`, `adraw`. Cancelling it cancels the request.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import importlib
import io
import os
import sys
import tempfile
import wave
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from triton_omni.backends.supervisor.errors import SetupError
from triton_omni.backends.supervisor.serve import run_folder
from triton_omni.backends.supervisor.serve.temporary import temporary_server
from triton_omni.backends.wire import (
    Event,
    GenerateRequest,
    ImageParams,
    ImagePiece,
    Message,
    OmniError,
    Part,
    Sampling,
    SpeechParams,
)
from triton_omni.data_urls import is_data_url
from triton_omni.fetch import is_any, read_url
from triton_omni.media import Media
from triton_omni.sync import Client

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from PIL.Image import Image

    from triton_omni.openai.backend import Backend
    from triton_omni.pieces import Piece

T = TypeVar("T")
DEFAULT_ADDRESS = "127.0.0.1:8001"
START_TIMEOUT_S = 900.0
BAR_CHARS = 24


@dataclass(frozen=True)
class SpokenAudio:
    """Spoken audio; a notebook shows a player.

    samples  (samples,) float32, mono, in -1..1
    rate_hz  samples per second
    """

    samples: np.ndarray
    rate_hz: int

    @property
    def seconds(self) -> float:
        """Length of the audio."""
        return len(self.samples) / self.rate_hz if self.rate_hz else 0.0

    def wav(self) -> bytes:
        """The audio as a 16-bit WAV file."""
        sink = io.BytesIO()
        with wave.open(sink, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(self.rate_hz or 1)
            file.writeframes(np.rint(self.samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
        return sink.getvalue()

    def save(self, path: str | Path) -> None:
        """Write a WAV file."""
        Path(path).write_bytes(self.wav())

    def _repr_html_(self) -> str:
        """IPython's player, without IPython."""
        return f'<audio controls src="data:audio/wav;base64,{base64.b64encode(self.wav()).decode()}"></audio>'


@dataclass(frozen=True)
class Answer:
    """An answer of a chat; `speech` if it was asked for."""

    text: str
    finish_reason: str
    usage: dict[str, float]
    speech: SpokenAudio | None = None

    def __str__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return self.text


@dataclass(frozen=True)
class DrawStep:
    """How far an image is; `preview` is what it looks like, if previews were asked for and one has just been made."""

    done: float
    total: float
    preview: Image | None = None


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of `Omni.chat`.

    images, audio   files, URLs or bytes that belong to the prompt
    system          system message; of the first prompt only
    speak, voice    also make speech
    on_text         called with each piece of text as it arrives, e.g. `print`
    max_tokens, temperature, seed   how tokens are chosen
    """

    images: Sequence[str | Path | bytes] = ()
    audio: Sequence[str | Path | bytes] = ()
    system: str = ""
    speak: bool = False
    voice: str | None = None
    on_text: Callable[[str], object] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None


def show_step(step: DrawStep) -> None:
    """A progress bar: in a notebook with the preview, else on a terminal; nowhere else."""
    if (display := _notebook_display()) is not None:
        display(step)
    elif sys.stderr.isatty():
        full = round(BAR_CHARS * step.done / step.total) if step.total else 0
        end = "\n" if step.done >= step.total > 0 else ""
        print(f"\r[{'#' * full:{BAR_CHARS}}] {step.done:g}/{step.total:g}", end=end, file=sys.stderr, flush=True)  # noqa: T201


def _notebook_display() -> Callable[[DrawStep], None] | None:
    """Shows a step in the running notebook; None outside of one."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    page: Any = importlib.import_module("IPython.display")

    def show(step: DrawStep) -> None:
        page.clear_output(wait=True)
        page.display(page.HTML(f'<progress max="{step.total:g}" value="{step.done:g}"></progress>'))
        if step.preview is not None:
            page.display(step.preview)

    return show


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    """Options of `Omni.draw`.

    size           (width, height) in pixels
    steps          denoising steps
    seed           of the noise
    preview_every  also make a fast preview after every N steps
    on_step        called with each DrawStep; by default a progress bar
    """

    size: tuple[int, int] | None = None
    steps: int | None = None
    seed: int | None = None
    preview_every: int = 0
    on_step: Callable[[DrawStep], object] = show_step


class Omni:
    """A chat model, and the models beside it, of one server. Methods may be called from any thread, one at a time.

    model          answers `chat` and `speak`
    image_model    answers `draw`
    address        host:port of Triton's gRPC service; "": a server of this user on this machine that has `model`, else
                   one at 127.0.0.1:8001, else a new one
    serve_options  of `triton-omni serve`, for a server that is started: `("--deploy", "my.yaml")`
    history        the chat so far
    Raises OmniError where a given address does not answer, SetupError where no server could be started.
    """

    def __init__(
        self,
        model: str = "chat",
        *,
        image_model: str = "image",
        address: str = "",
        serve_options: Sequence[str] = (),
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.model = model
        self.image_model = image_model
        self.history: list[Message] = []
        self.has_started = False
        self._stack = ExitStack()
        try:
            self.address = address or _find(model) or self._start(serve_options, start_timeout_s)
            self._client = self._stack.enter_context(Client(self.address))
            if address and not self._client.is_live():
                raise _unavailable(f"no server answers at {address}")
        except BaseException:
            self._stack.close()
            raise
        atexit.register(self.close)

    def _start(self, options: Sequence[str], timeout_s: float) -> str:
        """Start a server that ends with this object; returns its address."""
        facts = self._stack.enter_context(_server(options, timeout_s))
        self.has_started = True
        return f"{facts['host']}:{facts['grpc_port']}"

    def close(self) -> None:
        """End the connection, and the server if this object has started it."""
        atexit.unregister(self.close)
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- chat ----------------------------------------------------------------------------------------------------
    def chat(self, prompt: str, **options: Any) -> Answer:
        """Ask, after all that was said before; `history` grows by the prompt and the answer.

        options  fields of ChatOptions
        Raises OmniError or MediaError; then the history is as before.
        """
        return self._client.run(self._chat(prompt, ChatOptions(**options)))

    async def achat(self, prompt: str, **options: Any) -> Answer:
        """As `chat`, for async code."""
        return await self._awaited(self._chat(prompt, ChatOptions(**options)))

    async def _chat(self, prompt: str, options: ChatOptions) -> Answer:
        media = Media()
        parts = [media.image(await _content(source)) for source in options.images]
        parts += [media.audio(await _content(source)) for source in options.audio]
        asked = Message("user", (*parts, Part("text", prompt)) if parts else prompt)
        start = self.history or ([Message("system", options.system)] if options.system else [])
        request = GenerateRequest(
            messages=(*start, asked),
            modalities=("text", "audio") if options.speak else ("text",),
            speech=SpeechParams(options.voice),
            sampling=Sampling(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed),
        )
        pieces = self._client.connection.generate(self.model, request, media=media.tensors)
        answer = await _answer(pieces, options.on_text, speak=options.speak)
        # media are of their own request: what the model read in them is in the answer
        self.history = [*start, Message("user", prompt), Message("assistant", answer.text)]
        return answer

    # --- speech --------------------------------------------------------------------------------------------------
    def speak(self, text: str, *, voice: str | None = None, speed: float = 1.0) -> SpokenAudio:
        """Speak a text. Raises OmniError."""
        return self._client.run(self._speak(text, voice, speed))

    async def aspeak(self, text: str, *, voice: str | None = None, speed: float = 1.0) -> SpokenAudio:
        """As `speak`, for async code."""
        return await self._awaited(self._speak(text, voice, speed))

    async def _speak(self, text: str, voice: str | None, speed: float) -> SpokenAudio:
        request = GenerateRequest(operation="speech", input=text, speech=SpeechParams(voice, speed=speed))
        answer = await _answer(self._client.connection.generate(self.model, request), None, speak=True)
        assert answer.speech is not None, "it was asked for"
        return answer.speech

    # --- images --------------------------------------------------------------------------------------------------
    def draw(self, prompt: str, **options: Any) -> Image:
        """Draw an image.

        options  fields of DrawOptions
        Raises OmniError.
        """
        return self._client.run(_draw(self._client.connection, self.image_model, prompt, DrawOptions(**options)))

    async def adraw(self, prompt: str, **options: Any) -> Image:
        """As `draw`, for async code; `on_step` is called from another thread."""
        return await self._awaited(_draw(self._client.connection, self.image_model, prompt, DrawOptions(**options)))

    async def _awaited(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._client.submit(work))


async def _draw(client: Backend, model: str, prompt: str, options: DrawOptions) -> Image:
    from PIL.Image import fromarray

    width, height = options.size or (None, None)
    params = ImageParams(width, height, options.steps, seed=options.seed, preview_every=options.preview_every)
    on_step = options.on_step
    drawn: Image | None = None
    step = DrawStep(0, options.steps or 0)
    request = GenerateRequest(operation="image", input=prompt, image=params)
    async with aclosing(client.generate(model, request)) as pieces:
        async for piece in pieces:
            progress, about = piece.event.progress, piece.event.piece
            if progress is not None:
                step = DrawStep(progress.done, progress.total)
                on_step(step)
            elif piece.image is not None and isinstance(about, ImagePiece):
                image = fromarray(piece.image)
                if about.partial:
                    on_step(DrawStep(about.step or step.done, about.steps or step.total, image))
                else:
                    drawn = image
    if drawn is None:
        raise _unavailable(f"the model '{model}' made no image")
    return drawn


async def _answer(
    pieces: AsyncGenerator[Piece, None], on_text: Callable[[str], object] | None, *, speak: bool
) -> Answer:
    """All pieces as one answer."""
    text: list[str] = []
    samples: list[np.ndarray] = []
    rate_hz = 0
    end = Event("end")
    async with aclosing(pieces):
        async for piece in pieces:
            if piece.text:
                text.append(piece.text)
                if on_text is not None:
                    on_text(piece.text)
            if piece.audio is not None:
                samples.append(piece.audio)
                rate_hz = piece.sample_rate_hz
            end = piece.event
    speech = SpokenAudio(np.concatenate([np.zeros(0, np.float32), *samples]), rate_hz) if speak else None
    return Answer("".join(text), end.finish_reason, end.usage, speech)


async def _content(source: str | Path | bytes) -> bytes:
    """The bytes of a file or URL. Raises OSError or MediaError."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and _is_url(source):
        return await read_url(source, is_any)
    return await asyncio.to_thread(_read, source)


def _is_url(source: str) -> bool:
    return "://" in source or is_data_url(source)


def _read(path: str | Path) -> bytes:
    return Path(path).read_bytes()


def _find(model: str) -> str:
    """The address of a server on this machine that has the model; "" if there is none."""
    facts = [run_folder.read_json(run.path / run_folder.FACTS_FILE) for run in run_folder.all_runs()]
    found = [f"{fact['host']}:{fact['grpc_port']}" for fact in facts if fact is not None]
    return next((address for address in dict.fromkeys([*found, DEFAULT_ADDRESS]) if _has(address, model)), "")


def _has(address: str, model: str) -> bool:
    try:
        with Client(address) as client:
            return client.is_live() and client.is_public(model)
    except OmniError:
        return False


@contextmanager
def _server(options: Sequence[str], timeout_s: float) -> Generator[dict[str, Any]]:
    """A server of our own; its output is kept if it does not start."""
    descriptor, log = tempfile.mkstemp(prefix="triton-omni-", suffix=".log")
    try:
        with temporary_server(["--no-proxy", *options], descriptor, timeout_s) as facts:
            yield facts
    except SetupError as error:
        raise SetupError(error.message, hint=f"read {log}") from None
    finally:
        os.close(descriptor)
        if not isinstance(sys.exception(), SetupError):
            Path(log).unlink()


def _unavailable(message: str) -> OmniError:
    from triton_omni.backends.wire import from_line

    return from_line(f"[unavailable] {message}")
