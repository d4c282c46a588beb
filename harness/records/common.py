"""The keys that records of every kind have, and those of the kinds that a campaign makes."""

from typing import Any

from typing_extensions import NotRequired, TypedDict

from harness.records.parts import Campaign, Finding, Machine, MemoryBudget, Model, StackFacts, Workload
from harness.records.values import Above0, Count, Fields, Number, Outcome, Positive, Text, Time


class Begun(TypedDict):
    """Keys that are known before anything is measured."""

    schema: NotRequired[Positive]
    """1"""
    kind: Text
    """`measured`, `checked`, `searched`, `scored` or `reported`"""
    cell: Text
    """the cell's id"""
    repeat: Positive
    content_key: Text
    """hash of cell, resolved options, stack build and versions, weights, machine and device"""
    campaign: Campaign
    """id, name, config, its path, and its command line"""
    started_utc: Time
    stack: Text
    variant: Text
    machine: Machine
    model: Model
    """shape, and weights: source, file, exact bytes"""
    workload: Workload
    doctor: NotRequired[list[Finding]]
    """findings on the machine before the campaign; missing in older records, and if the device is missing"""
    device: NotRequired[Text]
    """NVML's UUID of a GPU, `cpu`, the name of another device, or `server`: another process computed, on
    what loaded.served reports"""


class Ended(TypedDict):
    """Keys that tell how it ended."""

    outcome: Outcome
    """how it ended"""
    reason: NotRequired[Text | None]
    """why it ended so"""
    tokens: Count
    """generated; 0 without a series"""


class Common(Begun, Ended):
    """Keys of every kind."""


class Asked(TypedDict):
    device: Text
    options: NotRequired[Any]
    gpu: NotRequired[Any]


class Version(TypedDict):
    version: Text
    git_commit: Text | None
    """with `+` if files differ from it"""


class CpuTime(TypedDict):
    """How much CPU time was used while timing, in seconds over all CPUs."""

    elapsed_s: Above0
    """time between the two readings"""
    machine_s: Number
    """by all processes of the machine, also those outside a container; without steal"""
    harness_s: Number
    """by the harness: its controller, the worker, and what these started"""


class Conditions(TypedDict):
    """Variable properties of the machine (governor, load, swap), and how much counters rose while timing."""

    cpu_quota: NotRequired[Number | None]
    """in CPUs, the lowest of the harness's cgroups; null: none, or not known"""
    pressure: NotRequired[dict[str, Number]]
    """of the whole machine: paging, stalls, steal; and throttling by quotas, of the harness's cgroups"""
    worker_pressure: NotRequired[dict[str, Number]]
    """of the worker's own cgroup, empty without one"""
    cpu_time: NotRequired[CpuTime]
    """missing in older records, where nothing was timed, and of simulated time"""


class Adopted(TypedDict):
    """The user's own interpreter, where it ran the stack; its path is not recorded."""

    python: NotRequired[Text | None]
    pins_not_met: NotRequired[list[Text] | None]


class Environment(TypedDict):
    """The Python environment of the stack."""

    name: NotRequired[Text | None]
    key: NotRequired[Text | None]
    """hash of all that it was built from; missing where `adopted` is there"""
    variables: NotRequired[Fields | None]
    """build flags"""
    toolkit: NotRequired[Text | None]
    """version of the CUDA toolkit that compiled it"""
    lock: NotRequired[list[Text] | None]
    """exact versions"""
    runner: NotRequired[Text | None]
    """hash of the runner's source"""
    adopted: NotRequired[Adopted | None]


class OwnBegun(TypedDict):
    """Keys of a campaign's records that are known before any measurement."""

    asked: Asked
    """the requested options and device"""
    options: NotRequired[Fields]
    """all options, as resolved"""
    threads: NotRequired[Positive]
    harness: NotRequired[Version]
    protocol: NotRequired[Any]
    """as resolved"""
    environment: NotRequired[Environment | None]
    variables: NotRequired[Fields | None]
    """environment variables that change speed"""
    conditions: NotRequired[Conditions | None]
    place_in_order: NotRequired[Any]
    """this run's place among those of the campaign, and their number when it began"""
    known_failure: NotRequired[list[Text]]
    """known reasons to fail, before the run, a sentence each; missing if none"""


class OwnEnded(TypedDict):
    """Keys of a campaign's records for how a measurement ended."""

    phase: NotRequired[Any]
    """where it ended"""
    exit_status: NotRequired[Any]
    log_tail: NotRequired[Any]
    """the last lines of the worker's log"""
    loaded: NotRequired[StackFacts | None]
    """the stack's facts after loading"""
    memory_budget: NotRequired[MemoryBudget]
    """missing without a budget; a search on a CPU also has it without a stated budget: the limit of its
    probes"""


class Own(OwnBegun, OwnEnded):
    """Keys of the kinds that a campaign makes."""
