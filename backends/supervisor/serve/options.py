# SPDX-License-Identifier: Apache-2.0
"""Command-line options of `triton-omni serve`. Standard library only."""

from __future__ import annotations

import argparse
from pathlib import Path

from triton_omni.backends.supervisor.serve.launch import LOCAL, Ports

SILENT_S = 30.0
STAGE_SILENT_S = 300.0
EXIT_TIMEOUT_S = 20


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `serve`."""
    add = parser.add_argument
    add("--repository", action="append", type=Path, default=[], help="model repository; may be repeated")
    add("--deploy", action="append", type=Path, default=[], help="deploy file of a pipeline; may be repeated")
    add("--host", default=LOCAL, help="address to listen on (in a container: 0.0.0.0)")
    add("--http-port", type=int, default=Ports.http)
    add("--grpc-port", type=int, default=Ports.grpc)
    add("--metrics-port", type=int, default=Ports.metrics)
    add("--openai-port", type=int, default=Ports.openai)
    add("--any-port", action="store_true", help="choose free ports")
    add("--no-proxy", action="store_true", help="tritonserver only")
    add(
        "--key-file", type=Path, metavar="FILE", help="file with the operator's key, made if missing (default: new key)"
    )
    add("--insecure", action="store_true", help="let the proxy listen on --host without an API key (docs/security.md)")
    add("--start-timeout-s", type=float, default=900.0, help="how long the models may take to load")
    add("--exit-timeout-s", type=int, default=EXIT_TIMEOUT_S, help="how long open requests may take to end at shutdown")
    add("--silent-s", type=float, default=SILENT_S, help="server or orchestrator without an answer for this long: hung")
    add("--stage-silent-s", type=float, default=STAGE_SILENT_S, help="the same for a stage's worker")
    add("--info-file", type=Path, help="gets addresses and pids as JSON when the server is ready")
    add("flags", nargs="*", help="after --: more flags for tritonserver")
