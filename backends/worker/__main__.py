# SPDX-License-Identifier: Apache-2.0
"""`python -m triton_omni.backends.worker`: one engine worker.

Started by its stage's stub, which passes a socket (`--fd`), or on any host by the command that `triton-omni doctor`
shows, which names the stub (`--stub`). It tells the stub "ready" (or "failed" and why), serves until the stub is gone,
and exits.
"""

from __future__ import annotations

import argparse
import atexit
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path

from triton_omni.backends.child_process import exit_with_peer
from triton_omni.backends.connectors.base import PeerLost
from triton_omni.backends.control.address import address_towards, host_and_port
from triton_omni.backends.control.hub import Hub, Lost, Peer
from triton_omni.backends.control.link_settings import LinkSettings, parse_ports, take_key
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
    parser.add_argument("--fd", type=int, help="our end of the stub's socket pair")
    parser.add_argument("--address", type=Path, help="unix socket to listen on; with --fd")
    parser.add_argument("--stub", help="address of the stub to join (tcp://host:port), instead of --fd")
    parser.add_argument("--name", default=socket.gethostname(), help="what the stub's log calls this worker")
    parser.add_argument(
        "--host", help="address that other hosts reach this worker at; default: the one towards the stub"
    )
    parser.add_argument(
        "--ports", type=parse_ports, default=(0, 0), help="ports to listen on for other hosts: first-last"
    )
    parser.add_argument("--tls", nargs=3, default=(), help="files of certificate, key, authority's certificate")
    parser.add_argument("--pipeline", required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models-dir", default="")
    parser.add_argument("--options", default="{}", help="engine options as JSON")
    args = parser.parse_args()
    if (args.fd is None) == (args.stub is None) or (args.fd is None) != (args.address is None):
        parser.error("either --stub, or --fd and --address must be given")
    text = f"%(levelname).1s %(asctime)s {args.pipeline}_{args.stage} %(message)s"
    handler = logs.stderr_handler(text, pipeline=args.pipeline, stage=args.stage)
    logging.basicConfig(level=logs.level(), handlers=[handler])
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))  # lets `finally` close the engine and its children
    name = f"{args.pipeline}/{args.stage}"
    if args.stub is None:
        sock = socket.socket(fileno=args.fd)
        exit_with_peer(args.fd, partial(args.address.unlink, missing_ok=True))
        hub = _hub(name, args.address, args)
        stub = hub.adopt(sock)
    else:
        folder = Path(tempfile.mkdtemp(prefix="triton-omni-worker-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        try:
            hub = _hub(name, folder / "worker.sock", args)
            stub = _join(hub, args.stub, args.name, folder)
        except (OSError, ValueError) as error:  # PeerLost too: no such stub, or it refused
            log.error("cannot join %s: %s", args.stub, error)
            return 1
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


def _hub(name: str, address: Path, args: argparse.Namespace) -> Hub:
    """The worker's links; with a device slab on each where the worker has a GPU."""
    links = None
    if args.stub is not None or args.host is not None:
        host = args.host or address_towards(host_and_port(str(args.stub))[0])
        links = LinkSettings(host, take_key(os.environ), args.ports, tuple(args.tls))
    if args.device != "cuda":
        return Hub(name, address, links=links)
    from triton_omni.backends.connectors.cuda_ipc import device_slab, gpu_uuid

    return Hub(name, address, device_slab, gpu_uuid(), links)


def _join(hub: Hub, address: str, name: str, folder: Path) -> Peer:
    """Join the stub at `address`; raises PeerLost with the reason if it does not take this worker."""
    stub = hub.connect(address)
    stub.send(PingMessage(hub.name, "joining", text=name))
    joined = False
    while not (joined and hub.hang_up_fds(stub)):
        for _, item in hub.poll(1.0):
            if isinstance(item, Lost):
                raise PeerLost("the link was closed before the stub took this worker")
            if isinstance(item, PingMessage) and item.state == "refused":
                raise PeerLost(item.text)
            joined |= isinstance(item, PingMessage) and item.state == "joined"
    for fd in hub.hang_up_fds(stub):
        exit_with_peer(fd, partial(shutil.rmtree, folder, ignore_errors=True))
    return stub


def _say(hub: Hub, stub: Peer, message: PingMessage) -> None:
    """Send a last message and wait until it has left."""
    stub.send(message)
    while stub.connector.link.backlog_packets and not stub.lost:
        hub.poll(1.0)


if __name__ == "__main__":
    sys.exit(main())
