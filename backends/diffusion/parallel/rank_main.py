# SPDX-License-Identifier: Apache-2.0
"""Process of one rank of an instance, started by ranks.py.

Imports are light until the watchdog thread runs, so that the process ends with its engine even while torch is imported.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from pathlib import Path

from triton_omni.backends.child_process import exit_with_peer
from triton_omni.backends.telemetry import logs


def main() -> int:
    """Load, join, and serve until the engine's end of the socket closes."""
    parser = argparse.ArgumentParser(prog="triton_omni.backends.diffusion.parallel.rank_main")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="model in diffusers layout")
    parser.add_argument("--fd", type=int, required=True, help="this rank's end of the engine's socket pair")
    parser.add_argument("--store", type=int, required=True, help="file descriptor of torch.distributed's FileStore")
    parser.add_argument("--device", required=True, help="cpu or cuda")
    parser.add_argument("--options", required=True, help="the stage's engine options as JSON")
    args = parser.parse_args()
    exit_with_peer(args.fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine ends this process, not a terminal's Ctrl-C
    handler = logs.stderr_handler(f"%(levelname).1s %(asctime)s rank {args.rank} %(message)s", rank=str(args.rank))
    logging.basicConfig(level=logs.level(), handlers=[handler])

    from triton_omni.backends.diffusion.parallel.rank_worker import serve

    return serve(socket.socket(fileno=args.fd), args.rank, args.folder, args.device, args.store, args.options)


if __name__ == "__main__":
    sys.exit(main())
