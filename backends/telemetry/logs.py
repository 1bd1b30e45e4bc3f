# SPDX-License-Identifier: Apache-2.0
"""Log format of all processes: text, or with TRITON_OMNI_LOG_FORMAT=json one JSON object per line on stderr.

Structured fields of a record are passed in `extra` under the names in FIELDS. A failed request is logged once, by the
process that ends it, with its error code. Request content is never logged.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

from triton_omni.backends.core.errors import OmniError

FORMAT_VARIABLE, LEVEL_VARIABLE = "TRITON_OMNI_LOG_FORMAT", "TRITON_OMNI_LOG"
FIELDS = ("request_id", "code", "where")


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object. `own`: fields of the process (pipeline, stage)."""

    def __init__(self, **own: str) -> None:
        super().__init__()
        self._own = own

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{at}.{int(record.msecs):03}Z", "level": record.levelname.lower(), "logger": record.name}
        line |= self._own | {"pid": record.process, "message": record.getMessage()}
        line |= {name: record.__dict__[name] for name in FIELDS if record.__dict__.get(name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def about(request_id: str, error: OmniError) -> dict[str, str]:
    """Fields of a failed request, for `extra`."""
    return {"request_id": request_id, "code": error.code, "where": error.where}


def is_json() -> bool:
    """True if TRITON_OMNI_LOG_FORMAT is "json". Raises ValueError for an unknown format."""
    name = os.environ.get(FORMAT_VARIABLE, "text")
    if name not in ("text", "json"):
        raise ValueError(f"{FORMAT_VARIABLE} must be text or json (got '{name}')")
    return name == "json"


def level() -> str:
    """Minimum log level, from TRITON_OMNI_LOG."""
    return os.environ.get(LEVEL_VARIABLE, "INFO")


def stderr_handler(text_format: str, **own: str) -> logging.Handler:
    """A stderr handler in the configured format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(**own) if is_json() else logging.Formatter(text_format))
    return handler
