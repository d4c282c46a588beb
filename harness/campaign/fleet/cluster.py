"""The Ray cluster: connect to it, run jobs on its nodes, and see what became of them.

Nothing else of the harness imports Ray, but for what starts a local cluster and what runs on a node.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from harness.base import bounds
from harness.base.files import NotFinished
from harness.campaign.fleet import access, local, on_node
from harness.campaign.fleet.access import FleetError
from harness.campaign.fleet.jobs import Job
from harness.campaign.fleet.place import Place

# Ray's client starts a process on the head first, for which the head waits as long as this variable says.
HEAD_WAITS_FOR_PROCESS = "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S"
HEAD_WAITS_S = 30  # by default
ATTEMPTS = 2  # to connect: the head gives up a process that did not start in time
LOOK_S = 1.0  # between looks at the nodes
SLOW_S = 2.0  # beyond which a late answer makes the head suspect
LOST = "is lost; finished work is kept here and on the nodes, run the same command to continue"
NODE_LEFT = "its node died or left the cluster"
LOST_AFTER_S = 8.0  # of a head that does not answer
CLIENT_PORT = 10001
HEAD = "node:__internal_head__"  # a resource that the head alone has
# Resources of Ray's own; all others are devices.
_OWN = ("CPU", "GPU", "TPU", "memory", "object_store_memory")
_OWN_BEGIN = ("node:", "accelerator_type:", "bundle")


class HeadLost(NotFinished):
    """The head of the cluster is gone, and with it the fleet."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster. `id`: Ray's, new each time it joins. `devices`: names, with their number."""

    id: str
    address: str
    devices: dict[str, int]


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `lost`: why Ray has no answer of it, in a few words; None: it ended, with `code` and
    the last line of its standard error."""

    code: int = 0
    error: str = ""
    lost: str | None = None


class Cluster:
    """A Ray cluster that this process is connected to. `authenticated`: it asked for a token."""

    def __init__(self, ray: Any, address: str, authenticated: bool) -> None:
        """`address`: the HOST:PORT at which the head answers."""
        self._ray, self._address, self.authenticated = ray, address, authenticated
        ray.cloudpickle.register_pickle_by_value(on_node)
        (head,) = (node["NodeID"] for node in ray.nodes() if HEAD in node["Resources"])
        options = {"num_cpus": 0, "scheduling_strategy": self._on(head)}
        self._mailbox = ray.remote(on_node.Mailbox).options(**options).remote(bounds.MESSAGE_BYTES)
        self._reply: Any = None  # lines of the mailbox, awaited
        self._running: dict[Any, str] = {}
        self._looked_s = 0.0
        self._nodes: list[Node] = []
        self._answered_s = time.monotonic()

    def _on(self, node: str) -> Any:
        """Ray's strategy for a job on one node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node_id=node, soft=False)

    def nodes(self) -> list[Node]:
        """The nodes that are alive, as of the last second. Raises HeadLost."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._check_head()
            found: list[list[Any]] = []
            # A head that dies now leaves the call waiting, until Ray ends the process.
            while failure := _within(LOST_AFTER_S, lambda: found.append(self._ray.nodes())):
                self._check_head()
                if not isinstance(failure, TimeoutError):
                    raise HeadLost(f"the Ray cluster at {self._address} {LOST}") from failure
            self._nodes = [
                Node(node["NodeID"], node["NodeManagerAddress"], devices_of(node["Resources"]))
                for node in found[0]
                if node["Alive"]
            ]
            self._looked_s = time.monotonic()
        return self._nodes

    def _check_head(self) -> None:
        """Ray itself ends the process a minute after its head is gone."""
        while not access.answers(self._address, 2.0):
            if time.monotonic() - self._answered_s > LOST_AFTER_S:
                raise HeadLost(f"the head of the Ray cluster at {self._address} {LOST}")
            time.sleep(0.5)
        self._answered_s = time.monotonic()

    def version(self, node: Node) -> tuple[list[str], str, float]:
        """As on_node.node_version, but how far the node's clock is ahead of this machine's, in seconds: too
        far by the time that an answer takes."""
        task = self._ray.remote(on_node.node_version).options(
            num_cpus=0, max_retries=0, scheduling_strategy=self._on(node.id)
        )
        try:
            version, lacks, time_s = self._ray.get(task.remote(), timeout=60)
        except (self._ray.exceptions.RayError, TimeoutError) as failure:
            return [], _cause(failure), 0.0
        return version, lacks, time_s - time.time()

    def submit(self, name: str, job: Job, node: str, device: str | None = None) -> None:
        """Have a node do a job; `device`: as soon as one of these is free there."""
        options: dict[str, object] = {"num_cpus": 0, "max_retries": 0, "name": f"harness {name}"}
        options["scheduling_strategy"] = self._on(node)
        if device is not None:
            options["resources"] = {device: 1}
        task = self._ray.remote(on_node.node_work).options(**options)
        self._running[task.remote(json.dumps(job), name, self._mailbox, bounds.MESSAGE_BYTES)] = name

    def lines(self, wait_s: float) -> Iterator[tuple[str, str | None]]:
        """What jobs have printed since the last call, as of Mailbox, each with the job's name. Waits at most
        so long for the first, and without a wait gives all there is. Raises HeadLost."""
        while found := self._taken(wait_s):
            yield from found
            if wait_s:
                return

    def _taken(self, wait_s: float) -> list[tuple[str, str | None]]:
        self._reply = self._reply or self._mailbox.take.remote(wait_s)
        # Only the reply holds the lines taken, so a late reply is awaited, not requested again.
        while not self._ray.wait([self._reply], timeout=wait_s + SLOW_S)[0]:
            self._check_head()
        reply, self._reply = self._reply, None
        try:
            found: list[tuple[str, str | None]] = self._ray.get(reply)
            return found
        except (self._ray.exceptions.RayError, ConnectionError):
            self._check_head()
            raise HeadLost(f"the Ray cluster at {self._address} {LOST}") from None

    def ended(self) -> list[tuple[str, Outcome]]:
        """The jobs that have ended since the last call."""
        if not self._running:
            return []
        refs = list(self._running)
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        found = []
        for ref in ready:
            try:
                outcome = Outcome(*self._ray.get(ref))
            except self._ray.exceptions.RayError as failure:
                outcome = Outcome(lost=_cause(failure))
            found.append((self._running.pop(ref), outcome))
        return found

    def cancel(self, names: Collection[str]) -> None:
        """Stop jobs: one that runs ends as by Ctrl-C, one that waits is forgotten."""
        for ref, name in self._running.items():
            if name in names:
                self._ray.cancel(ref)


def devices_of(resources: dict[str, float]) -> dict[str, int]:
    """The devices among a node's resources."""
    return {
        name: int(count)
        for name, count in resources.items()
        if name not in _OWN and not name.startswith(_OWN_BEGIN) and count >= 1
    }


