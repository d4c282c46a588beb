"""`harness report --list`: the table of cells; of an unchanged folder as it was made before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.base.text import few
from harness.cli import OK, say
from harness.dataset import index
from harness.report.text_table import Block, as_values, of_values, show

if TYPE_CHECKING:
    from harness.dataset.study import Study


class Listed(NamedTuple):
    """`disturbed`: how many repeats stayed disturbed, as a sentence."""

    warnings: Sequence[str]
    blocks: Sequence[Block]
    disturbed: str | None


def run(
    folder: Path, as_json: bool, wide: bool, price: float | None, log: Path | None, campaign: str | None
) -> int:
    """Print the table, or one array. `price`, `log`: see with_energy(). `campaign`: see report_page.load().
    Raises ResultsError as these do, and if there is no such folder."""
    if as_json:
        from harness.cli.tables import show_cells_table
        from harness.dataset.energy import with_energy

        show_cells_table(with_energy(_read(folder, campaign)[0], price, log), as_json, wide)
        return OK
    name = "list" if price is None else f"list at {price}"
    kept = None if log or campaign else index.view(folder, name, partial(_of_index, price))
    if kept:
        found = Listed(kept["warnings"], of_values(kept["blocks"]), kept["disturbed"])
    else:
        study, published = _read(folder, campaign)
        if published:
            return OK
        found = _listed(study, price, log)
    for warning in few(found.warnings):
        say(warning)
    show(found.blocks, wide)
    if found.disturbed:
        say(found.disturbed)
    return OK


def _of_index(price: float | None, found: index.Index) -> dict[str, Any] | None:
    if not found.count():  # they are all published
        return None
    listed = _listed(found.study(), price, None)
    return {**listed._asdict(), "blocks": as_values(listed.blocks)}


def _listed(study: Study, price: float | None, log: Path | None) -> Listed:
    from harness.analysis.verdicts import disturbance_summary
    from harness.cli.tables import cells_blocks
    from harness.dataset.energy import with_energy

    study = with_energy(study, price, log)
    return Listed(study.warnings, [*cells_blocks(study)], disturbance_summary(study.cells))


def _read(folder: Path, campaign: str | None) -> tuple[Study, bool]:
    """The user's own records, and whether there are published ones alone."""
    if campaign:
        from harness.cli import report_page

        return report_page.load([folder], campaign), False
    from harness.cli.options import stored
    from harness.dataset.study import load_study
    from harness.records import no_records

    every = list(stored(folder))
    own = [each for each in every if each.record["kind"] != "reported"]
    if every and not own:
        say(f"{folder}: its {len(every)} records are published figures: see harness report {folder}")
    if not every:
        say(no_records(folder))
    return load_study(own), bool(every and not own)
