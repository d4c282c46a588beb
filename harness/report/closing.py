"""What a report says first, the answers in sentences; and the command that serves the fastest cell."""

from __future__ import annotations

from harness.dataset.study import Study, ok, provisional
from harness.report import answers, ranked_groups, served
from harness.report.answers import NAMED
from harness.report.ranked_groups import Group
from harness.report.timed_rows import in_words, with_prompts
from harness.report.tuned import command as command_of
from harness.stacks.header import stacks


def sentences(study: Study) -> list[str]:
    """For each model the best cells by each goal; then what several users, or a context of some depth, leave
    of the speed, and what serving adds to a token."""
    decodes, others = with_prompts(study.cells)
    prompts = {row["name"]: row for row in decodes}
    texts = []
    for group in ranked_groups.groups(study):
        deeper = _deeper(group, {row["name"] for row in others})
        of_servers = served.answers(group, study.behind)
        texts += of_servers
        is_answered = of_servers and len(group.named) <= 1 and all(row["server"] for _, row in group.named)
        best = None if is_answered else answers.sentence(group, prompts)
        if best and (group.named or group.searched or not deeper):
            texts.append(": ".join(best))
        texts += deeper
        texts += served.added(group.named, study.behind)
    return texts


def commands(study: Study) -> list[str]:
    """For each model, how to serve its fastest cell."""
    lines = (_command(study, group) for group in ranked_groups.groups(study))
    return [f"to serve it: {command}" for command in lines if command]


def _deeper(group: Group, names: set[str]) -> list[str]:
    """A sentence for each cell of several users or of depths that has a row in the tables."""
    shown = [row for _, row in group.every if row["name"] in names and (row["users"] or row["depths"])]
    return [
        f"{'provisional: ' * provisional(row)}{group.title} {row['stack']} {row['variant']}: {in_words(row)}."
        for row in shown
        if ok(row) or provisional(row)
    ][:NAMED]


def _command(study: Study, group: Group) -> str | None:
    """How the stack's own program serves the fastest cell; of several, the one with the best known quality,
    else the smallest. None without such a program, and for random weights."""
    leading = {answer.goal: answer.leaders for answer in answers.answers(group)}
    if not (fastest := leading.get(answers.FASTEST)):
        return None
    others = (*leading[answers.QUALITY], *leading[answers.SMALLEST])
    row = dict(group.named)[next((label for label in others if label in fastest), fastest[0])]
    stored, header = study.behind(row), stacks().get(row["stack"])
    if stored is None or header is None or row["weights"] == "synthetic":
        return None
    record = stored.record
    return command_of(header, record["options"], record["model"]["weights"].get("file"))
