"""A Ray cluster of several nodes on this machine, for demonstrations and tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from harness.system.cache import cache_folder, made

DEVICE = "local"  # of each node
STORE_BYTES = 80_000_000  # Ray's smallest object store is 75 MiB; a job takes a few MB
# Ray otherwise gives its workers a niceness of 15, and kills one when its node's memory is nearly full, where
# a cell that fills the memory is a result. It sees a node that is gone within these seconds.
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
    Yields its address."""
    cluster = head()
    try:
        for number in range(1, count + 1):
            add_node(cluster, number)
        yield str(cluster.address)
    finally:
        cluster.shutdown()


def head() -> Any:
    """A cluster of a head alone, on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray import cluster_utils

    logging.getLogger("ray").setLevel(logging.ERROR)
    given: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    given |= {"include_log_monitor": False, "no_monitor": True, "_system_config": SETTINGS}
    return cluster_utils.Cluster(initialize_head=True, head_node_args=given)


def add_node(
    cluster: Any, number: int, device: str = DEVICE, variables: Mapping[str, str] | None = None
) -> Any:
    """Add a node to a local cluster: with a cache of its own, as on a machine of its own, but with the
    environments of this machine's. `variables`: more, for what runs on it."""
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
