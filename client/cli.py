# SPDX-License-Identifier: Apache-2.0
"""Serve omni-modal models with Triton, and talk to a server: text, speech, transcripts and images."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from triton_omni.backends.supervisor import command as server

if TYPE_CHECKING:
    from triton_omni.backends.supervisor.command import Commands

DEFAULT_TRITON = "127.0.0.1:8001"
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
TRANSCRIPT_FORMATS = ("text", "srt", "vtt", "json")
EXITS = "Exit status: 0 done, 1 failed (one line on stderr says why), 2 wrong usage, 130 interrupted."


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(given)
    if options.command == "key":
        return _new_key(options.id)
    if options.command in server.COMMANDS and not (options.command == "doctor" and options.no_setup):
        code = server.run(options, given)
        if options.command != "doctor" or options.deploy or options.health:
            return code
        return _ask_server(options) or code
    return _ask_server(options)


def _ask_server(options: argparse.Namespace) -> int:
    """Run a command that needs a running server, and the packages of `triton-omni[client]`."""
    from triton_omni import ask, top
    from triton_omni.backends.wire import OmniError
    from triton_omni.media import MediaError
    from triton_omni.sync import Client

    commands: dict[str, Callable[[Client, argparse.Namespace, ask.Show], int]] = {
        "chat": ask.chat,
        "speak": ask.speak,
        "transcribe": ask.transcribe,
        "draw": ask.draw,
        "edit": ask.edit,
        "doctor": top.doctor,
        "top": top.top,
    }
    try:
        with Client(options.triton, key=_operator_key(options)) as client:
            return commands[options.command](client, options, show)
    except OmniError as error:
        return _failed(error.line())
    except MediaError as error:
        return _failed(str(error))
    except BrokenPipeError:  # the reader has gone; the interpreter must not try to write the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        return 130


def _new_key(key_id: str) -> int:
    """Print a new API key of the proxy, and its entry for the file of keys."""
    import msgspec

    from triton_omni.openai.http.access import new_key

    key, entry = new_key(key_id)
    show(f"key    {key}\nentry  {msgspec.json.encode(entry).decode()}\n")
    return 0


def _operator_key(options: argparse.Namespace) -> str:
    """The operator's key of the server: from the given file, else from a server of this user on this machine."""
    return options.key_file.read_text().strip() if options.key_file else server.local_key(options.triton)


def _failed(reason: str) -> int:
    print(f"triton-omni: {reason}", file=sys.stderr)
    return 1


def show(text: str) -> None:
    """Print text at once and without a newline."""
    print(text, end="", flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="triton-omni", description=__doc__, epilog=EXITS)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    server.add_commands(commands)
    _add_chat(_command(commands, "chat", "chat with a model; without a prompt: line by line until Ctrl-D"))
    _add_speak(_command(commands, "speak", "speak a text into a WAV file"))
    _add_transcribe(_command(commands, "transcribe", "transcribe the speech of an audio or video file"))

    draw = _command(commands, "draw", "generate an image into a file")
    draw.add_argument("prompt", help="what to draw")
    _add_model(draw, "image")
    _add_image(draw)

    edit = _command(commands, "edit", "edit an image as a prompt says")
    edit.add_argument("image", help="a file or URL")
    edit.add_argument("prompt", help="what to change")
    edit.add_argument("--mask", metavar="PNG", help="transparent where the image may change")
    edit.add_argument("--model", required=True, metavar="NAME", help="pipeline to ask, one with the operation `edit`")
    _add_image(edit)

    doctor = commands.choices["doctor"]
    _add_triton(doctor)
    _add_metrics(doctor)

    keys = commands.add_parser("key", help="API keys of the proxy").add_subparsers(required=True, metavar="COMMAND")
    keys.add_parser("new", help="print a new key and its entry for --api-keys").add_argument("id", help="its name")

    view = _command(commands, "top", "live view of a running server")
    _add_metrics(view)
    view.add_argument("--model", action="append", default=[], help="pipelines to show (default: all)")
    view.add_argument("--request", default="", metavar="ID", help="waterfall of ended requests with this id instead")
    view.add_argument("--every-s", type=float, default=1.0)
    view.add_argument("--once", action="store_true", help="one view instead of one after the other until Ctrl-C")
    view.add_argument("--json", action="store_true", help="a view is one JSON object on a line")
    return top


def _add_chat(chat: argparse.ArgumentParser) -> None:
    chat.add_argument("prompt", nargs="?", help="ask this one thing")
    _add_model(chat, "chat")
    chat.add_argument("--system", default="", metavar="TEXT", help="system message")
    for kind in ("image", "audio", "video"):
        about = f"{kind} for the first prompt, file or URL; may be repeated"
        chat.add_argument(f"--{kind}", action="append", default=[], metavar="FILE", help=about)
    chat.add_argument("--speak", type=Path, metavar="WAV", help="also request speech, written to this file")
    chat.add_argument("--voice", metavar="NAME", help="voice of the speech")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    chat.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest tokens; up to 2: more varied")
    chat.add_argument("--seed", type=int, metavar="N", help="seed of the sampling")


def _add_speak(speak: argparse.ArgumentParser) -> None:
    speak.add_argument("text", help="what to say")
    default = Path("speech.wav")
    speak.add_argument("out", nargs="?", type=Path, default=default, metavar="WAV", help="file (%(default)s)")
    _add_model(speak, "chat")
    speak.add_argument("--voice", metavar="NAME", help="one of the model's voices")
    speak.add_argument("--speed", type=float, default=1.0, metavar="S", help="0.25 to 4 (%(default)s)")


def _add_transcribe(transcribe: argparse.ArgumentParser) -> None:
    transcribe.add_argument("source", metavar="FILE", help="a file or URL")
    _add_model(transcribe, "chat")
    transcribe.add_argument(
        "--format", choices=TRANSCRIPT_FORMATS, default="text", help="of the transcript (%(default)s)"
    )
    transcribe.add_argument("--words", action="store_true", help="with --format json: also the times of single words")


def _add_model(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument("--model", default=name, metavar="NAME", help="pipeline to ask (%(default)s)")


def _add_image(command: argparse.ArgumentParser) -> None:
    out = Path("image.png")
    command.add_argument("--out", type=_image_file, default=out, metavar="FILE", help="png, jpg or webp (%(default)s)")
    command.add_argument("--size", type=_size, metavar="WxH", help="in pixels, e.g. 512x256 (default: the model's)")
    command.add_argument("--steps", type=int, metavar="N", help="denoising steps; more are slower and finer")
    command.add_argument("--seed", type=int, metavar="N", help="seed of the noise")


def _add_triton(command: argparse.ArgumentParser) -> None:
    command.add_argument("--triton", default=DEFAULT_TRITON, metavar="HOST:PORT", help="gRPC service (%(default)s)")
    about = "file with the operator's key (default: that of a server of this user)"
    command.add_argument("--key-file", type=Path, metavar="FILE", help=about)


def _add_metrics(command: argparse.ArgumentParser) -> None:
    command.add_argument("--metrics", default="127.0.0.1:8002", metavar="HOST:PORT", help="Triton's metrics service")


def _command(commands: Commands, name: str, about: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=about, description=about)
    _add_triton(command)
    return command


def _image_file(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in IMAGE_SUFFIXES:
        raise argparse.ArgumentTypeError(f"the name of an image must end in {', '.join(IMAGE_SUFFIXES)} (got {text!r})")
    return path


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise argparse.ArgumentTypeError(f"size must be WIDTHxHEIGHT like 512x256 (got {text!r})")
    return int(width), int(height)


if __name__ == "__main__":
    sys.exit(main())
