# SPDX-License-Identifier: Apache-2.0
"""Set-up's last step: a real server answers through the toy pipeline. Standard library only.

The expected text and sine show that server, stubs and workers find one another, and that the stubs' numpy works with
the server: the local server's stub silently misreads arrays of numpy 2.
"""

from __future__ import annotations

import time

from triton_omni.backends.config.paths import REPO
from triton_omni.backends.supervisor.errors import SetupError
from triton_omni.backends.supervisor.home import Home
from triton_omni.backends.supervisor.serve.launch import Api, log_tail
from triton_omni.backends.supervisor.serve.temporary import temporary_server

_QUESTION = {"text_input": "go", "stream": False, "modalities": "text,audio", "max_tokens": 2}
_TEXT, _AMPLITUDE = "w0 w1", 0.25
_TIMEOUT_S = 60.0


def check_server(home: Home) -> str:
    """Start the server with one pipeline and ask it; returns a line to report. Raises SetupError if it fails."""
    log, start = home.logs / "self-check.log", time.monotonic()
    options = ["--no-proxy", "--repository", str(REPO / "model_repository" / "toy")]
    hint = f"read {log}; fix the cause, then make setup"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        try:
            with temporary_server(options, sink.fileno(), _TIMEOUT_S) as facts:
                seconds = time.monotonic() - start
                failure = ask_toy(Api(facts["host"], facts["http_port"]))
        except SetupError as error:
            raise SetupError(f"{error.message}:\n{log_tail(log)}", hint=hint) from None
        except (ConnectionError, TimeoutError) as error:
            raise SetupError(f"the server does not answer: {error}", hint=hint) from None
    if failure:
        raise SetupError(f"the server gives a wrong answer: {failure}", hint=f"read {log}")
    return f"    server ready with a pipeline after {seconds:.1f} s; its answer is right"


def ask_toy(api: Api) -> str:
    """Ask the toy pipeline; returns the answer if it is wrong, else an empty text. Raises OSError without a server."""
    status, answer = api.call("POST", "/v2/models/toy/generate", _QUESTION, _TIMEOUT_S)
    if status == 200 and answer["text_output"].strip() == _TEXT and round(max(answer["audio"]), 3) == _AMPLITUDE:
        return ""
    return f"{status} {answer}"[:500]
