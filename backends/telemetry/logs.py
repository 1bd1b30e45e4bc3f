# SPDX-License-Identifier: Apache-2.0
"""How our processes log: text for people, or with TRITON_OMNI_LOG_FORMAT=json one JSON object per line on stderr.

Facts about a record travel in `extra` under the names of FACTS. A failed request is logged once, by the process that
ends it, with its code; what a client sent is never logged.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

from triton_omni.backends.core.errors import OmniError

FORMAT_VARIABLE, LEVEL_VARIABLE = "TRITON_OMNI_LOG_FORMAT", "TRITON_OMNI_LOG"
FACTS = ("request_id", "code", "where")


class JsonLines(logging.Formatter):
    """A record as one JSON object; `own` says who writes (pipeline, stage)."""

    def __init__(self, **own: str) -> None:
        super().__init__()
        self._own = own

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{at}.{int(record.msecs):03}Z", "level": record.levelname.lower(), "logger": record.name}
        line |= self._own | {"pid": record.process, "message": record.getMessage()}
        line |= {name: record.__dict__[name] for name in FACTS if record.__dict__.get(name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def about(request_id: str, error: OmniError) -> dict[str, str]:
    """The facts of a failed request, for `extra`."""
    return {"request_id": request_id, "code": error.code, "where": error.where}


def is_json() -> bool:
    """True if the environment asks for JSON lines. Raises ValueError for a format that is none."""
    name = os.environ.get(FORMAT_VARIABLE, "text")
    if name not in ("text", "json"):
        raise ValueError(f"{FORMAT_VARIABLE} must be text or json, not '{name}'")
    return name == "json"


def level() -> str:
    """The level below which nothing is logged."""
    return os.environ.get(LEVEL_VARIABLE, "INFO")


def stderr_handler(text_format: str, **own: str) -> logging.Handler:
    """A handler that writes to stderr in the format that the environment asks for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(**own) if is_json() else logging.Formatter(text_format))
    return handler
