# SPDX-License-Identifier: Apache-2.0
"""`triton-omni`: serve, chat, speak, draw, doctor, top."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from backends.wire import OmniError
from client import ask, watch
from client.sync import Client

SUPERVISOR = "backends.supervisor"
DEFAULT_TRITON = "127.0.0.1:8001"


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
        print(f"triton-omni: {error.line()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def say(text: str) -> None:
    """Show text at once, as it is."""
    print(text, end="", flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="triton-omni", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help="run server and OpenAI proxy until Ctrl-C (serve --help: its options)")

    chat = _command(commands, "chat", ask.chat, "talk with a model; without a prompt: line by line until Ctrl-D")
    chat.add_argument("prompt", nargs="?", help="ask this one thing")
    chat.add_argument("--model", default="chat")
    chat.add_argument("--system", default="", help="system message")
    chat.add_argument("--speak", type=Path, metavar="WAV", help="also let it speak, into this file")
    chat.add_argument("--voice")
    chat.add_argument("--max-tokens", type=int)
    chat.add_argument("--temperature", type=float)
    chat.add_argument("--seed", type=int)

    speak = _command(commands, "speak", ask.speak, "speak a text into a WAV file")
    speak.add_argument("text")
    speak.add_argument("--model", default="chat")
    speak.add_argument("--out", type=Path, default=Path("speech.wav"))
    speak.add_argument("--voice")
    speak.add_argument("--speed", type=float, default=1.0)

    draw = _command(commands, "draw", ask.draw, "draw a picture into a file")
    draw.add_argument("prompt")
    draw.add_argument("--model", default="image")
    draw.add_argument("--out", type=Path, default=Path("picture.png"))
    draw.add_argument("--size", type=_size, metavar="WxH")
    draw.add_argument("--steps", type=int)
    draw.add_argument("--seed", type=int)

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


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


if __name__ == "__main__":
    sys.exit(main())
