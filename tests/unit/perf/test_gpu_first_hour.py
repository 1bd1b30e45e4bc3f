# SPDX-License-Identifier: Apache-2.0
"""The first hour's report over commands of the test, and what is said without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perf import gpu_first_hour
from perf.gpu_first_hour import Check, checks, main

ROOT = Path(__file__).resolve().parents[3]


def python(code):
    return [sys.executable, "-c", code]


def listed():
    return [
        Check("machine: GPUs", python("print('0, NVIDIA H100, 81559 MiB')")),
        Check("tests: engines", python("print('12 passed')")),
        Check("tests: servers", python("print('\\n'.join(map(str, range(50)))); raise SystemExit('2 failed')")),
        Check("hangs", python("import time; time.sleep(60)"), timeout_s=0.2),
        Check("no such program", ["/nowhere/nvidia-smi"]),
        Check("real model", python("raise SystemExit(1)"), model="Large"),
    ]


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_first_hour, "models_dir", lambda: tmp_path / "models")
    return tmp_path / "models"


def run(tmp_path, *arguments):
    out = tmp_path / "out" / "report.md"
    code = main([*arguments, "--out", str(out)], listed, lambda: [Path("/dev/nvidia0")])
    return code, out.read_text(encoding="utf-8")


def test_every_check_has_its_line_and_failures_their_last_words(tmp_path, models):
    code, text = run(tmp_path)
    assert code == 1
    results = {row[1].strip(): row[2].strip() for line in text.splitlines() if len(row := line.split("|")) == 5}
    assert results == {
        "check": "result",
        "---": "---",
        "machine: GPUs": "passed",
        "tests: engines": "passed",
        "tests: servers": "failed",
        "hangs": "failed",
        "no such program": "failed",
        "real model": "not run: no checkpoint models/Large",
    }
    for words in ("NVIDIA H100", "49\n2 failed", "not done within 0 s", "No such file or directory: '/nowhere"):
        assert words in text
    assert "\n12 passed" not in text and "\n20\n" not in text, "of a passed test nothing, of others the end"
    assert all(f"* {item}" in text for item in gpu_first_hour.BY_HAND)


def test_a_model_that_is_there_is_run(tmp_path, models):
    (models / "Large").mkdir(parents=True)
    (models / "Large" / "config.json").touch()
    code, text = run(tmp_path, "--only", "real")
    assert code == 1 and "| real model | failed |" in text and "machine" not in text


def test_an_hour_in_which_nothing_failed(tmp_path, models):
    assert run(tmp_path, "--only", "tests: engines")[0] == 0


def test_a_name_that_no_check_has_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--only", "nothing"], listed, lambda: [Path("/dev/nvidia0")])
    assert "--only: no check's name contains 'nothing'" in capsys.readouterr().err


def test_a_machine_without_a_gpu_gets_one_line(tmp_path, capsys):
    out = tmp_path / "report.md"
    assert main(["--out", str(out)], listed, list) == 1
    assert "no NVIDIA GPU (/dev/nvidia0); next: make test" in capsys.readouterr().err and not out.exists()


def test_the_list_names_files_that_exist():
    for check in checks():
        for word in check.command:
            if word.startswith(("tests/", "backends/")):
                assert (ROOT / word).exists(), f"{check.name}: {word}"
