# SPDX-License-Identifier: Apache-2.0
"""`Omni` starts a real server, others find it, and it ends with the `with` body."""

from __future__ import annotations

import pytest

from tests.kit.triton_server import TOY_REPOSITORY, wait_for
from triton_omni import Omni, omni
from triton_omni.backends.supervisor.serve import run_folder

pytestmark = pytest.mark.triton


def folders() -> dict[str, int]:
    """Run folders of supervised servers → their supervisors."""
    facts = {str(run.path): run_folder.read_json(run.path / run_folder.FACTS_FILE) for run in run_folder.all_runs()}
    return {path: fact["supervisor_pid"] for path, fact in facts.items() if fact is not None}


def test_a_server_is_started_found_by_others_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    before = folders()
    find = omni._find
    monkeypatch.setattr(omni, "_find", lambda model: "")  # another test's server may have the model, too
    with Omni("toy", serve_options=["--repository", str(TOY_REPOSITORY)]) as own:
        assert own.has_started and str(own.chat("one two", max_tokens=3)) == "w0 w1 w2 "
        assert own.speak("one two").seconds > 0
        [folder] = set(folders()) - set(before)
        monkeypatch.setattr(omni, "_find", find)
        with Omni("toy") as other:
            assert not other.has_started and str(other.chat("x", max_tokens=1)) == "w0 "
        assert str(own.chat("three", max_tokens=1)) == "w0 ", "the one that found it has not ended it"
    wait_for(lambda: folder not in folders(), 30, "the end of the server")
