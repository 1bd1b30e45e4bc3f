# SPDX-License-Identifier: Apache-2.0
"""One command for every number of perf/README: ours beside what others would do, alternating, on this machine.

    python -m perf.bench [--turns 5] [--only chat,images] [--out out/bench]       `make bench`, about 20 minutes
    python -m perf.bench --smoke                                                  `make bench-smoke`, two minutes

Sections: `chat` (server and proxy beside the same engines in one process, and whole answers one after another), `vllm`
(text beside vLLM's own OpenAI server), `images` (beside diffusers), `omni` (qwen3_omni, tiny checkpoint), `toy` (what a
message costs on its way) and `links`. `--smoke` measures `chat` at 4 streams and `toy`, and fails if a guard is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf import connector, inprocess, omni
from perf.clients import over_grpc, over_http
from perf.harness import CpuClock, Server, bare_server, repository, request_json
from perf.measures import RequestTrace, Summary, first_ms, summarize
from perf.paired import Better, Report, Values, alternate, compare
from perf.rivals import OneProcess, Worker, diffusers, models_dir, one_process, vllm_server
from triton_omni.backends.pipelines import load
from triton_omni.backends.supervisor.home import REPO, find_home
from triton_omni.backends.supervisor.serve.launch import LOCAL
from triton_omni.backends.tools.digits.data import evaluation_set

PROXY_TIMEOUT_S = 60.0
SPEECH: Mapping[str, tuple[str, Better]] = {
    "requests/s": ("1/s", "higher"), "first text": ("ms", "lower"), "first audio": ("ms", "lower"),
    "real-time factor": ("", "lower"),
}  # fmt: skip
TEXT: Mapping[str, tuple[str, Better]] = {
    "requests/s": ("1/s", "higher"), "first text": ("ms", "lower"), "CPU": ("s/request", "lower"),
}  # fmt: skip
IMAGES: Mapping[str, tuple[str, Better]] = {"images/s": ("1/s", "higher"), "mean wait": ("s", "lower")}
TEXT_TOKENS = 64
IMAGE = {"width": 64, "height": 64, "num_inference_steps": 12, "true_cfg_scale": 2.5}


@dataclass(frozen=True)
class Effort:
    """How much is measured: turns of each comparison, and the numbers of streams."""

    turns: int
    streams: tuple[int, ...]
    per_stream: int = 2

    def requests(self, streams: int) -> int:
        return max(4, self.per_stream * streams)


# --- subjects ------------------------------------------------------------------------------------------------------
@contextmanager
def proxy(grpc: str) -> Iterator[tuple[str, int]]:
    """The OpenAI proxy in front of a server, as users start it: its address and pid."""
    with socket.create_server((LOCAL, 0)) as listener:
        port = listener.getsockname()[1]
    words = [str(find_home().engine_python), "-m", "triton_omni.openai", "--port", str(port), "--triton", grpc]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + PROXY_TIMEOUT_S
        while not _listens(port):
            if child.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError("the proxy did not start")
            time.sleep(0.1)
        yield f"http://{LOCAL}:{port}", child.pid
    finally:
        child.terminate()
        child.wait(PROXY_TIMEOUT_S)


def _listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex((LOCAL, port)) == 0


def speech_values(traces: Sequence[RequestTrace]) -> Values:
    """What a client felt of one load; RuntimeError if a request failed."""
    found = summarize(traces)
    _check(found)
    values = {"requests/s": found.requests_per_s, "first text": found.first_text_p50_ms}
    if any(one.of("audio") for one in traces):
        values |= {"first audio": found.first_audio_p50_ms, "real-time factor": found.rtf_p50}
    return values


def _check(found: Summary) -> None:
    if found.errors:
        raise RuntimeError(f"{found.errors} of {found.requests} requests failed")


def _openai(request: dict[str, Any], model: str) -> dict[str, Any]:
    """A GenerateRequest of perf/inputs as a body of chat completions."""
    body: dict[str, Any] = {"model": model, "messages": request["messages"], **request["sampling"]}
    if "audio" in request.get("modalities", ()):
        voice = load(model).about["voices"]
        assert isinstance(voice, list)
        body |= {"modalities": request["modalities"], "audio": {"voice": voice[0], "format": "pcm16"}}
    return body


# --- sections ------------------------------------------------------------------------------------------------------
def chat(report: Report, effort: Effort) -> None:
    """Server and proxy beside the same engines in one process; the latter also as whole answers one after another."""
    request = json.loads(request_json("chat"))
    body = _openai(request, "chat")
    with ExitStack() as stack:
        alone: OneProcess = stack.enter_context(one_process("chat"))
        server: Server = stack.enter_context(bare_server([repository("chat")]))
        root, _ = stack.enter_context(proxy(server.grpc))
        for streams in effort.streams:
            count = effort.requests(streams)

            def grpc(streams: int = streams, count: int = count) -> Values:
                return speech_values(over_grpc(server.grpc, "chat", lambda _: request, streams, count))

            def http(streams: int = streams, count: int = count) -> Values:
                return speech_values(over_http(root, lambda _: body, streams, count))

            def engines(how: str = "", streams: int = streams, count: int = count) -> Values:
                return speech_values(alone.load(streams, count, how)[0])

            subjects: dict[str, Callable[[], Values]] = {"server": grpc, "proxy": http, "one process": engines}
            if streams <= 4 and len(effort.streams) > 1:
                subjects["whole answers"] = lambda engines=engines, streams=streams: engines("whole", count=streams)
            alternate(subjects, 1)  # lazy set-up
            found = alternate(subjects, effort.turns)
            where = f"{streams} streams"
            report.comparisons += compare(found, "server", "one process", "chat with speech", where, SPEECH)
            report.comparisons += compare(found, "proxy", "one process", "chat with speech", where, SPEECH)
            report.comparisons += compare(found, "proxy", "server", "chat with speech", where, SPEECH)
            if "whole answers" in found:
                report.comparisons += compare(found, "proxy", "whole answers", "whole answers", where, SPEECH)


def vllm(report: Report, effort: Effort) -> None:
    """Text through our proxy beside vLLM's own server: same checkpoint, thread count and client; no penalty."""
    context = inprocess.contexts(load("chat"))["thinker"]
    variables = load("chat").stage("thinker").environment(context)
    options = context.options
    flags = ["--dtype", str(options["dtype"]), "--max-model-len", str(options["max_model_len"])]
    flags += ["--max-num-seqs", str(options["max_num_seqs"]), "--enforce-eager", "--no-enable-log-requests"]
    space = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # OMP_NUM_THREADS counts
    with ExitStack() as stack:
        theirs = stack.enter_context(vllm_server(models_dir() / str(options["model"]), {**variables, **space}, *flags))
        server = stack.enter_context(bare_server([repository("chat")]))
        root, proxy_pid = stack.enter_context(proxy(server.grpc))
        number = iter(range(1 << 30))

        def body(model: str) -> Callable[[int], dict[str, Any]]:
            return lambda _: {
                "model": model, "max_tokens": TEXT_TOKENS, "ignore_eos": True, "temperature": 0,
                "repetition_penalty": 1.0,
                "messages": [{"role": "user", "content": f"{next(number)}: what makes the sea salty?"}],
            }  # fmt: skip

        for streams in effort.streams:
            count = effort.requests(streams)

            def ours(streams: int = streams, count: int = count) -> Values:
                watched = {"proxy": proxy_pid, **server.pids()}
                clock = CpuClock(watched)
                values = dict(speech_values(over_http(root, body("chat"), streams, count)))
                return values | {"CPU": sum(clock.spent().values()) / count}

            def vllms(streams: int = streams, count: int = count) -> Values:
                before_s = theirs.cpu_s()
                values = dict(speech_values(over_http(theirs.root, body(theirs.model), streams, count)))
                return values | {"CPU": (theirs.cpu_s() - before_s) / count}

            subjects = {"proxy": ours, "vLLM's server": vllms}
            alternate(subjects, 1)
            found = alternate(subjects, effort.turns)
            report.comparisons += compare(
                found, "proxy", "vLLM's server", "text beside vLLM's server", f"{streams} streams", TEXT
            )


