"""The Ray cluster and its nodes."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

import harness
from harness.base import bounds
from harness.base.files import NotFinished, cache_folder, made
from harness.base.text import list_named, shortened
from harness.campaign import repeat
from harness.campaign.fleet import access, files, on_node
from harness.campaign.fleet.access import FleetError
from harness.campaign.fleet.files import Job, Json
from harness.campaign.fleet.on_node import NodeVersion
from harness.config import yaml_text
from harness.config.experiment import DEVICE, Frozen
from harness.config.plan import Cell
from harness.config.yaml_text import Mistakes

# A Ray cluster of several nodes on this machine, for demonstrations and tests.


LOCAL_CLUSTER_DEVICE = "local"  # of each node
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
    cluster: Any, number: int, device: str = LOCAL_CLUSTER_DEVICE, variables: Mapping[str, str] | None = None
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


# Where a fleet is: `--on local-cluster:3`, a Ray address, or a file with an address and its devices.


MOST_LOCAL = 16  # nodes of a local cluster: each takes 0.1 GB
EXAMPLES = "ray://HOST:10001, HOST:6379, auto, or local-cluster:N"
_LOCAL = re.compile(r"local-cluster:([1-9][0-9]?)")
_ADDRESS = re.compile(r"auto|(ray://)?[A-Za-z0-9_.\-\[\]:]+:[0-9]{1,5}|ray://[A-Za-z0-9_.\-]+")


class FleetFile(Frozen):
    """The file of a fleet."""

    address: str
    """Of its Ray cluster."""
    devices: Json = Field(default={})
    """Its devices, by the names of their Ray resources; by default all that its nodes have."""


class DeviceRow(Frozen):
    """How a device of the fleet is called on its own machine."""

    device: str | None = Field(default=None, pattern=DEVICE)
    """By default the config's `device`."""
    gpu: str | None = Field(default=None, min_length=1)
    """As in a config; by default the config's."""


@dataclass(frozen=True)
class Place:
    """`address`: of Ray; with `local`, the nodes of a cluster on this machine, empty. `devices`: rows by the
    name of the resource; empty: all devices of all nodes."""

    address: str
    local: int = 0
    devices: Mapping[str, DeviceRow] = field(default_factory=dict)

    @property
    def words(self) -> str:
        return f"local-cluster:{self.local}" if self.local else self.address

    def config_of(self, config: Json, device: str) -> Json:
        """The config as a device of the fleet runs it."""
        row = self.devices.get(device, DeviceRow())
        if row.device is None:
            return {**config, **({"gpu": row.gpu} if row.gpu else {})}
        return {**config, "device": row.device, "gpu": row.gpu}


def place_of(text: str) -> Place:
    """What --on names. Raises ConfigError for a mistake in a file, and FleetError."""
    if local := _LOCAL.fullmatch(text):
        if (count := int(local[1])) > MOST_LOCAL:
            raise FleetError(f"--on {text}: at most {MOST_LOCAL} nodes on this machine")
        return Place("", count)
    if _ADDRESS.fullmatch(text):
        return Place(text)
    if not text.endswith((".yaml", ".yml")):
        raise FleetError(f"--on {shortened(text)}: expected a file FLEET.yaml, {EXAMPLES}")
    return _of_file(Path(text))


def _of_file(path: Path) -> Place:
    document = yaml_text.read(path)
    mistakes = Mistakes(document.place)
    file = mistakes.checked(FleetFile, document.data, ())
    rows: dict[str, DeviceRow] = {}
    for name, given in file.devices.items() if file else ():
        row = mistakes.checked(DeviceRow, {} if given is None else given, ("devices", name))
        if row is not None:
            rows[name] = row
            if row.gpu and row.device == "cpu":
                mistakes.add(("devices", name, "gpu"), "needs a GPU device such as cuda; device is cpu")
    if file and not (_LOCAL.fullmatch(file.address) or _ADDRESS.fullmatch(file.address)):
        mistakes.add(("address",), f"expected {EXAMPLES}, got {shortened(file.address)}")
    mistakes.stop_if_any()
    assert file is not None
    there = place_of(file.address)
    return Place(there.address, there.local, rows)


