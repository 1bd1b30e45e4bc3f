# SPDX-License-Identifier: Apache-2.0
"""`triton-omni doctor` and `top`: how a running server is, from its health and its metrics page."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from triton_omni.ask import Say
from triton_omni.backends.wire import OmniError
from triton_omni.sync import Client

CLEAR = "\x1b[2J\x1b[H"
METRICS_TIMEOUT_S = 2.0
_MODEL = re.compile(r'nv_inference_request_success\{model="([^"]*)"')
_SAMPLE = re.compile(r"^((?:omni|nv)_\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


def doctor(client: Client, options: argparse.Namespace, say: Say) -> int:
    """Set-up (the server side's own findings), then the running server's pipelines and processes."""
    code = 0
    if not options.no_setup:
        say("set-up\n")
        code = subprocess.run(
            [sys.executable, "-m", "triton_omni.backends.supervisor", "doctor"], check=False
        ).returncode
    say(f"\nserver at {options.triton}: ")
    if not client.is_live():
        say("nobody answers\n")
        return code or 1
    say("answers\n")
    for name in pipelines(client, [], samples(options.metrics)):
        code |= _show_pipeline(client, name, say)
    return code


def pipelines(client: Client, given: list[str], now: dict[str, float]) -> list[str]:
    """The given pipelines, or all that the server has: by its metrics page, as the index of models may be restricted.

    Raises OmniError where both are out of reach.
    """
    models = dict.fromkeys(found[1] for key in now if (found := _MODEL.match(key)))
    return given or [m for m in models if client.is_public(m)] or [model.name for model in client.models()]


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
    while True:
        now = samples(options.metrics)
        names = pipelines(client, options.model, now)
        if options.json:
            say(json.dumps(_facts(client, names, now)) + "\n")
        else:
            say((CLEAR if sys.stdout.isatty() else "") + view(client, names, now, before, options.every_s))
        if options.once:
            return 0
        before = now
        time.sleep(options.every_s)


def samples(address: str) -> dict[str, float]:
    """The samples on Triton's page, by name and labels; empty if there is no page."""
    try:
        text = httpx.get(f"http://{address}/metrics", timeout=METRICS_TIMEOUT_S, trust_env=False).text
    except httpx.HTTPError:
        return {}
    return {f"{m[1]}{{{m[2] or ''}}}": float(m[3]) for m in _SAMPLE.finditer(text)}


def view(client: Client, names: list[str], now: dict[str, float], before: dict[str, float], every_s: float) -> str:
    """One screen."""
    lines = [time.strftime("%H:%M:%S")]
    for name, state in _facts(client, names, now)["pipelines"].items():
        if "error" in state:
            lines.append(f"{name}: {state['error']}")
            continue
        lines.append(_headline(name, state))
        lines += [_stage_line(stage, facts) for stage, facts in state["stages"].items()]
        lines += [_request_line(request) for request in state["requests"]]
        lines += _rates(name, now, before, every_s)
    return "\n".join(lines) + "\n"


def _facts(client: Client, names: list[str], now: dict[str, float]) -> dict[str, Any]:
    """What a view shows; `steps` of a stage are as old as its last run."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            state = client.requests(name)
        except OmniError as error:
            found[name] = {"error": error.line()}
            continue
        for stage, facts in state["stages"].items():
            facts["steps"] = now.get(f'omni_stage_steps_total{{pipeline="{name}",stage="{stage}"}}')
        found[name] = state
    return {"time_s": time.time(), "pipelines": found}


def _headline(name: str, state: dict[str, Any]) -> str:
    ready = "ready" if state["ready"] else "NOT READY"
    return f"{name:16} {ready:10} live {state['live']:4}  queued {state['queued']:4}"


def _stage_line(stage: str, facts: dict[str, Any]) -> str:
    instances = f"{facts.get('ready', 0)}/{facts['instances']}"
    line = f"  {stage:14} {facts['state']:10} live {facts['live']:4}  instances {instances}"
    line += f"  restarts {facts.get('restarts', 0)}"
    return line if facts["steps"] is None else f"{line}  steps {facts['steps']:.0f}"


def _request_line(request: dict[str, Any]) -> str:
    pieces = ", ".join(f"{count} {output}" for output, count in request["pieces"].items())
    stages = " ".join(request["stages"]) or "-"
    return f"    {request['age_s']:8.2f} s  {request['phase']:9}  {request['id'][:40]!a}  at {stages}; {pieces}"


def _rates(name: str, now: dict[str, float], before: dict[str, float], every_s: float) -> list[str]:
    """Counters of one pipeline that have moved, per second."""
    lines: list[str] = []
    for key, value in sorted(now.items()):
        is_counter = key.startswith("omni_") and "_total{" in key and f'pipeline="{name}"' in key
        if is_counter and key in before and value != before[key]:
            lines.append(f"  {key}  {(value - before[key]) / every_s:.1f}/s")
    return lines
