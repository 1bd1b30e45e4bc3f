# SPDX-License-Identifier: Apache-2.0
"""Set-up's last step: a real server answers through the toy pipeline. Standard library only.

Its words and its sine show that server, stubs and workers find one another, and that the stubs' numpy is one that the
server reads right: of numpy 2 the local server's stub makes other numbers without a word.
"""

from __future__ import annotations

import time

from triton_omni.backends.config.paths import REPO
from triton_omni.backends.supervisor.errors import Problem
from triton_omni.backends.supervisor.home import Home
from triton_omni.backends.supervisor.serve.launch import Api, log_tail
from triton_omni.backends.supervisor.serve.served import served

_QUESTION = {"text_input": "go", "stream": False, "modalities": "text,audio", "max_tokens": 2}
_WORDS, _AMPLITUDE = "w0 w1", 0.25
_TIMEOUT_S = 60.0


def check_server(home: Home) -> str:
    """Start the server with one pipeline and ask it; returns a line for a person. Raises Problem if it fails."""
    log, start = home.logs / "self-check.log", time.monotonic()
    options = ["--no-proxy", "--repository", str(REPO / "model_repository" / "toy")]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        try:
            with served(options, sink.fileno(), _TIMEOUT_S) as facts:
                seconds = time.monotonic() - start
                wrong = ask(Api(facts["host"], facts["http_port"]))
        except Problem as problem:
            raise Problem(f"{problem.what}:\n{log_tail(log)}", f"read {log}; make setup after the cure") from None
        except (ConnectionError, TimeoutError) as error:
            raise Problem(f"the server does not answer: {error}", f"read {log}; make setup after the cure") from None
    if wrong:
        raise Problem(f"the server answers wrongly: {wrong}", f"read {log}")
    return f"    server ready with a pipeline after {seconds:.1f} s; it answers right"


def ask(api: Api) -> str:
    """Ask the toy pipeline; returns what is wrong with the answer, if anything. Raises OSError without a server."""
    status, answer = api.call("POST", "/v2/models/toy/generate", _QUESTION, _TIMEOUT_S)
    if status == 200 and answer["text_output"].strip() == _WORDS and round(max(answer["audio"]), 3) == _AMPLITUDE:
        return ""
    return f"{status} {answer}"[:500]
