# SPDX-License-Identifier: Apache-2.0
"""What a machine with NVIDIA GPUs needs beyond pip's packages. Standard library only. Not run on a GPU yet.

torch 2.13 is built for CUDA 13.0, whose oldest driver is R580 (NVIDIA, CUDA Compatibility). torch's Triton compiles
launchers of its kernels at their first use, which takes a C compiler and Python's headers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from triton_omni.backends.config.paths import Build

OLDEST_DRIVER = 580
DRIVER_FILE = Path("/proc/driver/nvidia/version")
NEEDED_BYTES: dict[Build, float] = {"cpu": 4e9, "cuda": 16e9}
"""Memory of the machine that the embedded default takes while it loads; the real models pass through 64 GB."""


def gpu_devices(dev: Path = Path("/dev")) -> list[Path]:
    """Device files of the machine's NVIDIA GPUs."""
    return [path for path in dev.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]


def problems(build: Build, driver_file: Path = DRIVER_FILE) -> list[str]:
    """What stops the CUDA build from running here; empty for the CPU build, and on a machine without a GPU."""
    if build == "cpu" or not gpu_devices():
        return []
    return [text for text in (driver_problem(driver_file), compiler_problem(), headers_problem()) if text]


def driver_problem(driver_file: Path = DRIVER_FILE) -> str:
    """Why the NVIDIA driver is too old; an empty text if it is not, or its version is unknown."""
    try:
        version = re.search(r"Kernel Module.*?\s(\d{3,})\.", driver_file.read_text())
    except OSError:
        return f"no NVIDIA driver is loaded ({driver_file} does not exist); install R{OLDEST_DRIVER} or later"
    if version is None or int(version[1]) >= OLDEST_DRIVER:
        return ""
    return f"NVIDIA driver {version[1]} is too old for CUDA 13.0; install R{OLDEST_DRIVER} or later"


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that new processes can use without swapping."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def memory_problem(build: Build, available: int) -> str:
    """Why the embedded default may not fit into memory; an empty text if it does."""
    needed = NEEDED_BYTES[build]
    if available >= needed:
        return ""
    return f"{available / 1e9:.1f} GB of memory are available; the embedded default takes up to {needed / 1e9:.0f} GB"


def gpu_memory(command: str = "nvidia-smi") -> str:
    """Free and total memory of each GPU on a line, as the driver says; empty without a GPU."""
    query = [command, "--query-gpu=index,name,memory.free,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def compiler_problem() -> str:
    """Why kernels cannot be compiled; an empty text if they can."""
    if shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"):
        return ""
    return "no C compiler; kernels are compiled at their first use: apt-get install gcc g++ libc6-dev"


def headers_problem() -> str:
    """Why Python's headers cannot be included; an empty text if they can."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return ""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return f"no {header}; kernels are compiled at their first use: apt-get install libpython{version}-dev"
