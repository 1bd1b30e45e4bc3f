# SPDX-License-Identifier: Apache-2.0
"""Talk with a Triton-Omni server, let it speak, hear, draw and edit; start one, and see how it is."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from triton_omni import ask
from triton_omni import top as watch
from triton_omni.backends.wire import OmniError
from triton_omni.media import MediaError
from triton_omni.sync import Client

SUPERVISOR = "triton_omni.backends.supervisor"
DEFAULT_TRITON = "127.0.0.1:8001"
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
EXITS = "Exit status: 0 done, 1 failed (one line on stderr says why), 2 wrong usage, 130 interrupted."


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["serve"]:
        # The server's side is another program, with its own environment and options: become it.
        os.execv(sys.executable, [sys.executable, "-m", SUPERVISOR, *given])
    options = parser().parse_args(given)
    run: Callable[[Client, argparse.Namespace, ask.Say], int] = options.run
    try:
        with Client(options.triton) as client:
            return run(client, options, say)
    except OmniError as error:
        return _failed(error.line())
    except MediaError as error:
        return _failed(str(error))
    except BrokenPipeError:  # whoever read us has gone; the interpreter must not try to write the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        return 130


def _failed(why: str) -> int:
    print(f"triton-omni: {why}", file=sys.stderr)
    return 1


def say(text: str) -> None:
    """Show text at once, as it is."""
    print(text, end="", flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="triton-omni", description=__doc__, epilog=EXITS)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("serve", help="run server and OpenAI proxy until Ctrl-C (serve --help: its options)")

    chat = _command(commands, "chat", ask.chat, "talk with a model; without a prompt: line by line until Ctrl-D")
    chat.add_argument("prompt", nargs="?", help="ask this one thing")
    _add_model(chat, "chat")
    chat.add_argument("--system", default="", metavar="TEXT", help="system message")
    for kind, words in (("image", "picture"), ("audio", "sound"), ("video", "film")):
        more = f"a {words} for the first prompt, file or URL; may be repeated"
        chat.add_argument(f"--{kind}", action="append", default=[], metavar="FILE", help=more)
    chat.add_argument("--speak", type=Path, metavar="WAV", help="also let it speak, into this file")
    chat.add_argument("--voice", metavar="NAME", help="voice of the speech")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    chat.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest words, up to 2: surprising ones")
    chat.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answer")

    speak = _command(commands, "speak", ask.speak, "speak a text into a WAV file")
    speak.add_argument("text", help="what to say")
    speak.add_argument(
        "out", nargs="?", type=Path, default=Path("speech.wav"), metavar="WAV", help="file (%(default)s)"
    )
    _add_model(speak, "chat")
    speak.add_argument("--voice", metavar="NAME", help="one of the model's voices")
    speak.add_argument("--speed", type=float, default=1.0, metavar="S", help="0.25 to 4 (%(default)s)")

    hear = _command(commands, "transcribe", ask.transcribe, "write down what is said in a sound or film")
    hear.add_argument("source", metavar="FILE", help="a file or URL")
    _add_model(hear, "chat")
    hear.add_argument("--format", choices=ask.TRANSCRIPTS, default="text", help="of the transcript (%(default)s)")
    hear.add_argument("--words", action="store_true", help="with --format json: the times of single words, too")

    draw = _command(commands, "draw", ask.draw, "draw a picture into a file")
    draw.add_argument("prompt", help="what to draw")
    _add_model(draw, "image")
    _add_drawing(draw)

    edit = _command(commands, "edit", ask.edit, "change a picture as a text says")
    edit.add_argument("picture", help="a file or URL")
    edit.add_argument("prompt", help="what to change")
    edit.add_argument("--mask", metavar="PNG", help="transparent where the picture may change")
    edit.add_argument("--model", required=True, metavar="NAME", help="pipeline to ask, one with the operation `edit`")
    _add_drawing(edit)

    doctor = _command(commands, "doctor", watch.doctor, "what is set up, what runs, what it takes")
    _add_metrics(doctor)
    doctor.add_argument("--no-setup", action="store_true", help="look at the running server only")

    show = _command(commands, "top", watch.top, "live view of a running server")
    _add_metrics(show)
    show.add_argument("--model", action="append", default=[], help="pipelines to show (default: all)")
    show.add_argument("--every-s", type=float, default=1.0)
    show.add_argument("--once", action="store_true", help="one view instead of one after the other until Ctrl-C")
    show.add_argument("--json", action="store_true", help="a view is one JSON object on a line")
    return top


def _add_model(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument("--model", default=name, metavar="NAME", help="pipeline to ask (%(default)s)")


def _add_drawing(command: argparse.ArgumentParser) -> None:
    out = Path("picture.png")
    command.add_argument("--out", type=_picture, default=out, metavar="FILE", help="png, jpg or webp (%(default)s)")
    command.add_argument("--size", type=_size, metavar="WxH", help="in pixels, e.g. 512x256 (default: the model's)")
    command.add_argument("--steps", type=int, metavar="N", help="more are slower and finer")
    command.add_argument("--seed", type=int, metavar="N", help="the same seed, the same picture")


def _add_metrics(command: argparse.ArgumentParser) -> None:
    command.add_argument("--metrics", default="127.0.0.1:8002", metavar="HOST:PORT", help="Triton's metrics service")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[Client, argparse.Namespace, ask.Say], int],
    words: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=words, description=words)
    command.set_defaults(run=run)
    command.add_argument("--triton", default=DEFAULT_TRITON, metavar="HOST:PORT", help="gRPC service (%(default)s)")
    return command


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"a picture's name ends in {', '.join(PICTURES)}, not {text!r}")
    return path


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise argparse.ArgumentTypeError(f"a size is like 512x256, not {text!r}")
    return int(width), int(height)


if __name__ == "__main__":
    sys.exit(main())
