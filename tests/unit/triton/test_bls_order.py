# SPDX-License-Identifier: Apache-2.0
"""The order in which runs are opened, over a stand-in of Triton's module that notes the calls."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from tests.kit.budgets import within
from triton_omni.backends.orchestrator.ports import OpenCall


class Answered:
    def has_error(self) -> bool:
        return False


class Triton(ModuleType):
    """As much of triton_python_backend_utils as an open needs. The first call waits until the test lets it go."""

    def __init__(self) -> None:
        super().__init__("triton_python_backend_utils")
        self.models: list[str] = []
        self.go = threading.Event()
        self.begun = threading.Event()
        triton = self

        class InferenceRequest:
            def __init__(self, model_name: str, **rest: Any) -> None:
                self.model = model_name

            def exec(self, decoupled: bool) -> Any:
                triton.models.append(self.model)
                triton.begun.set()
                assert triton.go.wait(within(10))
                return iter([Answered()])

        self.InferenceRequest = InferenceRequest
        self.InferenceResponse = self.TritonModelException = type("TritonModelException", (Exception,), {})
        self.Tensor = lambda name, array: (name, array)
        self.Logger = type("Logger", (), {})


@pytest.fixture
def triton(monkeypatch):
    fake = Triton()
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake)
    for name in ("bls", "tensors"):
        monkeypatch.delitem(sys.modules, f"triton_omni.backends.triton.{name}", raising=False)
    yield fake
    for name in ("bls", "tensors"):
        sys.modules.pop(f"triton_omni.backends.triton.{name}", None)


def test_first_stages_of_requests_of_one_moment_are_opened_before_those_that_they_feed(triton, monkeypatch):
    bls = importlib.import_module("triton_omni.backends.triton.bls")
    monkeypatch.setattr(bls, "LATER_S", 60.0)  # so that a slow machine's order is the same
    opener = bls.BlsOpener()
    opened = [threading.Event() for _ in range(9)]
    calls = [("busy", False)] + [(name, name != "thinker") for name in ("thinker", "talker") * 4]
    for (model, is_fed), event in zip(calls, opened, strict=True):
        opener.open(OpenCall(model, b"", {}, is_fed), lambda handle, event=event: event.set(), pytest.fail)
        assert triton.begun.wait(within(10))
    triton.go.set()
    assert all(event.wait(within(10)) for event in opened)
    assert triton.models == ["busy"] + ["thinker"] * 4 + ["talker"] * 4
    assert opener.stop()