def images(report: Report, effort: Effort) -> None:
    """Images of one size beside diffusers' pipeline, one by one and as one batch of all prompts."""
    folder = REPO / "backends" / "pipelines" / "image" / "digits"
    prompts = [prompt for prompt, _ in evaluation_set(max(effort.streams))]
    params = {"width": 64, "height": 64, "steps": 12, "true_cfg_scale": 2.5, "negative_prompt": " "}
    with ExitStack() as stack:
        theirs: Worker = stack.enter_context(diffusers(folder))
        server = stack.enter_context(bare_server([repository("image")]))
        for streams in effort.streams:

            def ours(streams: int = streams) -> Values:
                started_s = time.monotonic()
                traces = over_grpc(
                    server.grpc, "image",
                    lambda n: {"operation": "image", "input": prompts[n], "image": {**params, "seed": n}},
                    streams, streams,
                )  # fmt: skip
                _check(summarize(traces))
                waits = [(first_ms(one, "image") or 0.0) / 1e3 for one in traces]
                return {"images/s": streams / (time.monotonic() - started_s), "mean wait": statistics.mean(waits)}

            def stock(batch: bool, streams: int = streams) -> Values:
                asked = {"prompts": prompts[:streams], "seeds": list(range(streams)), "batch": batch, "options": IMAGE}
                ends_s, _ = theirs.ask(asked)
                return {"images/s": streams / ends_s[-1], "mean wait": statistics.mean(ends_s)}

            subjects: dict[str, Callable[[], Values]] = {
                "server": ours, "diffusers one by one": lambda stock=stock: stock(False),
                "diffusers, one batch": lambda stock=stock: stock(True),
            }  # fmt: skip
            alternate(subjects, 1)
            found = alternate(subjects, effort.turns)
            for other in list(subjects)[1 : 2 if streams == 1 else 3]:
                report.comparisons += compare(found, "server", other, "images", f"{streams} at once", IMAGES)


