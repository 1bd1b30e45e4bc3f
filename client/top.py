# SPDX-License-Identifier: Apache-2.0
"""`triton-omni doctor` and `top`: the state of a running server, from its health and its metrics."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import httpx

from triton_omni.ask import Show
from triton_omni.backends.wire import OmniError
from triton_omni.live_view import LiveView, MetricsPage
from triton_omni.sync import Client

CLEAR = "\x1b[2J\x1b[H"
METRICS_TIMEOUT_S = 2.0
MIB = 1 << 20
BAR_CHARS = 48


def doctor(client: Client, options: argparse.Namespace, show: Show) -> int:
    """Show the pipelines of the running server; returns 0 if all are ready."""
    show(f"\nserver at {options.triton}: ")
    if not client.is_live():
        show("no answer\n")
        return 1 if options.no_setup else 0  # the server's own doctor has reported its processes
    show("answers\n")
    code = 0
    for name in pipelines(client, [], read_page(options.metrics)):
        code |= _show_pipeline(client, name, show)
    return code


def pipelines(client: Client, names: list[str], page: MetricsPage) -> list[str]:
    """The given pipelines, or all of the server: from its metrics, as the index of models may be restricted.

    Raises OmniError where both are out of reach.
    """
    return names or [m for m in page.models if client.is_public(m)] or [model.name for model in client.models()]


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
    if options.request:
        return _show_traces(client, options, show)
    live = LiveView()
    while True:
        page = read_page(options.metrics)
        live.add(time.monotonic(), page)
        facts = _facts(client, pipelines(client, options.model, page), live)
        if options.json:
            show(json.dumps(facts) + "\n")
        else:
            show((CLEAR if sys.stdout.isatty() else "") + view(facts))
        if options.once:
            return 0
        time.sleep(options.every_s)


def _show_traces(client: Client, options: argparse.Namespace, show: Show) -> int:
    """Show the waterfalls of ended requests with an id; returns 1 if there is none."""
    names = pipelines(client, options.model, read_page(options.metrics))
    traces = [
        {"pipeline": name, **trace} for name in names for trace in client.requests(name, options.request)["traces"]
    ]
    for trace in traces:
        show(json.dumps(trace) + "\n" if options.json else waterfall(trace))
    if not traces:
        show(f"none of the latest ended requests has the id {options.request!a}\n")
    return 0 if traces else 1


def waterfall(trace: dict[str, Any]) -> str:
    """A request as bars over its time; `|` is the first output of a stage."""
    total_s = max([trace["total_s"], *(span["end_s"] for span in trace["spans"])]) or 1.0
    head = f"{trace['pipeline']} {trace['operation']} {trace['id'][:40]!a}: {trace['outcome']}"
    lines = [f"{head} after {trace['total_s']:.3f} s, {trace['ended_s']:.0f} s ago"]
    for span in trace["spans"]:
        start, end = (min(BAR_CHARS - 1, int(BAR_CHARS * span[key] / total_s)) for key in ("start_s", "end_s"))
        bar = [" "] * start + ["="] * (end - start + 1)
        if span.get("first_s") is not None:
            bar[min(end, int(BAR_CHARS * span["first_s"] / total_s))] = "|"
        times = f"{span['start_s']:8.3f} - {span['end_s']:8.3f} s"
        lines.append(f"  {span['name']:18} {''.join(bar):{BAR_CHARS}} {times}  {span.get('outcome', '')}".rstrip())
    return "\n".join(lines) + "\n"


def read_page(address: str) -> MetricsPage:
    """Triton's metrics; empty if the service does not answer."""
    try:
        return MetricsPage(httpx.get(f"http://{address}/metrics", timeout=METRICS_TIMEOUT_S, trust_env=False).text)
    except httpx.HTTPError:
        return MetricsPage()


def _facts(client: Client, names: list[str], live: LiveView) -> dict[str, Any]:
    """The contents of a view; numbers of the metrics are those of their last update."""
    states: dict[str, Any] = {}
    for name in names:
        try:
            state = client.requests(name)
        except OmniError as error:
            states[name] = {"error": error.line()}
            continue
        for stage, facts in state["stages"].items():
            facts |= live.stage(name, stage)
        states[name] = state | live.pipeline(name)
    return {"time_s": time.time(), "pipelines": states, "gpus": live.gpus()}


def view(facts: dict[str, Any]) -> str:
    """One screen."""
    lines = [time.strftime("%H:%M:%S", time.localtime(facts["time_s"])) + "".join(map(_gpu, facts["gpus"]))]
    for name, state in facts["pipelines"].items():
        if "error" in state:
            lines.append(f"{name}: {state['error']}")
            continue
        lines += [_headline(name, state), *_latency_lines(state)]
        lines += [_stage_line(stage, facts) for stage, facts in state["stages"].items()]
        lines += [_request_line(request) for request in state["requests"]]
    return "\n".join(lines) + "\n"


def _gpu(gpu: dict[str, Any]) -> str:
    total = "" if gpu["total_bytes"] is None else f" of {gpu['total_bytes'] / MIB:.0f}"
    return f"  {gpu['gpu'][:12]}: {gpu['used_bytes'] / MIB:.0f}{total} MiB"


def _headline(name: str, state: dict[str, Any]) -> str:
    line = f"{name:16} {state['state']:11} live {state['live']:4}  queued {state['queued']:4}"
    rates = (("requests_per_s", "requests/s"), ("tokens_per_s", "tokens/s"), ("audio_s_per_s", "s of audio/s"))
    return line + "".join(f"  {state[key]:.1f} {unit}" for key, unit in rates if state[key])


def _latency_lines(state: dict[str, Any]) -> list[str]:
    return [
        f"  first {output:10} p50 {found['p50']:.3f} s  p95 {found['p95']:.3f} s"
        for output, found in state["first_output_s"].items()
        if found["p50"] is not None
    ]


def _stage_line(stage: str, facts: dict[str, Any]) -> str:
    instances = f"{facts.get('ready', 0)}/{facts['instances']}"
    line = f"  {stage:14} {facts['state']:10} live {facts['live']:4}  instances {instances}"
    line += f"  restarts {facts.get('restarts', 0)}"
    line += "" if facts["steps"] is None else f"  steps {facts['steps']:.0f}"
    line += f" ({facts['steps_per_s']:.0f}/s)" if facts["steps_per_s"] else ""
    line += f"  runs per step {facts['runs_per_step']:.1f}" if facts["runs_per_step"] else ""
    busy = (
        [f"{worker} {live}" for worker, live in facts["workers"].items() if live] if len(facts["workers"]) > 1 else []
    )
    return line + (f"  workers: {', '.join(busy)}" if busy else "")


def _request_line(request: dict[str, Any]) -> str:
    pieces = ", ".join(f"{count} {output}" for output, count in request["pieces"].items())
    stages = " ".join(request["stages"]) or "-"
    return f"    {request['age_s']:8.2f} s  {request['phase']:9}  {request['id'][:40]!a}  at {stages}; {pieces}"
