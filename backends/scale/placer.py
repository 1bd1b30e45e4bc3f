# SPDX-License-Identifier: Apache-2.0
"""Starts and ends workers on the nodes of a Ray cluster: a child of a stub, and the only process of ours with Ray.

Run by an interpreter that has Ray, from this file; imports nothing else of ours. Ray ends its driver when the cluster's
head is gone for a minute, which a stub must survive. JSON lines:

    in   {"do": "place", "id", "argv", "environment", "cpus", "gpus", "resources"}     {"do": "kill", "id"}
    out  {"is": "up"}   {"is": "pending", "id", "why"}
         {"is": "placed", "id", "node", "address"}   {"is": "dead", "id", "why"}

A worker is the child of a detached actor named by `id`: it survives this process, ends with its actor, and its actor
ends with it, so that its GPUs are free again. Ray does not restart it: the stub decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from typing import Any

NAMESPACE = "triton-omni"
PENDING_S = 5.0  # a worker that is not placed by then is reported as pending, with the reason


def main() -> None:
    """Serve standard input until it ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints
    lock = threading.Lock()

    def say(**message: Any) -> None:
        with lock:
            out.write(json.dumps(message) + "\n")

    import ray  # pyright: ignore[reportMissingImports]

    ray.init(address=sys.argv[1], namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    say(**{"is": "up"})
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "place":
            threading.Thread(target=place, args=(ray, order, say), daemon=True).start()
        else:
            with contextlib.suppress(ValueError):  # there is no such actor any more
                ray.kill(ray.get_actor(order["id"]))
    os._exit(0)  # no destructor of Ray's may keep us


def place(ray: Any, order: dict[str, Any], say: Any) -> None:
    """Place one worker and wait for its end."""
    name = order["id"]
    try:
        actor = (
            ray.remote(_host_class())
            .options(
                name=name, lifetime="detached", max_restarts=0, num_cpus=order["cpus"], num_gpus=order["gpus"],
                resources=order["resources"] or None,
            )
            .remote()
        )  # fmt: skip
        where = actor.where.remote()
        while not ray.wait([where], timeout=PENDING_S)[0]:
            say(**{"is": "pending", "id": name, "why": why_pending(ray.nodes(), order)})
        node, address = ray.get(where)
        ended = actor.run.remote(order["argv"], order["environment"])
        say(**{"is": "placed", "id": name, "node": node, "address": address})
        ray.get(ended)
    except (ray.exceptions.RayError, ValueError) as error:
        say(**{"is": "dead", "id": name, "why": str(error).splitlines()[0][:200] or type(error).__name__})


def why_pending(nodes: list[dict[str, Any]], order: dict[str, Any]) -> str:
    """Why no node holds a worker now, from what Ray says of its nodes."""
    wanted = {"CPU": order["cpus"], "GPU": order["gpus"]} | order["resources"]
    demand = ", ".join(f"{amount:g} {name}" for name, amount in wanted.items() if amount) or "nothing"
    alive = [node for node in nodes if node["Alive"]]
    able = [n for n in alive if all(n["Resources"].get(name, 0) >= amount for name, amount in wanted.items())]
    if able:
        return f"needs {demand}; the {len(able)} node(s) that have it are in use"
    return f"needs {demand}; none of the {len(alive)} node(s) of the cluster has that"


def _host_class() -> type:
    """The actor's class; made here so that its code travels with it: nodes need not have this file."""

    class WorkerHost:
        """Lives on a node; the worker is its child."""

        def where(self) -> tuple[str, str]:
            import ray  # pyright: ignore[reportMissingImports]

            return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

        def run(self, argv: list[str], environment: dict[str, str]) -> None:
            import ctypes
            import os
            import signal
            import subprocess

            import ray  # pyright: ignore[reportMissingImports]

            libc = ctypes.CDLL(None)
            own = {**os.environ, **environment}
            own.setdefault("CUDA_VISIBLE_DEVICES", "")  # Ray leaves it unset for a worker without GPUs
            with subprocess.Popen(
                argv, env=own, cwd="/", stdin=subprocess.DEVNULL, preexec_fn=lambda: libc.prctl(1, signal.SIGKILL)
            ) as child:
                child.wait()
            ray.actor.exit_actor()

    return WorkerHost


if __name__ == "__main__":
    main()
