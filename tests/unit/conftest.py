# SPDX-License-Identifier: Apache-2.0
"""Unit tests of the framework packages treat every warning as an error: a leaked file or thread is a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

STRICT = ("core", "connectors", "control", "worker", "orchestrator", "config", "wire", "pipelines_toy")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE or item.path.parent.name in STRICT:
            item.add_marker(pytest.mark.filterwarnings("error"))
