# SPDX-License-Identifier: Apache-2.0
"""A placer without a cluster: starts workers on this host. `python -m tests.kit.fake_placer [pending|dead|deaf|ends]`.

pending  places nothing, and says why         deaf  neither places nor says anything
dead     says of each that it has ended       ends  exits with its second order
"""

from __future__ import annotations

import json
import os
import subprocess
import sys


def main(mode: str) -> None:
    children: dict[str, subprocess.Popen[bytes]] = {}
    print(json.dumps({"is": "up"}), flush=True)
    for number, line in enumerate(sys.stdin):
        order = json.loads(line)
        if mode == "ends" and number == 1:
            os._exit(3)
        if order["do"] == "kill":
            child = children.pop(order["id"], None)
            if child is not None:
                child.kill()
                child.wait()
        elif mode in ("pending", "dead"):
            print(json.dumps({"is": mode, "id": order["id"], "why": "needs 3 GPU"}), flush=True)
        elif mode != "deaf":
            environment = os.environ | order["environment"]
            children[order["id"]] = subprocess.Popen(order["argv"], env=environment, stdin=subprocess.DEVNULL)
            print(json.dumps({"is": "placed", "id": order["id"], "node": "n" * 20, "address": "here"}), flush=True)
    for child in children.values():
        child.kill()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
