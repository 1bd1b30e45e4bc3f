# SPDX-License-Identifier: Apache-2.0
"""docs/examples and the README's clients run as they stand, on the embedded default."""

from __future__ import annotations

import sys
import wave
from pathlib import Path

import httpx
import pytest

from tests.kit.doc_blocks import PROXY, ROOT, TRITON, blocks_of
from tests.kit.triton_server import RunningServer

pytestmark = [pytest.mark.triton, pytest.mark.models, pytest.mark.timeout(600)]

QUESTION = "What is the capital of France?"
MINUTES_S = 120


def run(name: str, program: str, server: RunningServer) -> None:
    """Run a program against this server instead of that of `make serve`."""
    program = program.replace(f"http://{PROXY}/v1", server.openai).replace(TRITON, server.grpc)
    program = program.replace('Omni("chat")', f'Omni("chat", address="{server.grpc}")')
    exec(compile(program, name, "exec"), {"__name__": "__main__"})


def example(name: str, server: RunningServer) -> None:
    path = ROOT / "docs" / "examples" / name
    run(str(path), path.read_text(encoding="utf-8"), server)


def readme(begins: str, server: RunningServer) -> None:
    """Run the block of README.md that begins so."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [block] = [b for b in blocks_of("README.md", text) if b.text.startswith(begins)]
    run(str(block), block.text, server)


def seconds(path: Path) -> float:
    with wave.open(str(path)) as file:
        return file.getnframes() / file.getframerate()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def question(folder: Path, chat_server: RunningServer) -> Path:
    """question.wav as the examples' README makes it."""
    body = {"model": "chat", "input": QUESTION, "voice": "heart", "response_format": "wav"}
    answer = httpx.post(f"{chat_server.openai}/audio/speech", json=body, timeout=MINUTES_S).raise_for_status()
    path = folder / "question.wav"
    path.write_bytes(answer.content)
    return path


def test_a_spoken_answer(chat_server: RunningServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("openai_chat.py", chat_server)
    assert "Paris" in capsys.readouterr().out and seconds(folder / "answer.wav") > 0.5


def test_a_streamed_answer(chat_server: RunningServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("openai_stream.py", chat_server)
    assert "sea" in capsys.readouterr().out and (folder / "answer.pcm").stat().st_size > 24_000


def test_a_transcript(chat_server: RunningServer, question: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("openai_transcribe.py", chat_server)
    assert "capital of France" in capsys.readouterr().out


def test_a_notebook(chat_server: RunningServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("notebook.py", chat_server)
    assert "Paris" in capsys.readouterr().out and seconds(folder / "hello.wav") > 0.3


def test_tritonclient(chat_server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    example("triton_stream.py", chat_server)
    assert "sea" in capsys.readouterr().out


def test_system_shared_memory(
    chat_server: RunningServer, question: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", chat_server.operator_key])
    example("triton_system_shared_memory.py", chat_server)
    assert "capital of France" in capsys.readouterr().out


def test_langchain(chat_server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    example("langchain_chat.py", chat_server)
    assert "sea" in capsys.readouterr().out


def test_the_readmes_client(chat_server: RunningServer, question: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme("from pathlib import Path", chat_server)
    assert len(capsys.readouterr().out) > 10
