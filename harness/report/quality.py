"""Chapters on quality, agreement and the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.analysis import agreement
from harness.analysis.columns import Check, Score, ShownCell
from harness.analysis.figures import shown_in
from harness.analysis.quality_figures import FEWEST_WINDOWS
from harness.base.text import list_named, plural
from harness.dataset.study import Curve, finite, labels, ok
from harness.records.checked import Depth, Experts
from harness.records.scored import Figure
from harness.report import plots, tables
from harness.report.tables import Column
from harness.report.text_table import FAILED, NONE, REMARK, Block, Note, Table, formatted

# Weight checks as one table for the terminal, the page and Markdown.


AGREEMENT_HEADING = "Same model? Logits against the 16-bit reference"
AGREEMENT_MEANING = (
    "Every variant reads the same token ids. Its logits are compared with those of the model's 16-bit weights"
    " (a GPTQ or AWQ checkpoint: with those of its own weights, unpacked). Logits are taken after each of the"
    " last tokens of the prompt and after each of the last tokens before a depth n; the latter are fed one by"
    " one, as in decoding. Error: norm of the difference over norm of the reference, mean over the positions;"
    " two unrelated models differ by 141%. Own weights: the worst error of a quantized variant against its"
    " own weights, dequantized and run in float32, which only arithmetic explains; in brackets the largest"
    " that it explains. Top-1: share of positions where both rank the same token first."
    " Near tie: a position where they do not, but the reference itself hardly prefers one token. Allowed: the"
    " error that the coarsest type of the variant explains; a larger one means a different model. The verdict"
    " covers all depths compared; the table shows the prompt, n = 300, n = 2,100 and the deepest."
)


def headings(checks: Sequence[Check]) -> list[str]:
    depths = [f"{metric} n={n:,}" for n in _depths(checks) for metric in ("error", "top-1")]
    own = ["own weights"] if any(check["own"] for check in checks) else []
    return ["cell", "reference", *depths, "allowed", *own, "verdict"]


def cells(check: Check, checks: Sequence[Check]) -> list[str]:
    """One check as cells, in the order of the headings."""
    depths = {depth["n"]: depth for depth in check["depths"]}
    metrics = [text for n in _depths(checks) for text in (_error(depths.get(n)), _top1(depths.get(n)))]
    return [
        str(check["name"]),
        str(check["reference"] or NONE),
        *metrics,
        formatted(finite(check["allowed_error"]), "{:.0%}"),
        *([_own(check)] if any(each["own"] for each in checks) else []),
        str(check["verdict"]),
    ]


def agreement_table(checks: Sequence[Check]) -> Table:
    """One line per check."""
    named = headings(checks)
    numeric = [False, False, *[True] * (len(named) - 3), False]
    marked = ["yellow" if check["verdict"] != "agrees" else "" for check in checks]
    return Table(named, [cells(check, checks) for check in checks], numeric, marked, AGREEMENT_HEADING)


def agreement_notes(checks: Sequence[Check]) -> list[str]:
    """Reasons of checks that do not agree, and depths that were skipped because of the time limit."""
    reasons = [f"{check['name']}: {check['reason']}" for check in checks if check["reason"]]
    limited = [check for check in checks if check["left_out_n"]]
    skipped = [
        f"{check['name']}: n = {', '.join(f'{n:,}' for n in check['left_out_n'])}" for check in limited
    ]
    reasons += [
        f"{check['name']}: not compared with its own weights: {check['own_failure']}"
        for check in checks
        if check["own_failure"]
    ]
    reasons += [f"{check['name']}: {_experts(found)}" for check in checks if (found := check["experts"])]
    return reasons + [f"not compared, over the time limit: {depths}" for depths in skipped]


def _depths(checks: Sequence[Check]) -> list[int]:
    """The depths that have columns. The records hold the other depths, which count for the verdict too."""
    compared = [sorted(depth["n"] for depth in check["depths"]) for check in checks if check["depths"]]
    return sorted({n for depths in compared for n in agreement.shown_checks(depths)})


def _error(depth: Depth | None) -> str:
    if depth is None:
        return NONE
    error = finite(depth["relative_error"])
    return "NaN" if error is None else f"{error:.2%}" if error < 0.1 else f"{error:.0%}"


def _top1(depth: Depth | None) -> str:
    """`96%`, `84% (2 near ties)`."""
    share = finite(depth["top1_agreement"]) if depth else None
    if depth is None or share is None:
        return NONE
    return f"{share:.0%}" + (
        f" ({plural(round(ties), 'near tie')})" if (ties := finite(depth["near_ties"])) else ""
    )


def _own(check: Check) -> str:
    """`4.1% (10%)`."""
    if not check["own"]:
        return NONE
    worst = max(check["own"], key=lambda depth: finite(depth["relative_error"]) or 0.0)
    return f"{_error(worst)} ({formatted(finite(check['own_allowed_error']), '{:.0%}')})"


def _experts(found: Experts) -> str:
    share = f"{found['others']:,} of {found['choices']:,} choices of experts"
    return f"compared with the experts that it chose: {share} were others than the reference's own"


# The tables of one model on the page: few columns at first, a sparkline of latency and badges per row.


MOST = 8  # columns of a table until the reader asks for all, with the cell, its status and its sparkline
WHY = "why"  # badge of a cell that is not ok
BLOCKS, WIDTH, HEIGHT = 30, 72, 18  # of a sparkline: medians, and its size in pixels


@dataclass(frozen=True)
class Spark:
    """`points`: of an SVG polyline. `text`: the same in words."""

    points: str
    text: str


@dataclass(frozen=True)
class ModelTable:
    """`more`: per heading, whether it waits for "all columns". Per row, and empty in all but the first table:
    `sparks`, null without a series; `badges`, code and sentence. `figures`: above the table, filtered with
    it."""

    table: Table
    columns: Sequence[Column[Any]]
    rows: Sequence[ShownCell]
    more: Sequence[bool]
    sparks: Sequence[Spark | None]
    badges: Sequence[Sequence[tuple[str, str]]]
    figures: Sequence[plots.Chart] = ()


def tables_of_model(model: str, rows: Sequence[ShownCell], series: Mapping[str, Curve]) -> list[ModelTable]:
    """The tables in which a model's decodes have figures."""
    names, first = labels(rows, model), {figure.label for figure in shown_in("first")}
    found: list[ModelTable] = []
    for title, every in tables.TABLES.items():
        used = tables.used_columns(every, rows)
        if not used:
            continue
        used.sort(key=lambda column: column.heading not in first)
        sparks = [] if found else [spark(series.get(row["name"])) for row in rows]
        sparks = sparks if any(sparks) else []
        table = tables.of_columns(title, used, rows, names)
        badges = [] if found else [badges_of(row) for row in rows]
        room = MOST - bool(sparks)
        more = [place >= room for place in range(2 + len(used))]
        found.append(ModelTable(table, used, rows, more, sparks, badges))
    return found


