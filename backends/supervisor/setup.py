# SPDX-License-Identifier: Apache-2.0
"""`python3 -m backends.supervisor.setup`: makes everything that the local server needs; does only what is missing.

Runs with a bare Python: this file must be readable by old versions too, so that they can be told apart.
"""

import argparse
import errno
import sys
import time

SUPPORTED = ((3, 11), (3, 12))


def python_problem(version):
    """What is wrong with this Python version, or an empty text. (No annotations: an old Python must get here.)"""
    if tuple(version[:2]) in SUPPORTED:
        return ""
    return (
        f"Triton-Omni's local server needs Python 3.11 or 3.12, this is {version[0]}.{version[1]} ({sys.executable}): "
        "its stubs need numpy 1.26, and "
        "vLLM needs 3.11.\n  Way out: make setup PYTHON=python3.11 (Debian: apt-get install python3.11-venv "
        "libpython3.11; also fine: uv python install 3.12, conda create python=3.12)"
    )


def make_home(root):
    """Make the home's folder; returns its lock file. Raises Problem where that cannot be written."""
    from backends.supervisor.problem import Problem

    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / "setup.lock").touch()
    except OSError as error:
        raise Problem(str(error), "point TRITON_OMNI_HOME at a folder that you may write to") from None
    return root / "setup.lock"


def say(text):
    """One line of progress, at once even into a pipe."""
    print(text, flush=True)


def main(arguments=None):
    """Run set-up; returns the exit code."""
    wrong = python_problem(sys.version_info)
    if wrong:
        say("setup: " + wrong)
        return 1
    from backends.supervisor import stamps, steps
    from backends.supervisor.home import find_home
    from backends.supervisor.problem import Problem

    parser = argparse.ArgumentParser(prog="backends.supervisor.setup", description=__doc__)
    home = find_home()
    parser.add_argument(
        "--extras",
        default=home.extras,
        help="extras of pyproject.toml for the engine environment: cpu or cuda first; default: as it is",
    )
    parser.add_argument("--again", action="append", default=[], metavar="STEP", help="repeat a step that is done")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    say(f"setup: into {home.root}")
    try:
        lock = make_home(home.root)
        with stamps.only_one(lock, say):
            context = steps.Context(home, say, options.extras)
            steps.check(context)
            stamps.run_steps(steps.all_steps(context), home.stamps, say, frozenset(options.again))
    except Problem as problem:
        say(f"setup: {problem}")
        return 1
    except KeyboardInterrupt:
        say("setup: interrupted; run it again, it goes on where it stopped")
        return 130
    except OSError as error:
        from backends.supervisor.child import disk_full

        if error.errno != errno.ENOSPC:
            raise
        say(f"setup: {disk_full(home.root)}")
        return 1
    say(f"setup: complete after {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
