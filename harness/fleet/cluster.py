"""Ray: connect to a cluster or start one here, place jobs on its devices, and see what became of them.

Nothing else of the harness imports Ray.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from harness.fleet import local_cluster, on_node
from harness.fleet.place import FleetError, Place
from harness.system.endings import NotFinished

ANSWERS_WITHIN_S = 10.0
CONNECTS_WITHIN_S = 90.0  # Ray's client starts a process on the head first
ATTEMPTS = 2  # to connect: the head gives up a process that did not start within 30 s
LOOK_S = 1.0  # between looks at the nodes
SLOW_S = 2.0  # beyond which a late answer makes the head suspect
LOST = "is lost; finished work is kept here and on the nodes, run the same command to continue"
NODE_LEFT = "its node died or left the cluster"
LOST_AFTER_S = 8.0  # of a head that does not answer
CLIENT_PORT = 10001
_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # an empty frame of HTTP/2
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
    """How a job ended. `lost`: why Ray has no answer of it, in a few words; null: it ended, with `code` and
    the last line of its standard error."""

    code: int = 0
    error: str = ""
    lost: str | None = None


class Cluster:
    """A Ray cluster that this process is connected to."""

    def __init__(self, ray: Any, address: str) -> None:
        """`address`: the HOST:PORT at which the head answers."""
        self._ray, self._address = ray, address
        ray.cloudpickle.register_pickle_by_value(on_node)
        (head,) = (node["NodeID"] for node in ray.nodes() if HEAD in node["Resources"])
        options = {"num_cpus": 0, "scheduling_strategy": self._on(head)}
        self._mailbox = ray.remote(on_node.Mailbox).options(**options).remote()
        self._asked: Any = None
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
            found = [node for node in self._ray.nodes() if node["Alive"]]
            self._nodes = [
                Node(node["NodeID"], node["NodeManagerAddress"], devices_of(node["Resources"]))
                for node in found
            ]
            self._looked_s = time.monotonic()
        return self._nodes

    def _check_head(self) -> None:
        """Ray itself ends the process a minute after its head is gone."""
        while not _answers(self._address, 2.0):
            if time.monotonic() - self._answered_s > LOST_AFTER_S:
                raise HeadLost(f"the head of the Ray cluster at {self._address} {LOST}")
            time.sleep(0.5)
        self._answered_s = time.monotonic()

    def version(self, node: Node) -> tuple[dict[str, Any], float]:
        """What on_node.version says on a node, and how far its clock is ahead of this machine's, in seconds:
        too far by the time that an answer takes."""
        task = self._ray.remote(on_node.version).options(
            num_cpus=0, max_retries=0, scheduling_strategy=self._on(node.id)
        )
        try:
            found: dict[str, Any] = self._ray.get(task.remote(), timeout=60)
        except (self._ray.exceptions.RayError, TimeoutError) as failure:
            return {"version": None, "commit": "", "lacks": _cause(failure)}, 0.0
        return found, found["time_s"] - time.time()

    def submit(
        self,
        name: str,
        job: dict[str, Any],
        device: str | None = None,
        node: str | None = None,
        avoid: Collection[str] = (),
    ) -> None:
        """Have Ray run a job of harness/fleet/node.py: on a device of this name, as soon as one is free and
        its node is none of those to `avoid`; or on a node, whatever its devices do."""
        options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "name": f"harness {name}"}
        if device is not None:
            options["resources"] = {device: 1}
        if node is not None:
            options["scheduling_strategy"] = self._on(node)
        elif avoid:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}
        task = self._ray.remote(on_node.work).options(**options)
        self._running[task.remote(json.dumps(job), name, self._mailbox)] = name

    def lines(self, wait_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """What jobs have printed since the last call, each with the job's name; waits at most so long for the
        first, and without a wait gives all there is. Raises HeadLost."""
        while found := self._taken(wait_s):
            for name, line in found:
                yield name, json.loads(line)
            if wait_s:
                return

    def _taken(self, wait_s: float) -> list[tuple[str, str]]:
        self._asked = self._asked or self._mailbox.take.remote(wait_s)
        # What a question took is in its answer alone: one that comes late is waited for, not asked again.
        while not self._ray.wait([self._asked], timeout=wait_s + SLOW_S)[0]:
            self._check_head()
        asked, self._asked = self._asked, None
        try:
            found: list[tuple[str, str]] = self._ray.get(asked)
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
                answer = self._ray.get(ref)
                outcome = Outcome(answer["code"], answer["error"])
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
        "OutOfMemoryError": "Ray stopped it for want of memory on its node",
        "TaskCancelledError": "it was stopped",
        "TaskUnschedulableError": "its node left the cluster",
        "GetTimeoutError": "no answer within a minute",
        "RuntimeEnvSetupError": "Ray could not start it",
    }
    kind = type(failure)
    for each in kind.__mro__:
        if each.__name__ in words:
            return words[each.__name__]
    return f"Ray lost it ({kind.__name__})"


def _answers(address: str, within_s: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), within_s).close()
    except OSError:
        return False
    return True


def _speaks(address: str, within_s: float) -> bool:
    """Whether HTTP/2 is answered there, which Ray's servers speak (gRPC): its preface and empty settings are
    answered with settings (RFC 9113, 3.4). With TLS a connection has to be enough."""
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return _answers(address, within_s)
    host, _, port = address.rpartition(":")
    until = time.monotonic() + within_s
    try:
        with socket.create_connection((host.strip("[]"), int(port)), within_s) as there:
            there.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
            there.settimeout(max(0.1, until - time.monotonic()))
            return there.recv(9)[3:4] == _SETTINGS[3:4]
    except OSError:
        return False


@contextmanager
def connected(place: Place) -> Iterator[Cluster]:
    """Connect to the cluster of a fleet, or start it. Raises FleetError."""
    if importlib.util.find_spec("ray") is None:
        raise FleetError("a fleet needs Ray, which is not installed here: pip install 'harness[fleet]'")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    # Ray prints what it sees of nodes to standard output, between the events of --json.
    ray._private.worker._worker_logs_enabled = False
    with ExitStack() as around:
        address = around.enter_context(local_cluster.started(place.local)) if place.local else place.address
        answers = _connect(ray, address)
        around.callback(_disconnect, ray)
        yield Cluster(ray, answers)


def _connect(ray: Any, address: str) -> str:
    """Connect; returns the HOST:PORT at which the head answers."""
    there = address.removeprefix("ray://")
    if address.startswith("ray://") and ":" not in there:
        there = f"{there}:{CLIENT_PORT}"
        address = f"ray://{there}"
    if address != "auto" and not _speaks(there, ANSWERS_WITHIN_S):
        raise FleetError(f"{address} does not answer: no Ray cluster there within {ANSWERS_WITHIN_S:.0f} s")
    for _ in range(ATTEMPTS):
        failure = _within(
            CONNECTS_WITHIN_S, lambda: ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        )
        if not isinstance(failure, ConnectionAbortedError):
            break
    if failure is not None:
        lines = str(failure).split("\n")  # the last says what a traceback ended with
        why = next((line.strip()[:200] for line in reversed(lines) if line.strip()), type(failure).__name__)
        raise FleetError(f"{address} cannot be used as a Ray cluster: {why}")
    return there if address != "auto" else str(ray.get_runtime_context().gcs_address)


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
    with suppress(Exception):  # the head may be gone
        ray.shutdown()