def qwen3_omni(report: Report, effort: Effort) -> None:
    """The tiny checkpoint with the real numbers of codes through a real server: no rival, so facts."""
    section, tokens, frames = "qwen3_omni, tiny checkpoint", 48, 40
    started_s = time.monotonic()
    with omni.tiny(frames, max(effort.streams)) as subject:
        report.facts.append((section, "seconds to ready", f"{time.monotonic() - started_s:.1f}"))
        sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"messages": [{"role": "user", "content": omni.TEXT}], "sampling": sampling}
        body["modalities"] = ["text", "audio"]
        over_grpc(subject.grpc, omni.MODEL, lambda _: body, 1, 2)
        for streams in effort.streams:
            turns = [
                speech_values(over_grpc(subject.grpc, omni.MODEL, lambda _: body, streams, effort.requests(streams)))
                for _ in range(effort.turns)
            ]
            for name, (unit, _) in SPEECH.items():
                value = statistics.median(turn[name] for turn in turns)
                report.facts.append((section, f"{streams} streams, {name}", f"{value:.3g} {unit}".strip()))


def toy(report: Report, effort: Effort) -> None:
    """CPU of each process per message on its way, in units of a loop of plain Python measured around it."""
    body = json.loads(request_json("toy"))
    with ExitStack() as stack:
        server = stack.enter_context(bare_server([repository("toy")]))
        root, proxy_pid = stack.enter_context(proxy(server.grpc))
        ask = _openai(body, "toy")
        pids = {role.removeprefix("toy_"): pid for role, pid in server.pids().items()} | {"proxy": proxy_pid}
        turns: list[dict[str, float]] = []
        over_http(root, lambda _: ask, 1, 2)
        for _ in range(max(effort.turns, 3)):
            loop_s = calibration_s()
            clock = CpuClock(pids)
            traces = over_http(root, lambda _: ask, 4, 16 * effort.per_stream)
            spent_s = clock.spent()
            loop_s = (loop_s + calibration_s()) / 2
            messages = sum(len(one.pieces) for one in traces)
            turns.append({role: s / messages / loop_s for role, s in spent_s.items()} | {"loop": loop_s})
        section = "toy, CPU per message that a client got"
        loop_us = 1e6 * statistics.median(turn["loop"] for turn in turns)
        report.facts.append((section, "calibration loop", f"{loop_us:.0f} us"))
        for role in pids:
            value = statistics.median(turn[role] for turn in turns)
            report.facts.append((section, role, f"{value:.3f} loops, {value * loop_us:.0f} us"))


