# SPDX-License-Identifier: Apache-2.0
"""A served server's environment; a script stands in for its interpreter."""

from __future__ import annotations

import os

from triton_omni.backends.supervisor.serve.temporary import temporary_server

INTERPRETER = """#!/bin/sh
printf '{"home": "%s", "models": "%s"}' "$TRITON_OMNI_HOME" "$TRITON_OMNI_MODELS" > "$6.new"
mv "$6.new" "$6"
exec sleep 60
"""


def test_places_are_those_of_the_callers_folder(monkeypatch, tmp_path):
    """The child runs in another folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").write_text(INTERPRETER)
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setenv("TRITON_OMNI_HOME", "home")
    monkeypatch.setenv("TRITON_OMNI_MODELS", "../models")
    monkeypatch.setenv("TRITON_OMNI_ENGINE_PYTHON", "./python")
    with (tmp_path / "log").open("wb") as log, temporary_server([], log.fileno(), 30.0) as facts:
        assert facts["home"] == str(tmp_path / "home")
        assert os.path.normpath(facts["models"]) == str(tmp_path.parent / "models")
