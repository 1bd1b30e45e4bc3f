# SPDX-License-Identifier: Apache-2.0
"""Child processes end with their parent."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 30.0


def python(code: str, *arguments: str, fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    code = f"from triton_omni.backends.child_process import *\n{code}"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], pass_fds=fds, stdout=subprocess.PIPE, text=True)


def test_a_process_ends_when_the_other_end_of_its_socket_closes_also_inside_a_long_call(tmp_path: Path):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mark = tmp_path / "ended"
    code = "import sys, threading, pathlib; exit_with_peer(int(sys.argv[1]), pathlib.Path(sys.argv[2]).touch)\n"
    child = python(f"{code}print('up', flush=True)\nthreading.Event().wait()", str(theirs.fileno()), str(mark),
                   fds=(theirs.fileno(),))  # fmt: skip
    with child, theirs:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        theirs.close()
        assert child.poll() is None, "it runs while the other end is open"
        ours.close()
        assert child.wait(TIMEOUT_S) == 0
    assert mark.exists()


def test_a_process_gets_its_signal_when_its_parent_is_killed():
    child = "signal_on_parent_death(9); print(os.getpid(), flush=True); threading.Event().wait()"
    parent = python(
        "import subprocess, sys\n"
        f"code = 'import os, threading; from triton_omni.backends.child_process import *; {child}'\n"
        "child = subprocess.Popen([sys.executable, '-c', code])\n"
        "child.wait()"
    )
    with parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        gone, _, _ = select.select([pidfd], [], [], TIMEOUT_S)
        os.close(pidfd)
    assert gone, "the kernel has ended it"
