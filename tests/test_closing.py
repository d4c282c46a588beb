"""The answers of a run: the best cells in words, and a command that serves one."""

from __future__ import annotations

import re

from golden_record import record
from test_first_screen import CELLS, DISTURBED, row

from harness.dataset.study import Study
from harness.records import Stored
from harness.report.closing import answers, commands


def test_the_fastest_the_smallest_and_the_best_known_quality_are_named():
    assert answers(Study("t", list(CELLS))) == [
        "m: a q4_0 is the fastest (90.0 tok/s) and the smallest (4,000 MB, perplexity 9.00);"
        " a q8_0 is the best in quality, by perplexity (8.00)."
    ]


def test_what_cannot_be_told_apart_is_named_together_and_unknown_quality_is_left_out():
    close = [
        row("a q8_0", tokens_per_s=90.0, tokens_per_s_ci95=[88.0, 92.0], peak_rss_bytes=8e9),
        row("a q4_0", tokens_per_s=89.0, tokens_per_s_ci95=[87.0, 91.0], peak_rss_bytes=4e9),
    ]
    assert answers(Study("t", close)) == [
        "m: not distinguishable in speed: a q8_0 (90.0 tok/s), a q4_0 (89.0 tok/s);"
        " a q4_0 is the smallest (4,000 MB)."
    ]


def test_one_cell_is_no_winner_and_none_that_is_ok_is_said():
    assert answers(Study("t", CELLS[:1])) == ["m a q8_0: 50.0 tok/s; 8,000 MB, peak RSS."]
    failed = row("a q8_0", status="invalid", tokens_per_s=50.0)
    assert answers(Study("t", [failed])) == ["m: no cell is ok, so nothing is ranked."]
    disturbed = [each | DISTURBED for each in CELLS]
    assert answers(Study("t", disturbed))[0].startswith("provisional: m: a q4_0 is the fastest (90.0 tok/s)")
    assert answers(Study("t", [*disturbed[1:], CELLS[0]])) == answers(Study("t", CELLS[:1]))
    assert answers(Study("t", [])) == []
    unknown = row("a q8_0", tokens_per_s=None, tokens_per_s_ci95=None, peak_rss_bytes=None)
    assert (
        answers(Study("t", [unknown])) == answers(Study("t", [unknown, unknown])) == []
    )  # such as a server's whose times were read late


def test_the_stacks_own_program_serves_a_file_but_not_random_weights(tmp_path):
    stored = Stored(tmp_path, record(model__weights__file="/m/my file.gguf"))
    cell = row("llamacpp q4_k_m", tokens_per_s=90.0, started_utc=stored.record["started_utc"])

    def said(weights: str) -> list[str]:
        known = [cell | {"weights": weights}]
        return commands(Study("t", known, repeats=known, stored=[stored]))

    assert said("synthetic") == []
    (command,) = said("real")
    assert command.startswith("to serve it: llama-server --model '/m/my file.gguf' --threads ")


def test_the_line_of_a_repeat_has_the_figures_of_its_row(harness, config):
    # With a spike at each fourth token the median of the steps is far from their mean.
    ran = harness("run", config({"spike_every": 4, "spike_ms": 40}), "--json")
    (row,) = ran.json
    assert re.search(rf"TTFT {row['ttft_ms']:.1f} ms, {row['tokens_per_s']:.1f} tok/s", ran.err)
    assert row["tokens_per_s"] < 0.5e3 / row["median_ms"]
