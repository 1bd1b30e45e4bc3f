# SPDX-License-Identifier: Apache-2.0
"""The one tree of errors: each class carries its wire code and the HTTP status a proxy answers with.

    OmniError
    ├── BadRequest        the caller's fault; `where` names the field
    ├── NotFound          no such model or request
    ├── TooBusy           a limit is reached; try again after `retry_after_s`
    ├── Unavailable       a stage or the server is not ready; try again
    ├── Cancelled         the caller went away or aborted
    ├── DeadlineExceeded  `where` names the stage, the edge or the queue
    ├── StageFailed       `where` names the stage
    └── Internal          a bug of ours

On the wire an error is one line, readable by a person and by a program: `[code:where] message`.
"""

from __future__ import annotations

import re

import msgspec

_PLACE = r"(?:[^\[\]]|\[[^\[\]]*\])*"  # may hold pairs of brackets: messages[0].content[1]
_LINE = re.compile(rf"\[([a-z_]+)(?::({_PLACE}))?\] ?(.*)", re.DOTALL)
MAX_MESSAGE_CHARS = 2000  # an error line travels in a gRPC status field; longer texts are cut
MAX_WHERE_CHARS = 200  # a place may be a key that the client made up


class OmniError(Exception):
    """Base of all errors a client may see. `where` is the field, stage, edge or queue concerned."""

    code = "internal"
    status = 500

    def __init__(self, message: str, where: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message[:MAX_MESSAGE_CHARS]
        self.where = where[:MAX_WHERE_CHARS]
        self.retry_after_s = retry_after_s

    def line(self) -> str:
        """This error as one wire line."""
        where = self.where
        if not re.fullmatch(_PLACE, where):  # a bracket of the client's without its other half
            where = re.sub(r"[\[\]]", "_", where)
        return f"[{self.code}:{where}] {self.message}" if where else f"[{self.code}] {self.message}"


class BadRequest(OmniError):
    code, status = "bad_request", 400


class NotFound(OmniError):
    code, status = "not_found", 404


class TooBusy(OmniError):
    code, status = "too_busy", 429


class Unavailable(OmniError):
    code, status = "unavailable", 503


class Cancelled(OmniError):
    code, status = "cancelled", 499


class DeadlineExceeded(OmniError):
    code, status = "deadline_exceeded", 504


class StageFailed(OmniError):
    code, status = "stage_failed", 500


class WorkerDied(StageFailed):
    """A stage failed because a worker process died, not by what it computes: another worker may succeed."""

    def __init__(self, where: str) -> None:
        super().__init__("the stage's worker died", where)


class Internal(OmniError):
    code, status = "internal", 500


BY_CODE: dict[str, type[OmniError]] = {
    cls.code: cls
    for cls in (BadRequest, NotFound, TooBusy, Unavailable, Cancelled, DeadlineExceeded, StageFailed, Internal)
}


def describe(error: BaseException) -> str:
    """Type and message of an error from outside this tree."""
    return f"{type(error).__name__}: {error}"


def from_line(line: str) -> OmniError:
    """The error a wire line stands for; text that is not of our form becomes `Internal`."""
    match = _LINE.fullmatch(line)
    if match is None or match[1] not in BY_CODE:
        return Internal(line)
    return BY_CODE[match[1]](match[3], match[2] or "")


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """An error as it travels between our processes. `worker_died`: it is a `WorkerDied`."""

    code: str
    message: str
    where: str = ""
    worker_died: bool = False

    @classmethod
    def of(cls, error: BaseException, stage: str = "") -> ErrorInfo:
        """`error` as a record; anything outside our tree is a failure of `stage`."""
        if isinstance(error, OmniError):
            return cls(error.code, error.message, error.where or stage, isinstance(error, WorkerDied))
        return cls(StageFailed.code, describe(error)[:MAX_MESSAGE_CHARS], stage)

    def error(self) -> OmniError:
        """The exception this record stands for."""
        if self.worker_died:
            return WorkerDied(self.where)
        return BY_CODE.get(self.code, Internal)(self.message, self.where)
