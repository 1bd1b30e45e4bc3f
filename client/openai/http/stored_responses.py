# SPDX-License-Identifier: Apache-2.0
"""Responses that clients may continue or read again: in memory, bounded, each key's own. For the event loop."""

from __future__ import annotations

import re
import uuid
from collections import OrderedDict
from dataclasses import dataclass

from triton_omni.openai.http.errors import ApiError

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20
"""Of one key."""
TOTAL_BYTES = 512 << 20
"""Of all keys."""
_ID = re.compile(r"resp_([0-9a-f]{8})[0-9a-f]{32}")
_ITEM_ID = re.compile(r"(?:msg|fc)_([0-9a-f]{40})_([0-9]{1,6})")


@dataclass(frozen=True)
class StoredResponse:
    """One response.

    id        its id
    previous  the id of the response that it continues; "" for none
    items     its own input items, as JSON
    body      the response, as JSON
    """

    id: str
    previous: str
    items: bytes
    body: bytes

    @property
    def nbytes(self) -> int:
        """Bytes that count."""
        return len(self.items) + len(self.body)


class ResponseStore:
    """Keeps the latest responses of each key, up to a number and a size; what is used again counts as late.

    Owners are digests of keys, so that a key never reads what another one has stored, whatever both are called. An id
    carries the number of its replica, so that the error for one of another replica can say so.
    """

    def __init__(
        self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES, total_bytes: int = TOTAL_BYTES
    ) -> None:
        self.replica = uuid.uuid4().hex[:8]
        self.nbytes = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._total_bytes = total_bytes
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._used: dict[str, int] = {}

    def new_id(self) -> str:
        """An id for a response."""
        return f"resp_{self.replica}{uuid.uuid4().hex}"

    def keep(self, owner: str, response: StoredResponse) -> bool:
        """Keep a response; False if it alone is larger than what a key may have."""
        if response.nbytes > min(self._max_bytes, self._total_bytes):
            return False
        kept = self._kept.setdefault(owner, OrderedDict())
        kept[response.id] = response
        self._count(owner, response.nbytes)
        while len(kept) > self._max_responses or self._used[owner] > self._max_bytes:
            self._drop(owner, next(iter(kept)))
        while self.nbytes > self._total_bytes:
            largest = max(self._used, key=lambda other: self._used[other])
            self._drop(largest, next(iter(self._kept[largest])))
        return response.id in self._of(owner)

    def find(self, owner: str, response_id: str) -> StoredResponse:
        """A response. Raises ApiError 404."""
        kept = self._of(owner)
        if response_id not in kept:
            raise self._not_found(response_id)
        kept.move_to_end(response_id)
        return kept[response_id]

    def history(self, owner: str, response_id: str) -> list[StoredResponse]:
        """A response and those that it continues, the oldest first. Raises ApiError 404 if one of them is gone."""
        found: list[StoredResponse] = []
        while response_id:
            found.append(self.find(owner, response_id))  # the oldest are touched last: a history goes newest first
            response_id = found[-1].previous
        return found[::-1]

    def response_of_item(self, owner: str, item_id: str) -> tuple[StoredResponse, int] | None:
        """The response with this output item, and the item's place in it; None if there is none."""
        match = _ITEM_ID.fullmatch(item_id)
        response = self._of(owner).get(f"resp_{match[1]}") if match else None
        return None if match is None or response is None else (response, int(match[2]))

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response. Raises ApiError 404."""
        self._drop(owner, self.find(owner, response_id).id)

    def _of(self, owner: str) -> OrderedDict[str, StoredResponse]:
        """Those of an owner, the one that was used least lately first."""
        return self._kept.get(owner) or OrderedDict[str, StoredResponse]()

    def _drop(self, owner: str, response_id: str) -> None:
        self._count(owner, -self._kept[owner].pop(response_id).nbytes)
        if not self._kept[owner]:
            del self._kept[owner], self._used[owner]

    def _count(self, owner: str, nbytes: int) -> None:
        self._used[owner] = self._used.get(owner, 0) + nbytes
        self.nbytes += nbytes

    def _not_found(self, response_id: str) -> ApiError:
        match = _ID.fullmatch(response_id)
        if match is not None and match[1] != self.replica:
            why = "was made by another replica of this server, or before its last start; responses are kept in memory"
        else:
            why = "does not exist: it was never stored, was deleted, or made room for later ones"
        return ApiError(
            404, f"The response '{response_id[:100]}' {why}.", code="response_not_found", param="response_id"
        )
