"""The answers of a run: the best cells of each model in words, and the command that serves one of them."""

from __future__ import annotations

from collections.abc import Mapping

from harness.base.text import list_named
from harness.dataset.study import Study, ok, provisional
from harness.report import served, summary
from harness.report.summary import Group, Ranked, leaders
from harness.report.timed_rows import PROMPT, WithPrompt, in_words, prompt_rate, with_prompts
from harness.report.tuned import command as command_of
from harness.stacks.header import stacks

NAMES_SHOWN = 4
Rankings = tuple[Ranked, Ranked, Ranked]
"""By speed, size and quality."""


def answers(study: Study) -> list[str]:
    """For each model the fastest, the smallest and the best known quality; then what several users, or a
    context of some depth, leave of the speed."""
    decodes, others = with_prompts(study.cells)
    prompts = {row["name"]: row for row in decodes}
    found = []
    for group in summary.shown_groups(study):
        deeper = _deeper(group, {row["name"] for row in others})
        of_servers = served.answers(group, study.behind)
        found += of_servers
        is_answered = of_servers and len(group.named) <= 1 and all(row["server"] for _, row in group.named)
        sentence = None if is_answered else _sentence(group, _ranked(group), prompts)
        if sentence and (group.named or not deeper):
            found.append(f"provisional: {sentence}" if group.provisional else sentence)
        found += deeper
        found += served.added(group.named, study.behind)
    return found


def commands(study: Study) -> list[str]:
    """For each model, how to serve its fastest cell."""
    found = (_command(study, group, _ranked(group)) for group in summary.shown_groups(study))
    return [f"to serve it: {command}" for command in found if command]


def _deeper(group: Group, names: set[str]) -> list[str]:
    """A sentence for each cell of several users or of depths that has a row in the tables."""
    shown = [row for _, row in group.every if row["name"] in names and (row["users"] or row["depths"])]
    sentences = [
        f"{'provisional: ' * provisional(row)}{group.title} {row['stack']} {row['variant']}: {in_words(row)}."
        for row in shown
        if ok(row) or provisional(row)
    ]
    return sentences[:NAMES_SHOWN]


def _sentence(group: Group, ranked_cells: Rankings, prompts: Mapping[str, WithPrompt]) -> str | None:
    """Null where there is nothing to rank, as after a search of the longest context. `prompts`: the decodes
    with the speed of a prompt, by name."""
    if not group.named:
        failed = group.every and not any(ok(row) for _, row in group.every)
        return f"{group.title}: no cell is ok, so nothing is ranked." if failed else None
    speed, size, quality = ranked_cells
    if len(group.named) == 1:
        label, row = group.named[0]
        figures = [each.entries[0].text for each in (speed, size) if each.entries]
        if rate := prompt_rate(prompts[row["name"]]):
            disturbed = "about " * prompts[row["name"]]["prompt_provisional"]
            figures.insert(1, f"reads a prompt of {PROMPT} tokens at {disturbed}{rate:,.0f} tok/s")
        return f"{group.title} {label}: {'; '.join(figures)}." if figures else None
    clauses: dict[str, str] = {}
    for ranked, best, measure in (
        (speed, "the fastest", "speed"),
        (size, "the smallest", "size"),
        (quality, f"the best in quality, by {quality.measure}", quality.measure),
    ):
        leading = leaders(ranked.entries, ranked.most) if len(ranked.entries) > 1 else []
        if len(leading) == 1:
            label, is_best = leading[0].label, f"{best} ({leading[0].text})"
            clauses[label] = (
                f"{clauses[label]} and {is_best}" if label in clauses else f"{label} is {is_best}"
            )
        elif leading:
            names = list_named([f"{each.label} ({each.shown})" for each in leading], NAMES_SHOWN)
            clauses[measure] = f"not distinguishable in {measure}: {names}"
    return f"{group.title}: {'; '.join(clauses.values())}." if clauses else None


def _ranked(group: Group) -> Rankings:
    return (
        summary.fastest(group.named),
        summary.smallest(group.named, group.every),
        summary.best_quality(group.named),
    )


def _command(study: Study, group: Group, ranked_cells: Rankings) -> str | None:
    """How the stack's own program serves the fastest cell; of several, the one with the best known quality,
    else the smallest. Null without such a program, and for random weights."""
    cells = dict(group.named)
    speed, size, quality = ranked_cells
    if not speed.entries:
        return None
    tied = [each.label for each in leaders(speed.entries, speed.most)]
    others = [each.label for ranked in (quality, size) if ranked.entries for each in leaders(ranked.entries)]
    row = cells[next((label for label in others if label in tied), tied[0])]
    stored, header = study.behind(row), stacks().get(row["stack"])
    if stored is None or header is None or row["weights"] == "synthetic":
        return None
    record = stored.record
    return command_of(header, record["options"], record["model"]["weights"].get("file"))
