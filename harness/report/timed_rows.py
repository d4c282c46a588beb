"""What timed rows give, for a terminal: the speed of a prompt beside decodes, and answers in words."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.columns import Cell, SurfaceFigures
from harness.analysis.prefill import TARGETS
from harness.base.text import plural
from harness.dataset.study import ok, provisional, timed

PROMPT = TARGETS[0]  # tokens, as in llama-bench's pp512


class WithPrompt(Cell):
    """A decode. `prompt_ms`: to the first token of a prompt of PROMPT tokens, of the same variant; None if
    not measured. `prompt_provisional`: the machine disturbed every repeat of that."""

    prompt_ms: float | None
    prompt_provisional: bool


def with_prompts(rows: Sequence[Cell]) -> tuple[list[WithPrompt], list[Cell]]:
    """The decodes among the rows, and the rows of other kinds, without those that have nothing but the time
    of a prompt, which a decode shows."""
    decodes = [row for row in rows if not timed(row)]
    others = [row for row in rows if timed(row)]
    prompts = {
        _variant(row): (ms, provisional(row))
        for row in others
        if (ok(row) or provisional(row)) and (ms := prompt_ms(row))
    }
    shown: list[WithPrompt] = []
    for row in decodes:
        ms, is_provisional = prompts.get(_variant(row), (None, False))
        shown.append({**row, "prompt_ms": ms, "prompt_provisional": is_provisional})
    beside = {_variant(row) for row in decodes} & prompts.keys()
    return shown, [row for row in others if _variant(row) not in beside or not _has_prompt_alone(row)]


def prompt_rate(row: WithPrompt) -> float | None:
    """Tokens of the prompt per second."""
    return PROMPT / row["prompt_ms"] * 1e3 if row["prompt_ms"] else None


def _variant(row: Cell) -> tuple[object, ...]:
    return row["model"], row["stack"], row["variant"], row["device"], row["machine"], row["kind"]


def prompt_ms(row: SurfaceFigures) -> float | None:
    """Of a pass over PROMPT tokens, or of the first turn of a conversation that begins with as many."""
    passes = [forward["ms"] for forward in row["passes"] if (forward["depth"], forward["n"]) == (0, PROMPT)]
    turns = [task["turns"][0] for task in row["tasks"] if not task["prefix_kept"]]
    first = [turn["prefill_ms"] for turn in turns if turn["evaluated"] == PROMPT]
    return next(iter(passes + first), None)


def _has_prompt_alone(row: Cell) -> bool:
    if not prompt_ms(row):
        return False
    return len(row["passes"]) == 1 or [len(task["turns"]) for task in row["tasks"]] == [1]


def in_words(row: SurfaceFigures) -> str:
    """`pp512 812 tok/s, 630.0 ms`, `94.1 tok/s at depth 0, 61.0 at 4,096`, `task 12.3 s, 4.1 s with its
    prefix kept`, or `8 users: 160 tok/s together, 20.0 each; one user 47.0 tok/s`; empty without rows."""
    if passes := row["passes"]:
        shallow = [forward for forward in passes if forward["depth"] == passes[0]["depth"]]
        shown = next((forward for forward in shallow if forward["n"] == PROMPT), shallow[-1])
        return f"pp{shown['n']} {shown['n'] / shown['ms'] * 1e3:,.0f} tok/s, {shown['ms']:,.1f} ms"
    if depths := row["depths"]:
        first, *others = [(_rate(speed["tokens_per_s"]), f"{speed['depth']:,}") for speed in depths["at"]]
        return ", ".join(
            [f"{first[0]} tok/s at depth {first[1]}", *(f"{r} at {depth}" for r, depth in others)]
        )
    if row["users"]:
        return _of_users(row)
    tasks = [
        f"{task['task_s']:.1f} s{' with its prefix kept' * task['prefix_kept']}" for task in row["tasks"]
    ]
    return f"task {', '.join(tasks)}" if tasks else ""


def _of_users(row: SurfaceFigures) -> str:
    """Of the most users at once, and of one user."""
    most = max(row["users"], key=lambda load: load["users"])
    alone = next((load for load in row["users"] if load["users"] == 1), None)
    one = f"one user {_rate(alone['tokens_per_s'] or alone['output_tokens_per_s'])} tok/s" if alone else ""
    if most is alone:
        return one
    if most["tokens_per_s"] is None:  # not all decoded at once
        together = f"{_rate(most['output_tokens_per_s'])} tok/s together, prompts included"
    else:
        together = f"{_rate(most['tokens_per_s'])} tok/s together"
    if most["user_tokens_per_s"] is not None:
        together += f", {_rate(most['user_tokens_per_s'])} each"
    return f"{plural(most['users'], 'user')}: {together}" + f"; {one}" * bool(one)


def _rate(value: float) -> str:
    """Tokens per second, with a decimal below 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
