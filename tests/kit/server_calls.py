# SPDX-License-Identifier: Apache-2.0
"""Small ways to call a running server, for tests: over HTTP as curl does, and what its processes hold."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from typing import Any

from tests.kit.triton_server import RunningServer
from triton_omni.backends.control import probe

HTTP_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 5.0


def post(url: str, body: dict[str, Any]) -> tuple[int, str]:
    """(status, body) of a JSON POST."""
    request = urllib.request.Request(f"http://{url}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(server: RunningServer, model: str = "toy", **body: Any) -> tuple[int, dict[str, Any]]:
    """`/generate`: (status, JSON); the event is decoded."""
    status, text = post(f"{server.http}/v2/models/{model}/generate", body)
    answer = json.loads(text)
    if "event" in answer:
        answer["event"] = json.loads(answer["event"])
    return status, answer


def generate_stream(server: RunningServer, model: str = "toy", **body: Any) -> list[dict[str, Any]]:
    """`/generate_stream`: the JSON of every response, events decoded."""
    _, text = post(f"{server.http}/v2/models/{model}/generate_stream", body)
    answers = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    for answer in answers:
        if "event" in answer:
            answer["event"] = json.loads(answer["event"])
    return answers


def health(server: RunningServer, pipeline: str = "toy") -> dict[str, Any]:
    """The pipeline's own word on its state."""
    _, answer = generate(server, pipeline, request=json.dumps({"operation": "health"}))
    return answer["event"]["meta"]


def idle(server: RunningServer, pipeline: str = "toy") -> bool:
    """True if no request is in work or waits and no stage has a run."""
    state = health(server, pipeline)
    return state["live"] == state["queued"] == 0 and all(s["live"] == 0 for s in state["stages"].values())


def metrics(server: RunningServer) -> dict[str, float]:
    """Every sample of our own on the metrics page, by name and labels as printed there."""
    with urllib.request.urlopen(server.metrics, timeout=HTTP_TIMEOUT_S) as answer:
        text = answer.read().decode()
    return {m[1]: float(m[2]) for m in re.finditer(r"^(omni_\S+) (\S+)$", text, re.MULTILINE)}


def processes_of(server: RunningServer) -> dict[str, int]:
    """Role → pid: "tritonserver", "<model> stub", "<model> worker"; of the first instance of each."""
    pids = {"tritonserver": server.server_pid()}
    for instance in reversed(server.instances()):
        pids[f"{instance.model} stub"] = instance.pid
        if instance.worker_pid:
            pids[f"{instance.model} worker"] = instance.worker_pid
    return pids


def holdings(server: RunningServer) -> dict[str, int]:
    """What the server holds: descriptors (sockets among them) per process, names in /dev/shm, requests and runs."""
    held: dict[str, int] = {"shm names": len(server.regions())}
    for role, pid in processes_of(server).items():
        held[f"{role} fds"] = len(os.listdir(f"/proc/{pid}/fd"))
    for instance in server.instances():
        held[f"{instance.model} requests"] = _held(instance.address)
    return held


def _held(address: str) -> int:
    """Requests of an orchestrator, runs of a worker, the ended ones included."""
    sign = probe(address, PROBE_TIMEOUT_S)
    return int(sign.numbers.get("held", sign.live))


def memory_kb(server: RunningServer) -> dict[str, int]:
    """Resident memory per process, in KiB."""
    return {role: _resident_kb(pid) for role, pid in processes_of(server).items()}


def _resident_kb(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