def _cause(failure: BaseException) -> str:
    """What Ray's exception means; its text is long, and names hosts."""
    words = {
        "NodeDiedError": NODE_LEFT,
        "LocalRayletDiedError": NODE_LEFT,
        "WorkerCrashedError": "its node died, or Ray's process on it",
        "TaskCancelledError": "it was stopped",
        "TaskUnschedulableError": "its node left the cluster",
        "GetTimeoutError": "no answer within a minute",
    }
    names = [kind.__name__ for kind in type(failure).__mro__]
    return next((words[name] for name in names if name in words), f"Ray lost it ({names[0]})")


@contextmanager
def connected(place: Place, allow_unauthenticated: bool = False) -> Iterator[Cluster]:
    """Connect to the cluster of a fleet, or start it. Raises FleetError."""
    if not all(map(importlib.util.find_spec, ("ray", "grpc"))):
        raise FleetError("a fleet needs Ray, which is not installed here: pip install 'ray[client]>=2.60'")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a refused certificate is a sentence of ours
    with ExitStack() as around:
        address = around.enter_context(local.started(place.local)) if place.local else place.address
        import ray

        # Ray prints the nodes' output to standard output, between the events of --json.
        ray._private.worker._worker_logs_enabled = False
        address = _whole(ray, address)
        authenticated = access.admitted(address, allow_unauthenticated)
        ray._raylet.Config.initialize("")  # Ray has read the variables of access.py before they were known
        _connect(ray, address)
        around.callback(_disconnect, ray)
        yield Cluster(ray, address.removeprefix("ray://"), authenticated)


def _whole(ray: Any, address: str) -> str:
    """HOST:PORT of a head, or ray://HOST:PORT."""
    if address == "auto":
        try:
            return str(ray._private.services.canonicalize_bootstrap_address_or_die("auto"))
        except (ConnectionError, ValueError):
            raise FleetError("auto: this machine is part of no Ray cluster, or of several") from None
    return f"{address}:{CLIENT_PORT}" if ":" not in address.removeprefix("ray://") else address


def _connect(ray: Any, address: str) -> None:
    within_s = 3 * ray._private.ray_constants.env_integer(HEAD_WAITS_FOR_PROCESS, HEAD_WAITS_S)
    for _ in range(ATTEMPTS):
        failure = _within(
            within_s, lambda: ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        )
        if not isinstance(failure, ConnectionAbortedError):
            break
    if failure is not None:
        lines = str(failure).split("\n")  # the last line is the end of a traceback
        why = next((line.strip()[:200] for line in reversed(lines) if line.strip()), type(failure).__name__)
        raise FleetError(f"{address} cannot be used as a Ray cluster: {why}")


def _within(seconds: float, call: Callable[[], object]) -> Exception | None:
    """Call it, and return its exception: in a thread, which is left behind after so long. Ray would also
    replace the handlers of signals in the main one."""
    found: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as failure:  # of Ray, gRPC or the network
            found.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return TimeoutError(f"no answer within {seconds:.0f} s")
    return found[0] if found else None


def _disconnect(ray: Any) -> None:
    """Ray waits for a head that is gone, and ends the process before that is said."""
    _within(LOST_AFTER_S, ray.shutdown)
