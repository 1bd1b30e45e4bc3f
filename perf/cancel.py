# SPDX-License-Identifier: Apache-2.0
"""Measure how long after a client leaves every stage is free: by closing the stream, and by an abort of the id.

    python -m perf.cancel [--cancels 200] [--beside 0]

On the toy pipeline, in three phases: while it streams, in the silence of the last stage, before the first token.
One process takes both times by one clock: it leaves, and then asks every worker over a link of its own how many runs
it has, again and again. `--beside` other requests stream meanwhile.
"""

from __future__ import annotations

import argparse
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from perf.harness import Server, bare_server, repository
from tests.kit.load_generator import Plan, body, run_one, send
from triton_omni.backends.config.paths import operator_key
from triton_omni.backends.control import Hub, Peer
from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.records import read_records
from triton_omni.backends.core.ids import new_request_id

SOON_S = 30.0
SLOW = {"tokens": {"delay_s": 0.005}}
# options of the stages, tokens, pieces that come before the phase is reached, stages then at work
PHASES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "streaming": (SLOW, 1000, 20, 3),
    "silent last stage": ({"wave": {"hold_after": 2}}, 10, 12, 1),
    "before the first token": ({"tokens": {"hold_after": 0}}, 10, 0, 3),
}
Leave = Callable[[grpcclient.InferenceServerClient, str], None]


class Workers:
    """How many runs each worker of the toy has, over links that stay."""

    def __init__(self, server: Server) -> None:
        self._hub = Hub("perf")
        records = [record for record in read_records(server.run_dir) if record.worker_pid]
        self._peers: list[Peer] = [self._hub.connect(record.address) for record in records]

    def runs(self) -> list[int]:
        """Ask all, wait for all."""
        for peer in self._peers:
            peer.send(msg.PingMessage())
        found: dict[Peer, int] = {}
        while len(found) < len(self._peers):
            found |= {
                peer: item.live for peer, item in self._hub.poll(SOON_S) if peer and isinstance(item, msg.PingMessage)
            }
        return list(found.values())

    def wait(self, true: Callable[[list[int]], bool]) -> None:
        """Ask until it is true; TimeoutError if it never is."""
        deadline = time.monotonic() + SOON_S
        while not true(self.runs()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"runs in the workers: {self.runs()}")


@contextmanager
def streaming(url: str) -> Iterator[tuple[grpcclient.InferenceServerClient, queue.SimpleQueue[Any]]]:
    """A client with a started stream, and its responses."""
    responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: responses.put(result))
        try:
            yield client, responses
        finally:
            client.stop_stream(cancel_requests=True)


def close(client: grpcclient.InferenceServerClient, _request_id: str) -> None:
    client.stop_stream(cancel_requests=True)


def aborter(control: grpcclient.InferenceServerClient, key: str) -> Leave:
    """Leaves by an abort that `control` sends with the operator's key."""
    return lambda _client, request_id: send(control, Plan({"operation": "abort", "target": request_id}, key=key))


def free_s(server: Server, workers: Workers, phase: str, leave: Leave, beside: int) -> float:
    """Seconds from leaving in a phase until no worker has a run of the request."""
    stages, tokens, pieces, working = PHASES[phase]
    request_id = new_request_id()
    with streaming(server.grpc) as (client, responses):
        send(client, Plan(body(tokens, **stages), request_id=request_id))
        for _ in range(pieces):
            responses.get(timeout=SOON_S)
        workers.wait(lambda runs: sum(runs) == beside * len(runs) + working)
        left = time.monotonic()
        leave(client, request_id)
        workers.wait(lambda runs: sum(runs) == beside * len(runs))
        return time.monotonic() - left


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cancels", type=int, default=200, help="per phase and way of leaving")
    parser.add_argument("--beside", type=int, default=0, help="requests that stream meanwhile")
    args = parser.parse_args()
    with bare_server([repository("toy")]) as server, streaming(server.grpc) as (control, _):
        workers, abort = Workers(server), aborter(control, operator_key(server.run_dir))
        endless = Plan(body(1_000_000, tokens={"delay_s": 0.02}), request_id="beside", timeout_s=3600)
        ended: list[str] = []
        others = [
            threading.Thread(target=lambda: ended.extend(run_one(server.grpc, endless).ends))
            for _ in range(args.beside)
        ]
        for other in others:
            other.start()
        workers.wait(lambda runs: min(runs) == args.beside)
        print("| phase | left by | cancels | p50 ms | p99 ms | max ms | load |\n|---|---|---|---|---|---|---|")
        for phase in PHASES:
            for name, leave in (("closing the stream", close), ("abort", abort)):
                taken = [free_s(server, workers, phase, leave, args.beside) * 1e3 for _ in range(args.cancels)]
                p50, p99 = np.percentile(taken, [50, 99])
                load = os.getloadavg()[0]
                assert not ended, f"a request beside ended: {ended}"
                print(f"| {phase} | {name} | {len(taken)} | {p50:.1f} | {p99:.1f} | {max(taken):.1f} | {load:.0f} |")
        abort(control, "beside")
        for other in others:
            other.join(SOON_S)


if __name__ == "__main__":
    main()
