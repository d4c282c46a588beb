"""`harness doctor`: this machine, with --measure its peak rates, and what may disturb measurements on it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from harness import config, machine
from harness.api import this_machine
from harness.api.progress import Progress
from harness.api.this_machine import Row
from harness.base.text import cores_text, plural, sized
from harness.campaign.device_lock import DeviceBusy, device_lock
from harness.cli import NOT_OK, OK, Mistake, say
from harness.machine import doctor as conditions
from harness.machine.doctor import Finding


def run(arguments: argparse.Namespace) -> int:
    """Print each device, the CPU and then the GPUs, and the findings; with a config the findings for its
    device alone. Raises Mistake if this machine lacks that device."""
    path, rows, failed = arguments.config, list(this_machine.devices()), False
    if path is None:
        findings = conditions.examine()
    else:
        experiment = config.load(path, [])
        used = {variant.stack for _, variant, _ in experiment.combinations()}
        findings = conditions.examine(experiment.device, experiment.gpu, used)
    if arguments.measure:
        try:
            failed = not _measure_all(rows)
        except DeviceBusy as busy:
            reason = str(busy).partition(";")[0]  # the rest names an option of `run`
            say(f"{reason}; nothing was measured")
            return NOT_OK
    if arguments.json:
        found = {"devices": rows, "findings": [finding.record() for finding in findings]}
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        print("\n".join(line for row in rows for line in _lines(row)))
        if len(rows) == 1:
            print("GPU: none found")
        print("\n".join(["", *_finding_lines(findings)]))
    for finding in findings:
        if finding.level == "stop":
            raise Mistake(f"{path}: {finding.found}")
    return NOT_OK if failed else OK


def _measure_all(rows: Sequence[Row]) -> bool:
    """Fill in the rates of every device; false if a probe failed. Locks all of them, as a campaign does,
    because it would slow a campaign on any of them. Raises DeviceBusy."""
    progress = Progress()
    with ExitStack() as held:
        for row in rows:
            held.enter_context(device_lock(row["device"], wait=False, say=progress.say))
        measured = []
        for row in rows:
            progress.say(f"measuring {row['name'] or row['device']}")
            measured.append(this_machine.measure(row, progress))
    progress.clear()
    return all(measured)


def _finding_lines(findings: Sequence[Finding]) -> list[str]:
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<7}  {finding.what:<{width}}  {finding.found}")
        details = (finding.effect, finding.fix and f"fix: {finding.fix}")
        lines += [f"{'':9}{detail}" for detail in details if detail]
    return lines


def _lines(row: Row) -> Iterator[str]:
    memory = f"memory {sized(row['memory_bytes'])}" if row["memory_bytes"] else "memory unknown"
    if row["family"] == "cpu":
        yield f"CPU: {row['name']}, {row['architecture']}"
        cores = (
            f"{plural(row['physical_cores'], 'usable core')} ({plural(row['logical_cpus'], 'logical CPU')})"
        )
        if machine.facts()["core_kinds"]:
            cores += f", {cores_text(machine.facts())}"
        cache = row["last_level_cache_bytes"]
        yield f"  {cores}, last-level cache {sized(cache) if cache else 'unknown'}, {memory}"
        yield f"  {row['os']}{', in a virtual machine' if row['virtualized'] else ''}"
        if row["emulated"]:
            yield f"  emulated ({row['emulated']}): its speeds mean nothing"
    else:
        yield f"GPU: {row['name'] or row['family']}, {row['device']}"
        capability = f", compute capability {row['compute_capability']}" if row["compute_capability"] else ""
        yield f"  {memory}, driver {row['driver'] or 'unknown'}{capability}"
    threads = f", {plural(row['threads'], 'thread')}" if row["threads"] else ""
    if row["read_bytes_per_s"]:
        yield f"  reads {row['read_bytes_per_s'] / 1e9:.1f} GB/s ({row['read_kernel']}{threads})"
    if row["matrix_flops_per_s"]:
        rate = row["matrix_flops_per_s"] / 1e9
        yield f"  multiplies matrices at {rate:,.0f} GFLOP/s ({row['matrix_kernel']}{threads})"
    if row["note"]:
        yield f"  {row['note']}"
