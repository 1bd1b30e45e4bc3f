# SPDX-License-Identifier: Apache-2.0
"""`triton-omni doctor` and `top`: the state of a running server, from its health and its metrics."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from typing import Any

import httpx

from triton_omni.ask import Show
from triton_omni.backends.wire import OmniError
from triton_omni.sync import Client

CLEAR = "\x1b[2J\x1b[H"
METRICS_TIMEOUT_S = 2.0
_MODEL = re.compile(r'nv_inference_request_success\{model="([^"]*)"')
_SAMPLE = re.compile(r"^((?:omni|nv)_\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


def doctor(client: Client, options: argparse.Namespace, show: Show) -> int:
    """Show the pipelines of the running server; returns 0 if all are ready."""
    show(f"\nserver at {options.triton}: ")
    if not client.is_live():
        show("no answer\n")
        return 1 if options.no_setup else 0  # the server's own doctor has reported its processes
    show("answers\n")
    code = 0
    for name in pipelines(client, [], samples(options.metrics)):
        code |= _show_pipeline(client, name, show)
    return code


def pipelines(client: Client, names: list[str], now: dict[str, float]) -> list[str]:
    """The given pipelines, or all of the server: from its metrics, as the index of models may be restricted.

    Raises OmniError where both are out of reach.
    """
    models = dict.fromkeys(match[1] for key in now if (match := _MODEL.match(key)))
    return names or [m for m in models if client.is_public(m)] or [model.name for model in client.models()]


def _show_pipeline(client: Client, name: str, show: Show) -> int:
    try:
        health = client.health(name)
    except OmniError as error:
        show(f"  {name}: {error.line()}\n")
        return 1
    show(f"  {name}: {health['state']}, {health['live']} live, {health['queued']} queued\n")
    for stage, state in health["stages"].items():
        show(f"    {stage:14} {state['state']:12} instances {state['instances']}, restarts {state.get('restarts', 0)}")
        show(f", ready after {state.get('ready_s', 0):.1f} s\n")
    return 0 if health["ready"] else 1


def top(client: Client, options: argparse.Namespace, show: Show) -> int:
    """Show a view of the server every second."""
    before: dict[str, float] = {}
    while True:
        now = samples(options.metrics)
        names = pipelines(client, options.model, now)
        if options.json:
            show(json.dumps(_facts(client, names, now)) + "\n")
        else:
            show((CLEAR if sys.stdout.isatty() else "") + view(client, names, now, before, options.every_s))
        if options.once:
            return 0
        before = now
        time.sleep(options.every_s)


def samples(address: str) -> dict[str, float]:
    """The samples of Triton's metrics by name and labels; empty if the service does not answer."""
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
    """The contents of a view; `steps` of a stage are those at its last update of the metrics."""
    states: dict[str, Any] = {}
    for name in names:
        try:
            state = client.requests(name)
        except OmniError as error:
            states[name] = {"error": error.line()}
            continue
        for stage, facts in state["stages"].items():
            facts["steps"] = now.get(f'omni_stage_steps_total{{pipeline="{name}",stage="{stage}"}}')
        states[name] = state
    return {"time_s": time.time(), "pipelines": states}


def _headline(name: str, state: dict[str, Any]) -> str:
    return f"{name:16} {state['state']:11} live {state['live']:4}  queued {state['queued']:4}"


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
    """Counters of one pipeline that have changed, per second."""
    lines: list[str] = []
    for key, value in sorted(now.items()):
        is_counter = key.startswith("omni_") and "_total{" in key and f'pipeline="{name}"' in key
        if is_counter and key in before and value != before[key]:
            lines.append(f"  {key}  {(value - before[key]) / every_s:.1f}/s")
    return lines
