# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of a head without CPUs and nodes on this host; run by an interpreter with Ray: `ray_cluster.py NODES`.

Prints its address, then obeys lines: "kill" ends the first node with SIGKILL, "add" adds one. Ends with its input.
"""

from __future__ import annotations

import os
import sys

from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}


def main(count: int) -> None:
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(**NODE) for _ in range(count)]
    print(f"address {cluster.address}", flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(nodes.pop(0), allow_graceful=False)
        else:
            nodes.append(cluster.add_node(**NODE))
        print("done", flush=True)
    cluster.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
