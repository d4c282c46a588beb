"""Score every variant on a text, teacher-forced: perplexity, and the divergence from the 16-bit weights.

Writes one record per variant; finished scores are kept. The reference of a model is computed once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.campaign.opened import Campaign
from harness.campaign.quality.exchange import BadReference, GivenReference
from harness.campaign.quality.scoring import NotExported, Scoring
from harness.campaign.quality.texts import Text, TextError, read
from harness.config import Quality
from harness.plan import Cell
from harness.results import Stored

__all__ = ["BadReference", "GivenReference", "NotExported", "TextError", "export", "score", "texts_of"]


def texts_of(cells: Sequence[Cell]) -> dict[str, Text]:
    """The texts of the cells that are scored, by their names in the config. Raises TextError."""
    found: dict[str, Text] = {}
    for cell in cells:
        if isinstance(cell.workload, Quality) and cell.workload.text not in found:
            found[cell.workload.text] = read(cell.workload)
    return found


def score(
    cells: Sequence[Cell], campaign: Campaign, texts: dict[str, Text], given: GivenReference | None = None
) -> list[Stored]:
    """Score cells whose workload is Quality, `given` in place of references that are computed. Returns one
    record per cell, kept ones included.

    Raises ResultsError (the results cannot be written), KeyboardInterrupt after an interrupted record.
    """
    found = []
    for group in _groups(cells):
        workload = group[0].workload
        assert isinstance(workload, Quality)
        with tempfile.TemporaryDirectory(prefix="harness-quality-") as folder:
            scoring = Scoring(group, workload, campaign, texts[workload.text], Path(folder), given)
            found += [scoring.stored(cell) for cell in group]
    return found


def export(cells: Sequence[Cell], campaign: Campaign, texts: dict[str, Text], path: Path) -> None:
    """Write the reference of the cells to a file, computed if it is not kept.

    Raises BadReference (they have several, or the file cannot be written), NotExported.
    """
    group, *others = _groups(cells)
    if others:
        raise BadReference(
            f"a file holds one reference, and these cells have {1 + len(others)}: one per model and workload;"
            " choose with --only"
        )
    workload = group[0].workload
    assert isinstance(workload, Quality)
    with tempfile.TemporaryDirectory(prefix="harness-quality-") as folder:
        Scoring(group, workload, campaign, texts[workload.text], Path(folder)).export(path)


def _groups(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells that share a reference."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.model.name, cell.workload.model_dump_json()), []).append(cell)
    yield from groups.values()
