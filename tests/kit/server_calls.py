# SPDX-License-Identifier: Apache-2.0
"""Small ways to call a running server, for tests: over HTTP as curl does, and what its processes hold."""

from __future__ import annotations

import contextlib
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any

from tests.kit.budgets import RECOVERED_S, SLOTS_FREE_S
from tests.kit.triton_server import RunningServer, wait_for
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
    """`/generate_stream`: the JSON of every response but `accepted`, events decoded."""
    _, text = post(f"{server.http}/v2/models/{model}/generate_stream", body)
    answers = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    for answer in answers:
        if "event" in answer:
            answer["event"] = json.loads(answer["event"])
    return [answer for answer in answers if answer.get("event", {}).get("type") != "accepted"]


def health(server: RunningServer, pipeline: str = "toy") -> dict[str, Any]:
    """The pipeline's own word on its state."""
    _, answer = generate(server, pipeline, request=json.dumps({"operation": "health"}))
    return answer["event"]["status"]


def idle(server: RunningServer, pipeline: str = "toy") -> bool:
    """True if no request runs or waits and no stage has a run."""
    state = health(server, pipeline)
    return state["live"] == state["queued"] == 0 and all(s["live"] == 0 for s in state["stages"].values())


def is_back(server: RunningServer, pipeline: str = "toy") -> bool:
    """True if the supervisor, where there is one, and the pipeline say ready; False also while neither answers."""
    try:
        return server.health() in ("", "ready") and health(server, pipeline)["ready"]
    except (OSError, KeyError, ValueError):
        return False


def wait_until_back(server: RunningServer, timeout_s: float, pipeline: str = "toy") -> None:
    wait_for(lambda: is_back(server, pipeline), timeout_s, f"{pipeline} ready")


def restarts(server: RunningServer, stage: str, pipeline: str = "toy") -> int:
    """How often the stage's workers were started again."""
    return health(server, pipeline)["stages"][stage]["restarts"]


def wait_until_restarted(
    server: RunningServer, stage: str, before: int, pipeline: str = "toy", timeout_s: float = RECOVERED_S
) -> None:
    """Wait until a worker of the stage that has died is back; `before`: restarts before its death. "ready" alone may be
    the dead worker's: clients see a death a moment before the stub does."""

    def is_restarted() -> bool:
        return restarts(server, stage, pipeline) > before and is_back(server, pipeline)

    wait_for(is_restarted, timeout_s, f"stage {stage} restarted")


def wait_until_idle(server: RunningServer, pipeline: str = "toy", timeout_s: float = SLOTS_FREE_S) -> None:
    """Wait until no stage holds anything; `timeout_s` where an engine may be inside a long step."""
    wait_for(lambda: idle(server, pipeline), timeout_s, f"every slot of {pipeline} free")


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
    return {role: _smaps_kb(pid, "Rss") for role, pid in processes_of(server).items()}


def pss_mib(pids: Iterable[int]) -> float:
    """Memory of processes together, shared pages counted once; one that has just ended counts nothing."""
    total_kb = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total_kb += _smaps_kb(pid, "Pss")
    return total_kb / 1024


def _smaps_kb(pid: int, field: str) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
