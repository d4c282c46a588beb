"""The keys that records of every kind have, and those of the kinds that a campaign makes."""

from typing import Any

from pydantic import with_config
from typing_extensions import NotRequired, TypedDict

from harness.results.kinds.parts import (
    DESCRIBED,
    Campaign,
    Finding,
    Machine,
    MemoryBudget,
    Model,
    StackFacts,
    Workload,
)
from harness.results.kinds.values import Count, Number, Outcome, Positive, Text, Time


@with_config(DESCRIBED)
class Common(TypedDict):
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
    outcome: Outcome
    """how it ended"""
    reason: NotRequired[Text | None]
    """why it ended so"""
    tokens: Count
    """generated; 0 without a series"""
    doctor: NotRequired[list[Finding]]
    """findings on the machine before the campaign; missing in older records, and if the device is missing"""
    device: NotRequired[Text]
    """NVML's UUID of a GPU, `cpu`, or the name of another device"""


@with_config(DESCRIBED)
class Asked(TypedDict):
    device: Text
    options: NotRequired[Any]
    gpu: NotRequired[Any]


@with_config(DESCRIBED)
class Version(TypedDict):
    version: Text
    git_commit: Text | None
    """with `+` if files differ from it"""


@with_config(DESCRIBED)
class Conditions(TypedDict):
    """Variable properties of the machine (governor, load, swap), and how much counters rose while timing."""

    cpu_quota: NotRequired[Number | None]
    """in CPUs, the lowest of the harness's cgroups; null: none, or not known"""
    pressure: NotRequired[dict[str, Number]]
    """of the whole machine: paging, stalls, steal; and throttling by quotas, of the harness's cgroups"""
    worker_pressure: NotRequired[dict[str, Number]]
    """of the worker's own cgroup, empty without one; in older records `pressure` has the cgroup's counters"""


@with_config(DESCRIBED)
class Adopted(TypedDict):
    """The user's own interpreter, where it ran the stack; its path is not recorded."""

    python: NotRequired[Text | None]
    pins_not_met: NotRequired[list[Text] | None]


@with_config(DESCRIBED)
class Environment(TypedDict):
    """The Python environment of the stack."""

    name: NotRequired[Text | None]
    key: NotRequired[Text | None]
    """hash of all that it was built from; missing where `adopted` is there"""
    variables: NotRequired[dict[str, Any] | None]
    """build flags"""
    toolkit: NotRequired[Text | None]
    """version of the CUDA toolkit that compiled it"""
    lock: NotRequired[list[Text] | None]
    """exact versions"""
    runner: NotRequired[Text | None]
    """hash of the runner's source"""
    adopted: NotRequired[Adopted | None]


@with_config(DESCRIBED)
class Own(TypedDict):
    """Keys of the kinds that a campaign makes."""

    asked: Asked
    """the requested options and device"""
    options: NotRequired[dict[str, Any]]
    """all options, as resolved"""
    threads: NotRequired[Positive]
    harness: NotRequired[Version]
    protocol: NotRequired[Any]
    """as resolved"""
    environment: NotRequired[Environment | None]
    variables: NotRequired[dict[str, Any] | None]
    """environment variables that change speed"""
    conditions: NotRequired[Conditions | None]
    place_in_order: NotRequired[Any]
    """this run's place among those of the campaign, and their number when it began"""
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
    known_failure: NotRequired[list[Text]]
    """known reasons to fail, before the run, a sentence each; missing if none"""