def calibration_s(loops: int = 200) -> float:
    """CPU seconds of one loop of 2,000 additions and dictionary stores: about 0.1 ms on a core of 2024."""
    started_s = time.process_time()
    for _ in range(loops):
        kept: dict[int, int] = {}
        for number in range(2_000):
            kept[number & 63] = number + 1
    return (time.process_time() - started_s) / loops


def links(report: Report, effort: Effort) -> None:
    """One bare link beside pyzmq over ipc."""
    if not connector.has_zmq():
        report.facts.append(("links", "not measured", "pyzmq is not installed"))
        return
    quantities: Mapping[str, tuple[str, Better]] = {"one way": ("us", "lower"), "chunks/s": ("1/s", "higher")}
    for size, count in connector.SIZES.items():

        def passage(carrier: str, size: int = size, count: int = count) -> Values:
            lat_us = connector.passage(carrier, size, connector.PACED[size] // 2, connector.PACE_S[size])[0]
            _, took_s = connector.passage(carrier, size, count // 4, 0.0)
            return {"one way": statistics.median(lat_us[connector.WARM_UP :]), "chunks/s": count / 4 / took_s}

        found = alternate({name: lambda n=name: passage(n) for name in ("shm link", "pyzmq ipc")}, effort.turns)
        where = f"{size // 1024} KiB"
        report.comparisons += compare(found, "shm link", "pyzmq ipc", "one bare link", where, quantities)


SECTIONS: dict[str, Callable[[Report, Effort], None]] = {
    "chat": chat, "vllm": vllm, "images": images, "omni": qwen3_omni, "toy": toy, "links": links,
}  # fmt: skip


# --- guards --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Guard:
    """A bound of `--smoke`. A ratio is of a comparison's section, quantity and other; loops are of a fact of `toy`."""

    name: str
    value: float
    bound: float
    at_least: bool

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


LOOP_BOUNDS = {"toy stub": 6.0, "wave worker": 3.0, "tokens worker": 3.0, "proxy": 6.0}
"""Calibration loops that a process may use for a message; 1 ms of work is about 10."""


def guards(report: Report) -> list[Guard]:
    """The bounds of `--smoke` over what was measured."""
    ratios = {(c.subject, c.other, c.quantity): c.ratio for c in report.comparisons}
    loops = {line: float(value.split()[0]) for section, line, value in report.facts if section.startswith("toy")}
    return [
        Guard("proxy/gRPC, requests/s", ratios["proxy", "server", "requests/s"], 0.9, True),
        Guard("server/one process, requests/s", ratios["server", "one process", "requests/s"], 0.85, True),
        Guard("proxy/one process, first audio", ratios["proxy", "one process", "first audio"], 1.3, False),
        *(Guard(f"{role}, loops per message", loops[role], bound, False) for role, bound in LOOP_BOUNDS.items()),
    ]


def machine() -> dict[str, str]:
    """What a reader has to know of where this ran."""
    model = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.machine())  # fmt: skip
    load_average = os.getloadavg()[0]
    return {"CPU": model, "cores": str(os.cpu_count()), "load at start": f"{load_average:.1f}",
            "date": time.strftime("%Y-%m-%d"), "commit": _commit()}  # fmt: skip


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--only", help="sections, joined by commas")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what was started
    effort = Effort(args.turns, tuple(int(word) for word in args.streams.split(",")))
    names = args.only.split(",") if args.only else list(SECTIONS)
    if args.smoke:
        effort, names = Effort(3, (4,), per_stream=1), ["chat", "toy"]
    report = Report(machine())
    for name in names:
        started_s = time.monotonic()
        print(f"bench: {name} …", file=sys.stderr, flush=True)
        SECTIONS[name](report, effort)
        report.write(args.out)  # a run that is cut short has what it measured
        print(f"bench: {name} took {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
    made = report.write(args.out)
    print(report.markdown())
    broken = [guard for guard in guards(report) if not guard.holds] if args.smoke else []
    for guard in broken:
        print(f"bench: {guard.name} is {guard.value:.2f}, allowed {guard.bound:g}", file=sys.stderr)
    print(f"bench: {'FAILED' if broken else 'done'}; {', '.join(map(str, made))}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
