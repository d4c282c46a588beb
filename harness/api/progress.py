"""Progress of a campaign on standard error: a live line on a terminal, else a line per repeat."""

from __future__ import annotations

import shutil
import sys
import time

from harness.analysis import depth
from harness.analysis.attempts import BusyProcess
from harness.analysis.verdicts import USABLE, Verdict, attempts_left, status
from harness.base.text import plural, printable, unfiltered
from harness.config.plan import Cell
from harness.dataset import search_rows
from harness.dataset import table as dataset_table
from harness.records import Draft, ResultsError, Stored, table
from harness.report.text_table import show_status
from harness.report.timed_rows import in_words
from runners.protocol import Rows

REPEAT_MESSAGE_S = 10.0
HEARTBEAT_S = 60.0  # between lines about a long repeat, without a terminal


class Progress:
    """A campaign's Watcher. Prints at most as often as the worker flushes (once a second)."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._place, self._name = "", ""
        self._new_tokens = 0
        self._topic, self._printed_s = "", 0.0
        self.busiest: BusyProcess | None = None
        self._advised: list[str] = []  # each next step is printed once

    def say(self, line: str) -> None:
        """Show a transient message. On a terminal the next one replaces it; elsewhere messages with the same
        text before the colon are printed at most every ten seconds. Within a repeat, with its place."""
        topic, now = line.partition(":")[0], time.monotonic()
        line = f"{self._place} {line}  {self._name}" if self._place else line
        if self._live:
            self._draw(line)
            return
        if topic != self._topic or now >= self._printed_s + REPEAT_MESSAGE_S:
            self._topic, self._printed_s = topic, now
            print(line, file=sys.stderr, flush=True)

    def warn(self, line: str) -> None:
        """Print a message that stays."""
        self.clear()
        print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the live line of a terminal, before something is printed."""
        if self._live:
            self._draw("")

    def repeat_begins(self, number: int, of: int, cell: Cell, begun: Draft) -> None:
        again = f", attempt {begun['attempt']}" if begun["attempt"] > 1 else ""
        self._place, self._name = f"[{number}/{of}]", f"{cell.title} #{begun['repeat']}{again}"
        self._printed_s = time.monotonic()
        self._new_tokens = int(cell.workload.new_tokens or 0)
        if self._live:
            self._draw(f"{self._place} loading  {self._name}")

    def tokens(self, count: int, latency_ns: int) -> None:
        self._show(f"{count}/{plural(self._new_tokens, 'token')}, {latency_ns / 1e6:.2f} ms")

    def rows(self, rows: Rows) -> None:
        last = {name: column[-1] for name, column in rows.columns.items()}
        if rows.table == "turns":
            prefix = "kept" if last["reuse"] else "not kept"
            done = (
                f"turn {last['turn']}, prefix {prefix}: {last['prefill_ns'] / 1e9:.2f} s to its first token"
            )
        elif rows.table == "users":
            last_s = max(rows.columns["last_ns"]) / 1e9
            done = f"round {last['round']}, {plural(last['concurrency'], 'user')}: {last_s:.2f} s"
        else:
            what = plural(last["n"], "token") if rows.table == "prefill" else "a step"
            done = f"round {last['round']}, depth {last['depth']}: {what} {last['latency_ns'] / 1e6:.2f} ms"
        self._show(done)

    def _show(self, done: str) -> None:
        if self._live:
            self._draw(f"{self._place} {done}  {self._name}")
        elif time.monotonic() >= self._printed_s + HEARTBEAT_S:
            self._printed_s = time.monotonic()
            print(f"{self._place} {done}  {self._name}", file=sys.stderr, flush=True)

    def repeat_ends(self, stored: Stored, found: Verdict) -> None:
        times = stored.times
        state, reasons = found.status, found.reasons
        line = f"{self._place} {self._name}  {state}"
        if state in USABLE and times:
            row = dataset_table.repeat_row(stored.record, times, None, None)  # the figures of the tables
            figures = {"TTFT {:.1f} ms": row["ttft_ms"], "{:.1f} tok/s": row["tokens_per_s"]}
            known = [text.format(value) for text, value in figures.items() if value is not None]
            line += f"  {', '.join(known)}" if known else ""
        elif state in USABLE and (timed := of_rows(stored)):
            line += f"  {timed}"
        if attempts_left(stored.record, found):
            line += ": disturbed, measured again later"
        elif found.disturbed and stored.record["attempt"] > 1:  # the summary names the cause
            line += ": disturbed again"
        elif reasons:
            line += f": {'; '.join(reasons)}"
            # What to do about a busy machine is said once, at the end.
            steps = (
                [] if found.disturbed else [each for each in found.next_steps if each not in self._advised]
            )
            self._advised += steps
            line += "".join(f"\n  next: {each}" for each in steps)
        self.clear()
        colour = "green" if state in USABLE else "yellow" if found.disturbed else "red"
        show_status(line, f"  {state}", colour, sys.stderr)
        self._place = ""

    def disturbed_by(self, process: BusyProcess) -> None:
        """Kept for the summary."""
        self.busiest = process

    def search_ends(self, stored: Stored) -> None:
        state, reasons = status(stored.record)
        record, found = stored.record, stored.record["search"]
        line = f"{record['model']['name']} {record['stack']} {record['variant']}  {state}"
        if found.get("verified_n_ctx") and (way := found["verified_by"]):
            by = {"decode": "filled and decoding", "allocation": "allocated"}[way]
            line += f"  {found['verified_n_ctx']} tokens{search_rows.trained_mark(found)}, {by}"
        reasons = [*reasons, *(flag.detail for flag in search_rows.searches_notes(record))]
        self.clear()
        print(line + (f": {'; '.join(reasons)}" if reasons else ""), file=sys.stderr, flush=True)

    def _draw(self, line: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        terminal = unfiltered(sys.stderr)
        terminal.write("\r\x1b[K" + printable(line)[:width])
        terminal.flush()


def of_rows(stored: Stored) -> str:
    """What the timed rows of a repeat give, in words; empty without any."""
    try:
        return in_words(depth.surface_row(stored.record["workload"]["kind"], [table(stored)]))
    except ResultsError:  # the verdict has the reason
        return ""
