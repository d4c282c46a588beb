"""The table of scores of a text, for the terminal, the page and Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.rows import Score
from harness.report.table import NONE, Table, note
from harness.results.kinds.scored import Figure

HEADING = "Quality: perplexity, and divergence from the 16-bit reference"
MEANING = (
    "Every variant reads the same text as it stands (teacher forcing), in windows; the tokens of the"
    " second half of each are scored, as llama-perplexity does. PPL: perplexity. ln PPL ratio: its"
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
    """One line per score."""
    lines = [[row["name"], row["status"], *_figures(row), row["reference"] or NONE] for row in scores]
    headings = ["cell", "status", *(heading for heading, *_ in COLUMNS), "reference"]
    numeric = [False, False, *[True] * len(COLUMNS), False]
    meanings = ["", "", *(meaning for *_, meaning in COLUMNS), "the 16-bit weights, and their precision"]
    return Table(headings, lines, numeric, [row["status"] != "ok" for row in scores], HEADING, meanings)


def show(scores: Sequence[Score]) -> None:
    """Print the table, what was scored, and the reasons of what is not ok."""
    table(scores).show()
    for sentence in notes(scores):
        note(sentence)


def notes(scores: Sequence[Score]) -> list[str]:
    """What was scored, and the reasons of what is not ok."""
    reasons = [f"{row['name']}: {reason}" for row in scores for reason in row["reasons"]]
    return [*dict.fromkeys(filter(None, map(_what, scores))), *reasons]


def _figures(row: Score) -> list[str]:
    return [
        _shown(row["figures"].get(key), form, factor, key in WITH_ERROR)
        for _, key, form, factor, _ in COLUMNS
    ]


def _shown(figure: Figure | None, form: str, factor: float, with_error: bool) -> str:
    if figure is None:
        return NONE
    text = format(figure["value"] * factor, form)
    error = figure.get("standard_error")
    return f"{text} ±{error * factor:{form.lstrip('+')}}" if with_error and error is not None else text


def _what(row: Score) -> str | None:
    if not row["scored"]:
        return None
    windows = f"{row['windows']} windows of {row['n_ctx']} tokens, the second half of each"
    return f"scored {row['scored']:,} tokens of {row['text']}: {windows}; ± is a standard error over windows"