# Ray: connect to a cluster or start one here, place jobs on its devices, and see what became of them.
#
# Nothing else of the harness imports Ray.


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
    """How a job ended. `lost`: why Ray has no answer of it, in a few words; null: it ended, with `code` and
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

    def version(self, node: Node) -> tuple[NodeVersion, float]:
        """What on_node.version says on a node, and how far its clock is ahead of this machine's, in seconds:
        too far by the time that an answer takes."""
        task = self._ray.remote(on_node.node_version).options(
            num_cpus=0, max_retries=0, scheduling_strategy=self._on(node.id)
        )
        try:
            found: NodeVersion = self._ray.get(task.remote(), timeout=60)
        except (self._ray.exceptions.RayError, TimeoutError) as failure:
            return {"version": None, "commit": "", "lacks": _cause(failure), "time_s": 0.0}, 0.0
        return found, found["time_s"] - time.time()

    def submit(
        self,
        name: str,
        job: Job,
        device: str | None = None,
        node: str | None = None,
        avoid: Collection[str] = (),
    ) -> None:
        """Have Ray run a job of node.py: on a device of this name, as soon as one is free and its node is
        none of those to `avoid`; or on a node, whatever its devices do."""
        options: dict[str, object] = {"num_cpus": 0, "max_retries": 0, "name": f"harness {name}"}
        if device is not None:
            options["resources"] = {device: 1}
        if node is not None:
            options["scheduling_strategy"] = self._on(node)
        elif avoid:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}
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


@contextmanager
def connected(place: Place, allow_unauthenticated: bool = False) -> Iterator[Cluster]:
    """Connect to the cluster of a fleet, or start it. Raises FleetError."""
    if not all(map(importlib.util.find_spec, ("ray", "grpc"))):
        raise FleetError("a fleet needs Ray, which is not installed here: pip install 'ray[client]>=2.60'")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a refused certificate is a sentence of ours
    with ExitStack() as around:
        address = around.enter_context(started(place.local)) if place.local else place.address
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


# The nodes of a fleet: who has joined with which devices, who is refused, and who is gone.


CLOCK_NOTED_S = 2.0  # a clock that is ahead or behind by more is mentioned


class Nodes:
    """`clocks`: how far each accepted node's clock is ahead of this machine's, in seconds, by its id.
    `avoided`: ids of nodes that get no campaign: refused, unable to run one, or gone. `gone`: those that were
    there at the look before the last."""

    def __init__(
        self, cluster: Cluster, place: Place, cells: Sequence[Cell], say: Callable[..., None]
    ) -> None:
        """`say`: takes the kind of an event, a node, and a text."""
        self._cluster, self._place, self._cells, self._say = cluster, place, cells, say
        self._version = harness.__version__, repeat.git_commit() or ""
        self._there: dict[str, Node] = {}
        self._began = False
        self.clocks: dict[str, float] = {}
        self.avoided: set[str] = set()
        self.gone: list[Node] = []

    def meet(self) -> list[Node]:
        """Look who is there; returns the nodes that have joined since and are accepted.

        Raises FleetError, the first time alone, if one is refused or a device is missing; and HeadLost.
        """
        there = {node.id: node for node in self._cluster.nodes()}
        self.gone = [node for key, node in self._there.items() if key not in there and self.mine(node)]
        self.avoided.update(node.id for node in self.gone)
        for node in self.gone:
            self._say("lost", node, text="left the cluster")
        new = [node for node in there.values() if node.id not in self._there and self.mine(node)]
        self._there = there
        if not self._began:
            self._check_devices()
        with ThreadPoolExecutor(8) as several:
            greeted = list(several.map(self._cluster.version, new))
        accepted = [
            node
            for node, (found, ahead_s) in zip(new, greeted, strict=True)
            if self._accepts(node, found, ahead_s)
        ]
        self._began = True
        return accepted

    def mine(self, node: Node) -> list[str]:
        """The devices of a node that belong to the fleet."""
        return [name for name in node.devices if not self._place.devices or name in self._place.devices]

    def devices(self) -> set[str]:
        """The devices of the accepted nodes."""
        return {name for node in self.accepted() for name in self.mine(node)}

    def able(self, device: str) -> list[Node]:
        """The nodes with a device that may have a campaign."""
        return [node for node in self.accepted() if device in node.devices and node.id not in self.avoided]

    def accepted(self) -> list[Node]:
        return [node for node in self._there.values() if node.id in self.clocks]

    def named(self, key: str | None) -> Node | None:
        """The node with an id, while it is there."""
        return self._there.get(key or "")

    def _accepts(self, node: Node, found: NodeVersion, ahead_s: float) -> bool:
        if problem := self._problem(node, found):
            if not self._began:
                raise FleetError(problem)
            self.avoided.add(node.id)
            self._say("refused", node, text=problem)
            return False
        self.clocks[node.id] = round(ahead_s, 3)
        self._say("joined", node, text=f"has {', '.join(self.mine(node))}")
        if abs(ahead_s) > CLOCK_NOTED_S:
            side = "ahead of" if ahead_s > 0 else "behind"
            self._say("warning", node, text=f"its clock is {abs(ahead_s):.0f} s {side} this machine's")
        return True

    def _problem(self, node: Node, found: NodeVersion) -> str | None:
        version, commit = self._version
        if found["version"] is None:
            return f"the node at {node.address} cannot run the harness: {found['lacks']}"
        same = found["version"] == version and not found["lacks"]
        if same and (found["commit"] == commit or not (found["commit"] and commit)):
            return None
        theirs, ours = f"{found['version']} {found['commit']}".strip(), f"{version} {commit}".strip()
        return f"harness {theirs} on the node at {node.address}, {ours} here: install the same on both"

    def _check_devices(self) -> None:
        """The fleet has the devices that are named."""
        there = list(dict.fromkeys(name for node in self._there.values() for name in node.devices))
        if not there:
            hint = "start its nodes with ray start --resources='{\"NAME\": 1}'"
            raise FleetError(f"{self._place.words}: no node has a device; {hint}")
        has = f"there are {list_named(there, 8)}"
        for name in self._place.devices:
            if name not in there:
                raise FleetError(f"devices.{name}: no node of {self._place.words} has this device; {has}")
        mine = [name for name in there if not self._place.devices or name in self._place.devices]
        for glob in files.unknown_devices(self._cells, mine):
            raise FleetError(f"where: no device of the fleet matches {glob}; there are {list_named(mine, 8)}")
        for cell in self._cells:
            if not any(files.goes_to(cell, name) for name in mine):
                raise FleetError(f"{cell.id}: no device is in `where` of its model and of its variant")
