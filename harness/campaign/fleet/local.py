"""A Ray cluster of several nodes on this machine, for demonstrations and tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from harness.base.files import cache_folder, made
from harness.base.text import shortened
from harness.campaign.fleet import access
from harness.campaign.fleet.access import FleetError

DEVICE = "local"  # of each node
STORE_BYTES = 80_000_000  # Ray's smallest object store is 75 MiB; a job takes a few MB
# Ray otherwise gives its workers a niceness of 15, and kills one when its node's memory is nearly full, where
# a cell that fills the memory is a result. Ray notices a lost node within these seconds.
SETTINGS = {
    "worker_niceness": 0,
    "memory_monitor_refresh_ms": 0,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}


@contextmanager
def started(count: int) -> Iterator[str]:
    """A cluster of real raylets on this machine until the block ends: a head, and nodes with a device each.
    Yields its address. Raises FleetError."""
    with access.of_this_machine(), ExitStack() as around:
        try:
            cluster = head()
            around.callback(cluster.shutdown)
            for number in range(1, count + 1):
                add_node(cluster, number)
        except Exception as failure:  # Ray raises no other
            why = shortened(" ".join(str(failure).split()), 300)
            raise FleetError(f"Ray could not start a cluster on this machine: {why}") from failure
        yield str(cluster.address)


def head() -> Any:
    """A cluster of a head alone, on this machine; with the variables of access.own_token, for it alone."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray import cluster_utils

    logging.getLogger("ray").setLevel(logging.ERROR)
    given = {
        "num_cpus": 1,
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
        "include_log_monitor": False,
        "no_monitor": True,
        "_system_config": SETTINGS,
    }
    return cluster_utils.Cluster(initialize_head=True, head_node_args=given)


def add_node(
    cluster: Any, number: int, device: str = DEVICE, variables: Mapping[str, str] | None = None
) -> Any:
    """Add a node to a local cluster. The node has a separate cache, as on a separate machine, but shares this
    machine's environments. `variables`: further environment variables of the node."""
    own = made(cache_folder() / "local-cluster" / str(number))
    envs = made(cache_folder() / "envs")
    if not (own / "envs").is_symlink():
        with suppress(FileExistsError):
            (own / "envs").symlink_to(envs)
    return cluster.add_node(
        num_cpus=1,
        resources={device: 1},
        object_store_memory=STORE_BYTES,
        env_vars={"HARNESS_CACHE": str(own), **(variables or {})},
    )
