# SPDX-License-Identifier: Apache-2.0
"""`make setup`: install everything that the local server needs; only missing steps run. Standard library only."""

import argparse
import errno
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from triton_omni.backends.supervisor.errors import SetupError, report
from triton_omni.backends.supervisor.home import find_home
from triton_omni.backends.supervisor.setup import stamps, steps
from triton_omni.backends.supervisor.setup.child import disk_full


def make_home(root: Path) -> Path:
    """Create the home's folder; returns its lock file. Raises SetupError where it cannot be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / "setup.lock").touch()
    except OSError as error:
        raise SetupError(str(error), hint="point TRITON_OMNI_HOME at a folder that you may write to") from None
    return root / "setup.lock"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run set-up; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make setup", description=__doc__)
    home = find_home()
    parser.add_argument(
        "--extras",
        default=home.extras,
        help="extras of pyproject.toml for the engine environment: cpu or cuda first; default: as it is",
    )
    parser.add_argument("--again", action="append", default=[], metavar="STEP", help="repeat a step that is done")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    report(f"setup: into {home.root}")
    try:
        lock = make_home(home.root)
        with stamps.only_one(lock, report):
            context = steps.Context(home, report, options.extras)
            steps.check(context)
            stamps.run_steps(steps.all_steps(context), home.stamps, report, frozenset(options.again))
    except SetupError as error:
        report(f"setup: {error}")
        return 1
    except KeyboardInterrupt:
        report("setup: interrupted; run it again, it continues where it stopped")
        return 130
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        report(f"setup: {disk_full(home.root)}")
        return 1
    report(f"setup: complete after {time.monotonic() - start:.0f} s; next: make demo, or make serve")
    return 0


if __name__ == "__main__":
    sys.exit(main())
