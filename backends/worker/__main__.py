# SPDX-License-Identifier: Apache-2.0
"""`python -m triton_omni.backends.worker`: one engine worker. Started by its stage's stub, never by hand.

It tells the stub "ready" (or "failed" and why) with its first Ping, serves until the stub is gone, and exits.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import socket
import sys
from functools import partial
from pathlib import Path

from triton_omni.backends.child_process import exit_with_peer
from triton_omni.backends.control.hub import Hub, Peer
from triton_omni.backends.control.messages import PingMessage
from triton_omni.backends.core.errors import describe
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines import load
from triton_omni.backends.telemetry import logs
from triton_omni.backends.worker.loop import Worker

log = logging.getLogger("triton_omni.worker")


def main() -> int:
    """Load the engine, say so, serve."""
    parser = argparse.ArgumentParser(prog="triton_omni.backends.worker")
    parser.add_argument("--fd", type=int, required=True, help="our end of the stub's socket pair")
    parser.add_argument("--address", type=Path, required=True, help="unix socket to listen on")
    parser.add_argument("--pipeline", required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models-dir", default="")
    parser.add_argument("--options", default="{}", help="engine options as JSON")
    args = parser.parse_args()
    text = f"%(levelname).1s %(asctime)s {args.pipeline}_{args.stage} %(message)s"
    handler = logs.stderr_handler(text, pipeline=args.pipeline, stage=args.stage)
    logging.basicConfig(level=logs.level(), handlers=[handler])
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))  # lets `finally` close the engine and its children
    sock = socket.socket(fileno=args.fd)
    exit_with_peer(args.fd, partial(args.address.unlink, missing_ok=True))
    name = f"{args.pipeline}/{args.stage}"
    hub = _hub(name, args.address, args.device)
    stub = hub.adopt(sock)
    try:
        pipeline = load(args.pipeline)
        options = json.loads(args.options)
        context = EngineContext(args.pipeline, args.stage, options, args.device, args.models_dir, hub.wake)
        engine = pipeline.stage(args.stage).engine(context)
    except Exception as error:  # any failure to load becomes the model's load error
        log.exception("the engine did not load")
        _say(hub, stub, PingMessage(name, "failed", 0, describe(error)))
        return 1
    stub.send(PingMessage(name, "ready"))
    try:
        Worker(pipeline, args.stage, engine, hub).run_forever(stub)
    finally:
        engine.close()
        hub.close()
    return 0


def _hub(name: str, address: Path, device: str) -> Hub:
    """The worker's links; with a device slab on each where the worker has a GPU."""
    if device != "cuda":
        return Hub(name, address)
    from triton_omni.backends.connectors.cuda_ipc import device_slab, gpu_uuid

    return Hub(name, address, device_slab, gpu_uuid())


def _say(hub: Hub, stub: Peer, message: PingMessage) -> None:
    """Send a last message and wait until it has left."""
    stub.send(message)
    while stub.connector.link.backlog_packets and not stub.lost:
        hub.poll(1.0)


if __name__ == "__main__":
    sys.exit(main())