def badges_of(row: ShownCell) -> list[tuple[str, str]]:
    """Code and sentences of each warning of a row, and why it is not ok."""
    found: dict[str, list[str]] = {}
    if not ok(row) and row["reasons"]:
        found[WHY] = row["reasons"]
    for flag in row["flags"]:
        found.setdefault(flag["code"].replace("_", " "), []).append(flag["detail"])
    return [(code, "; ".join(details)) for code, details in found.items()]


def spark(curve: Curve | None) -> Spark | None:
    """Latency over positions from zero to its highest median, without the first token; null: too short."""
    if curve is None or len(curve.ms) <= BLOCKS:
        return None
    medians = np.array([np.median(block) for block in np.array_split(curve.decode.ms, BLOCKS)])
    if not np.isfinite(medians).all() or medians.max() <= 0:
        return None
    x = np.linspace(1, WIDTH - 1, BLOCKS)
    y = HEIGHT - 1 - (HEIGHT - 2) * medians / medians.max()
    points = " ".join(f"{left:.0f},{up:.1f}" for left, up in zip(x, y, strict=True))
    return Spark(points, f"{medians[0]:.1f} to {medians[-1]:.1f} ms by position {curve.n[-1]:,.0f}")


# The table of scores of a text, for the terminal, the page and Markdown.


HEADING = "Quality: perplexity, and divergence from the 16-bit reference where there is one"
MEANING = (
    "Every variant reads the same text as it stands (teacher forcing), in windows; the tokens of the"
    " second half of each are scored, behind a BOS where the tokenizer asks for one, as llama-perplexity"
    " does. PPL: perplexity. ln PPL ratio: its"
    " logarithm minus the reference's, from the difference in each window, so that it is known far"
    " better than the PPL. KLD: KL divergence from the distribution of the 16-bit weights, in nats per"
    " token. Top-1: tokens that both rank first; top-5: of the reference's first five, the share among"
    " this one's. RMS dp: root mean square change of the probability of the text's own token. ±:"
    " standard error over windows."
)
# Heading, figure, digits, factor, meaning.
COLUMNS: tuple[tuple[str, str, str, float, str], ...] = (
    ("PPL", "ppl", ".3f", 1.0, "perplexity of the text, with its standard error over windows"),
    ("ln PPL ratio", "ln_ppl_ratio", "+.5f", 1.0, "to the reference, from the difference in each window"),
    ("KLD mean", "kld_mean", ".6f", 1.0, "KL divergence from the reference, nats per token"),
    ("median", "kld_median", ".6f", 1.0, "over the scored tokens"),
    ("99%", "kld_p99", ".5f", 1.0, "99th percentile"),
    ("99.9%", "kld_p99_9", ".5f", 1.0, "99.9th percentile"),
    ("max", "kld_max", ".4f", 1.0, "the largest of all scored tokens"),
    ("top-1 %", "top1", ".2f", 100.0, "tokens that both rank first"),
    ("top-5 %", "top5", ".2f", 100.0, "of the reference's first five, the share among this one's"),
    ("RMS dp %", "rms_dp", ".3f", 100.0, "root mean square change of the probability of the text's token"),
)
WITH_ERROR = ("ppl", "ln_ppl_ratio", "kld_mean", "top1")


