# SPDX-License-Identifier: Apache-2.0
"""Python's logging into Triton's log."""

from __future__ import annotations

import logging

import triton_python_backend_utils as pb

from triton_omni.backends.telemetry import logs


class TritonHandler(logging.Handler):
    """Hands records to Triton's logger, at Triton's levels."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            pb.Logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            pb.Logger.log_warn(text)
        else:
            pb.Logger.log_info(text)


def use_triton_log(model: str, **own: str) -> None:
    """Send our loggers' records of this process to Triton's log; JSON lines go to stderr, as Triton adds a head."""
    if logs.is_json():
        handler = logs.stderr_handler("", model=model, **own)
    else:
        handler = TritonHandler()
        handler.setFormatter(logging.Formatter(f"{model}: %(name)s: %(message)s"))
    root = logging.getLogger("triton_omni")
    root.handlers = [handler]
    root.propagate = False
    root.setLevel(logs.level())
