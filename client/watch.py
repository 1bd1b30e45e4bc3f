# SPDX-License-Identifier: Apache-2.0
"""`triton-omni doctor` and `top`: how a running server is, from its health and its metrics page."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from backends.wire import OmniError
from client.ask import Say
from client.sync import Client

CLEAR = "\x1b[2J\x1b[H"
METRICS_TIMEOUT_S = 2.0
_SAMPLE = re.compile(r"^(omni_\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


def doctor(client: Client, options: argparse.Namespace, say: Say) -> int:
    """Set-up (the server side's own findings), then the running server's pipelines and processes."""
    code = 0
    if not options.no_setup:
        say("set-up\n")
        code = subprocess.run([sys.executable, "-m", "backends.supervisor", "doctor"], check=False).returncode
    say(f"\nserver at {options.triton}: ")
    if not client.is_live():
        say("nobody answers\n")
        return code or 1
    say("answers\n")
    for name in pipelines(client, []):
        code |= _show_pipeline(client, name, say)
    return code


def pipelines(client: Client, given: list[str]) -> list[str]:
    """The given pipelines, or all that the server has. Raises OmniError where the index is restricted."""
    return given or [model.name for model in client.models()]


def _show_pipeline(client: Client, name: str, say: Say) -> int:
    try:
        health = client.health(name)
    except OmniError as error:
        say(f"  {name}: {error.line()}\n")
        return 1
    say(f"  {name}: {'ready' if health['ready'] else 'NOT READY'}, {health['live']} live, {health['queued']} queued\n")
    for stage, state in health["stages"].items():
        say(f"    {stage:14} {state['state']:12} instances {state['instances']}, restarts {state.get('restarts', 0)}")
        for role in ("stub", "worker"):
            sizes = [_rss_mb(pid) for pid in state.get(f"{role}_pids", []) if pid]
            if sizes and None not in sizes:
                say(f", {role} {'+'.join(f'{size:.0f}' for size in sizes)} MB")
        say(f", ready after {state.get('ready_s', 0):.1f} s\n")
    return 0 if health["ready"] else 1


def _rss_mb(pid: int) -> float | None:
    """Resident memory of a process of this machine; None if it is not to be seen from here."""
    try:
        fields = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    match = re.search(r"^VmRSS:\s+(\d+) kB", fields, re.MULTILINE)
    return int(match[1]) / 1024 if match else None


def top(client: Client, options: argparse.Namespace, say: Say) -> int:
    """Views of the server, one after the other on the same screen."""
    before: dict[str, float] = {}
    shown = 0
    while True:
        names = pipelines(client, options.model)
        now = metrics(options.metrics)
        say((CLEAR if sys.stdout.isatty() else "") + view(client, names, now, before, options.every_s))
        before, shown = now, shown + 1
        if shown == options.count:
            return 0
        time.sleep(options.every_s)


def metrics(address: str) -> dict[str, float]:
    """Our samples on Triton's page, by name and labels; empty if there is no page."""
    try:
        text = httpx.get(f"http://{address}/metrics", timeout=METRICS_TIMEOUT_S).text
    except httpx.HTTPError:
        return {}
    return {f"{m[1]}{{{m[2] or ''}}}": float(m[3]) for m in _SAMPLE.finditer(text)}


def view(client: Client, names: list[str], now: dict[str, float], before: dict[str, float], every_s: float) -> str:
    """One screen."""
    lines = [time.strftime("%H:%M:%S")]
    for name in names:
        try:
            health = client.health(name)
        except OmniError as error:
            lines.append(f"{name}: {error.line()}")
            continue
        lines.append(_headline(name, health))
        lines += [_stage_line(stage, state) for stage, state in health["stages"].items()]
        lines += _rates(name, now, before, every_s)
    return "\n".join(lines) + "\n"


def _headline(name: str, health: dict[str, Any]) -> str:
    state = "ready" if health["ready"] else "NOT READY"
    return f"{name:16} {state:10} live {health['live']:4}  queued {health['queued']:4}"


def _stage_line(stage: str, state: dict[str, Any]) -> str:
    instances = f"{state.get('ready', 0)}/{state['instances']}"
    restarts = state.get("restarts", 0)
    return f"  {stage:14} {state['state']:10} live {state['live']:4}  instances {instances}  restarts {restarts}"


def _rates(name: str, now: dict[str, float], before: dict[str, float], every_s: float) -> list[str]:
    """Counters of one pipeline that have moved, per second."""
    lines: list[str] = []
    for key, value in sorted(now.items()):
        is_counter = "_total{" in key and f'pipeline="{name}"' in key
        if is_counter and key in before and value != before[key]:
            lines.append(f"  {key}  {(value - before[key]) / every_s:.1f}/s")
    return lines
