# SPDX-License-Identifier: Apache-2.0
"""`python -m triton_omni.openai`: the OpenAI proxy in front of a Triton server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path

import uvicorn

from triton_omni.backends.telemetry.logs import stderr_handler
from triton_omni.connection import AsyncClient
from triton_omni.openai.http.app import Settings, make_app
from triton_omni.openai.http.bodies import BodyLimits
from triton_omni.openai.http.budget import HELD_BYTES
from triton_omni.openai.http.protocol import Protocol, check_uvicorn

KEY_METADATA = "triton-grpc-protocol-triton-omni-key"  # opens restricted APIs, such as the list of models
API_KEY_VARIABLE = "TRITON_OMNI_API_KEY"
GRACE_S = 5
MAX_HEAD_BYTES = 64 * 1024


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m triton_omni.openai", description=__doc__)
    add = parser.add_argument
    add("--triton", default="127.0.0.1:8001", metavar="HOST:PORT", help="Triton's gRPC service (%(default)s)")
    add("--metrics", default="", metavar="HOST:PORT", help="Triton's metrics service, shown on /metrics")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=9000, help="port to listen on (%(default)s)")
    add("--api-key", default=os.environ.get(API_KEY_VARIABLE, ""), help=f"clients must send it; or ${API_KEY_VARIABLE}")
    add(
        "--model", action="append", default=[], metavar="[ALIAS=]PIPELINE",
        help="serve this pipeline, under another name if given; may be repeated (default: all public models)",
    )  # fmt: skip
    add("--header", action="append", default=[], metavar="NAME=VALUE", help="sent to Triton with every call")
    add("--key-file", type=Path, metavar="FILE", help="file with the operator's key, which `serve --key-file` makes")
    add("--private-urls", action="store_true", help="fetch media of requests from this network's own addresses, too")
    add("--held-mib", type=int, default=HELD_BYTES >> 20, help="for all bodies and media together (%(default)s)")
    return parser


def pairs(items: list[str]) -> dict[str, str]:
    """KEY=VALUE, or a key that is its own value."""
    return {left: right or left for left, _, right in (item.partition("=") for item in items)}


async def serve(options: argparse.Namespace) -> None:
    """Serve until a signal arrives."""
    address = options.metrics
    url = "" if not address else address if "://" in address else f"http://{address}/metrics"
    limits = BodyLimits(held_bytes=options.held_mib << 20)
    settings = Settings(pairs(options.model), options.api_key, url, options.private_urls, limits)
    headers = pairs(options.header)
    if options.key_file:
        headers[KEY_METADATA] = options.key_file.read_text().strip()
    # A gRPC channel belongs to the event loop in which it is created.
    app = make_app(AsyncClient(options.triton, headers), settings)
    config = uvicorn.Config(
        app, options.host, options.port, loop="asyncio", timeout_graceful_shutdown=GRACE_S,
        http=Protocol,  # on h11: httptools bounds neither the size of headers nor their number
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,  # uvicorn's loggers share the format of all others
    )  # fmt: skip
    check_uvicorn(config)
    await uvicorn.Server(config).serve()


def main() -> None:
    """Run the proxy."""
    handler = stderr_handler("%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per read of Triton's metrics is too many
    asyncio.run(serve(arguments().parse_args()))


if __name__ == "__main__":
    main()
