# SPDX-License-Identifier: Apache-2.0
"""What set-up and doctor say of a machine with GPUs, from files of the kind that such a machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_omni.backends.supervisor import gpu_host

DRIVER = "NVRM version: NVIDIA UNIX {kind} Kernel Module{of}  {version}  Release Build  (builder)\nGCC version: 13\n"


@pytest.mark.parametrize(
    ("kind", "of", "version", "words"),
    [
        ("Open", " for x86_64", "580.65.06", ""),
        ("x86_64", "", "595.10", ""),
        ("x86_64", "", "570.133.20", "NVIDIA driver 570 is too old"),
        ("Open", " for x86_64", "535.54", "NVIDIA driver 535 is too old"),
    ],
)
def test_the_drivers_version(tmp_path: Path, kind: str, of: str, version: str, words: str) -> None:
    (tmp_path / "version").write_text(DRIVER.format(kind=kind, of=of, version=version))
    assert gpu_host.driver_problem(tmp_path / "version")[: len(words) or None] == words


def test_a_gpu_without_a_driver_is_a_problem(tmp_path: Path) -> None:
    assert "no NVIDIA driver is loaded" in gpu_host.driver_problem(tmp_path / "none")


def test_compilers_and_headers_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(gpu_host, "gpu_devices", lambda: [Path("/dev/nvidia0")])
    (tmp_path / "version").write_text(DRIVER.format(kind="x86_64", of="", version="580.1"))
    compiler, headers = gpu_host.problems("cuda", tmp_path / "version")
    assert "apt-get install gcc" in compiler and "Python.h" in headers
    for name in ("cc", "Python.h"):
        (tmp_path / name).touch(mode=0o755)
    assert gpu_host.problems("cuda", tmp_path / "version") == []
    assert gpu_host.problems("cpu", tmp_path / "none") == []


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert sorted(path.name for path in gpu_host.gpu_devices(tmp_path)) == ["nvidia0", "nvidia12"]


def test_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2000000 kB\n")
    available = gpu_host.available_bytes(tmp_path / "meminfo")
    assert available == 2_048_000_000
    assert gpu_host.memory_problem("cpu", available).startswith("2.0 GB of memory are available")
    assert gpu_host.memory_problem("cpu", 5 * 10**9) == "" != gpu_host.memory_problem("cuda", 5 * 10**9)
    assert gpu_host.gpu_memory(str(tmp_path / "none")) == ""
