"""A Ray cluster of two virtual hosts with a job server; ends when its input closes.

Run as a script, so that what Ray reads from the environment (its authentication) is its
own and not that of the process that tests run in. Prints the job server's address.
"""

import os
import sys

from ray.cluster_utils import Cluster

HOST = {
    "num_cpus": max(2, os.cpu_count() or 1),
    "resources": {"autopar_devices": 4},
    "object_store_memory": 128 << 20,
}


def main() -> None:
    head = {**HOST, "include_dashboard": True, "dashboard_port": 0}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**HOST)
        cluster.wait_for_nodes()
        assert cluster.head_node is not None
        print(f"http://{cluster.head_node.webui_url}", flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