def table(scores: Sequence[Score]) -> Table:
    """One line per score, and per depth of it."""
    lines, marked = [], []
    for row in scores:
        status, reference = row["status"], row["reference"] or NONE
        lines.append([row["name"], status, *_columns(row["figures"]), reference])
        for deep in row["at_depth"]:
            name = f"{row['name']} at {deep['depth']:,}"
            lines.append([name, status, *_columns(deep["figures"]), reference])
        marked += ["" if status == "ok" else "red"] * (1 + len(row["at_depth"]))
    headings = ["cell", "status", *(heading for heading, *_ in COLUMNS), "reference"]
    numeric = [False, False, *[True] * len(COLUMNS), False]
    meanings = ["", "", *(meaning for *_, meaning in COLUMNS), "the 16-bit weights, and their precision"]
    return Table(headings, lines, numeric, marked, HEADING, meanings, needed=("top-1 %",))


def blocks(scores: Sequence[Score]) -> list[Block]:
    """The table, with short names, and the notes."""
    models = [row["model"] for row in scores for _ in (row, *row["at_depth"])]
    shown = tables.with_short_names(table(scores), models)
    failures = {reason for row in scores for reason in _reasons(row)}
    return [shown, *(Note(each, FAILED if each in failures else REMARK) for each in notes(scores))]


def notes(scores: Sequence[Score]) -> list[str]:
    """Sentences on the scored text, positions beyond the trained context, and results that are not ok."""
    reasons = [reason for row in scores for reason in _reasons(row)]
    sentences = [sentence for row in scores for sentence in (*_what(row), *_untrained(row))]
    return [*dict.fromkeys(sentences), *_without_reference(scores), *reasons]


def _reasons(row: Score) -> list[str]:
    return [f"{row['name']}: {reason}" for reason in row["reasons"]]


def _columns(figures: Mapping[str, Figure]) -> list[str]:
    return [_shown(figures.get(key), form, factor, key in WITH_ERROR) for _, key, form, factor, _ in COLUMNS]


def _shown(figure: Figure | None, form: str, factor: float, with_error: bool) -> str:
    if figure is None:
        return NONE
    text = format(figure["value"] * factor, form)
    error = figure.get("standard_error")
    return f"{text} ±{error * factor:{form.lstrip('+')}}" if with_error and error is not None else text


def _what(row: Score) -> list[str]:
    if not row["scored"]:
        return []
    windows = f"{row['windows']} windows of {row['n_ctx']} tokens, the second half of each; {_bos(row)}"
    found = [
        f"scored {row['scored']:,} tokens of {row['text']}: {windows}; ± is a standard error over windows"
    ]
    if row["special"]:
        strings = ", ".join(f"{string} ({times:,} times)" for string, times in row["special"].items())
        found.append(f"{row['text']} contains {strings}: scored as text, not as special tokens")
    if count := row["carriage_returns"]:
        found.append(
            f"{row['text']} has {count:,} carriage returns (CRLF line ends), which are scored as they stand:"
            " its PPL is not that of the text with LF; write it with LF to compare"
        )
    if (row["windows"] or 0) < FEWEST_WINDOWS:
        found.append(
            f"fewer than {FEWEST_WINDOWS} windows: their intervals are wide, and `harness compare` gives no"
            " verdict; raise `chunks` of the workload `quality`"
        )
    if row["at_depth"]:
        each = f"{row['at_depth'][0]['scored']:,} tokens"
        found.append(
            f"at a depth: {each}, the last of as many windows of that length; every depth has the same"
        )
    return found


def _without_reference(scores: Sequence[Score]) -> list[str]:
    """Why scores have a perplexity alone: a sentence for each reason."""
    of: dict[str, list[str]] = {}
    for row in scores:
        if row["figures"] and row["no_reference"]:
            of.setdefault(row["no_reference"], []).append(row["name"])
    return [f"no KLD and no agreement of {list_named(names, 4)}: {why}" for why, names in of.items()]


def _bos(row: Score) -> str:
    if row["bos"] is not None:
        return f"each begins with the BOS that the tokenizer asks for (id {row['bos']})"
    return "no BOS: the tokenizer asks for none" if row["bos_wanted"] else "no BOS was put in front"


def _untrained(row: Score) -> list[str]:
    trained = row["trained_context"]
    lengths = [row["n_ctx"] or 0, *(deep["depth"] for deep in row["at_depth"])]
    if trained is None or not (beyond := [f"{each:,}" for each in lengths if each > trained]):
        return []
    return [
        f"{row['model']} was trained on at most {trained:,} tokens: figures at {' and '.join(beyond)} are of"
        " a model beyond its trained context"
    ]
