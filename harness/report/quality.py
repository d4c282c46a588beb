"""The table of scores of a text, for the terminal, the page and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.analysis.columns import Score
from harness.analysis.quality_figures import FEWEST_WINDOWS
from harness.base.text import list_named
from harness.records.scored import Figure
from harness.report import tables
from harness.report.text_table import FAILED, NONE, REMARK, Block, Note, Table

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
    return [
        shown,
        *(Note(text, FAILED if text in failures else REMARK) for text in notes(scores)),
    ]


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
    sentences = [
        f"scored {row['scored']:,} tokens of {row['text']}: {windows}; ± is a standard error over windows"
    ]
    if row["special"]:
        strings = ", ".join(f"{string} ({times:,} times)" for string, times in row["special"].items())
        sentences.append(f"{row['text']} contains {strings}: scored as text, not as special tokens")
    if count := row["carriage_returns"]:
        sentences.append(
            f"{row['text']} has {count:,} carriage returns (CRLF line ends), which are scored as they stand:"
            " its PPL is not that of the text with LF; write it with LF to compare"
        )
    if (row["windows"] or 0) < FEWEST_WINDOWS:
        sentences.append(
            f"fewer than {FEWEST_WINDOWS} windows: their intervals are wide, and `harness compare` gives no"
            " verdict; raise `chunks` of the workload `quality`"
        )
    if row["at_depth"]:
        tokens = f"{row['at_depth'][0]['scored']:,} tokens"
        sentences.append(
            f"at a depth: {tokens}, the last of as many windows of that length; every depth has the same"
        )
    return sentences


def _without_reference(scores: Sequence[Score]) -> list[str]:
    """Why scores have a perplexity alone: a sentence for each reason."""
    names_of: dict[str, list[str]] = {}
    for row in scores:
        if row["figures"] and row["no_reference"]:
            names_of.setdefault(row["no_reference"], []).append(row["name"])
    return [f"no KLD and no agreement of {list_named(names, 4)}: {why}" for why, names in names_of.items()]


def _bos(row: Score) -> str:
    if row["bos"] is not None:
        return f"each begins with the BOS that the tokenizer asks for (id {row['bos']})"
    return "no BOS: the tokenizer asks for none" if row["bos_wanted"] else "no BOS was put in front"


def _untrained(row: Score) -> list[str]:
    trained = row["trained_context"]
    lengths = [row["n_ctx"] or 0, *(deep["depth"] for deep in row["at_depth"])]
    if trained is None or not (beyond := [f"{length:,}" for length in lengths if length > trained]):
        return []
    return [
        f"{row['model']} was trained on at most {trained:,} tokens: figures at {' and '.join(beyond)} are of"
        " a model beyond its trained context"
    ]
