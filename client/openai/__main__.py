# SPDX-License-Identifier: Apache-2.0
"""`python -m triton_omni.openai`: the OpenAI proxy in front of a Triton server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import ssl
from pathlib import Path

import uvicorn

from triton_omni.backends.telemetry.logs import stderr_handler
from triton_omni.connection import AsyncClient
from triton_omni.openai.http.access import LOCAL_HOSTS, Access, read_keys
from triton_omni.openai.http.app import make_app
from triton_omni.openai.http.budget import HELD_BYTES
from triton_omni.openai.http.protocol import KEEP_ALIVE_S, MAX_HEAD_BYTES, Protocol, check_uvicorn
from triton_omni.openai.http.settings import BodyLimits, Settings

API_KEY_VARIABLE = "TRITON_OMNI_API_KEY"
GRACE_S = 5


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
    add(
        "--model-alias", action="append", default=[], metavar="ALIAS=MODEL",
        help="a further name of a model, e.g. tts-1=chat; may be repeated",
    )  # fmt: skip
    add(
        "--voice-alias", action="append", default=[], metavar="ALIAS=VOICE",
        help="a further name of a voice, e.g. alloy=heart; may be repeated",
    )  # fmt: skip
    add("--voices", type=Path, metavar="FOLDER", help="clients may upload voices, which are kept here")
    add("--require-voice-consent", action="store_true", help="an uploaded voice needs an uploaded consent")
    add("--lenient", action="store_true", help="drop unknown parameters and name them in x-ignored-parameters")
    add("--api-keys", type=Path, metavar="FILE", help="keys with limits (docs/security.md); read again on SIGHUP")
    add("--insecure", action="store_true", help="listen on other addresses than this machine's own without any key")
    add(
        "--allowed-host", action="append", default=[], metavar="NAME",
        help="without keys: answer to this name in the Host header, too; may be repeated",
    )  # fmt: skip
    add(
        "--cors-origin", action="append", default=[], metavar="ORIGIN",
        help="pages of this origin may call, e.g. https://chat.example; * for all; may be repeated",
    )  # fmt: skip
    add("--max-priority", type=int, default=100, help="of requests without a key of the file (%(default)s)")
    add("--max-total-s", type=float, default=0.0, help="longest total deadline of these; 0: no bound (%(default)s)")
    add("--keep-alive-s", type=int, default=KEEP_ALIVE_S, help="how long idle connections stay open (%(default)s)")
    add("--tls-cert", metavar="FILE", help="certificate chain: serve HTTPS")
    add("--tls-key", metavar="FILE", help="its private key")
    add("--header", action="append", default=[], metavar="NAME=VALUE", help="sent to Triton with every call")
    add("--key-file", type=Path, metavar="FILE", help="file with the operator's key, which `serve --key-file` makes")
    add("--private-urls", action="store_true", help="fetch media of requests from this network's own addresses, too")
    add("--held-mib", type=int, default=HELD_BYTES >> 20, help="for all bodies and media together (%(default)s)")
    return parser


def pairs(items: list[str]) -> dict[str, str]:
    """KEY=VALUE, or a key that is its own value."""
    return {left: right or left for left, _, right in (item.partition("=") for item in items)}


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that the command line asks for. Raises OSError, or ValueError for ones that are not safe."""
    is_local = options.host in LOCAL_HOSTS
    if not (is_local or options.api_key or options.api_keys or options.insecure):
        raise ValueError(
            f"without a key, everyone who reaches {options.host} could use this server. "
            "Workaround: --api-key, --api-keys, or --insecure where a firewall or a gateway guards it"
        )
    if options.api_keys is not None:
        read_keys(options.api_keys)
    _check_tls(options)
    address = options.metrics
    url = "" if not address else address if "://" in address else f"http://{address}/metrics"
    return Settings(
        models=pairs(options.model),
        api_key=options.api_key,
        metrics_url=url,
        private_urls=options.private_urls,
        limits=BodyLimits(held_bytes=options.held_mib << 20),
        model_aliases=pairs(options.model_alias),
        voice_aliases=pairs(options.voice_alias),
        is_lenient=options.lenient,
        cors_origins=tuple(options.cors_origin),
        api_keys=options.api_keys,
        allowed_hosts=LOCAL_HOSTS | {*options.allowed_host} if is_local or options.allowed_host else frozenset(),
        max_priority=options.max_priority,
        max_total_s=options.max_total_s,
        is_public=not is_local,
        voices=options.voices,
        needs_consent=options.require_voice_consent,
    )


def _check_tls(options: argparse.Namespace) -> None:
    """Raise OSError or ValueError for a certificate that cannot be served; a key alone would mean plain HTTP."""
    if options.tls_cert is None:
        if options.tls_key is not None:
            raise ValueError("--tls-key needs --tls-cert")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.tls_cert, options.tls_key)
    except ssl.SSLError as error:
        raise ValueError(f"--tls-cert {options.tls_cert}: no certificate with its private key: {error}") from None
    except OSError as error:
        files = " or ".join(filter(None, (options.tls_cert, options.tls_key)))
        raise ValueError(f"--tls-cert: {files} cannot be read: {error.strerror}") from None


async def serve(options: argparse.Namespace, settings: Settings) -> None:
    """Serve until a signal arrives; SIGHUP reads the key file again."""
    # A gRPC channel belongs to the event loop in which it is created.
    key = options.key_file.read_text().strip() if options.key_file else ""
    app = make_app(AsyncClient(options.triton, pairs(options.header), key), settings)
    access: Access = app.state.access
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, access.reload)
    config = uvicorn.Config(
        app, options.host, options.port, loop="asyncio", timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=options.keep_alive_s, ssl_certfile=options.tls_cert, ssl_keyfile=options.tls_key,
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
    parser = arguments()
    options = parser.parse_args()
    try:
        settings = settings_of(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    asyncio.run(serve(options, settings))


if __name__ == "__main__":
    main()
