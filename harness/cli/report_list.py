"""`harness report --list`: the table of cells."""

from __future__ import annotations

from pathlib import Path

from harness.analysis.attempts import disturbance_summary
from harness.api.load import Source, of_records
from harness.base.text import few
from harness.cli import OK, say
from harness.dataset.energy import with_energy
from harness.dataset.rows import of_folder, without_collection
from harness.dataset.study import study_of
from harness.records import no_records
from harness.report.cell_tables import show_cells_table


@without_collection()
def run(
    folder: Path, as_json: bool, wide: bool, price: float | None, log: Path | None, campaign: str | None
) -> int:
    """Print the table of the user's own records, or one array. `price`, `log`: see with_energy(). `campaign`:
    see of_records(). Raises ResultsError as these do, and if there is no such folder."""
    found = of_folder(folder)
    if campaign:
        study = of_records([Source(folder, found)], campaign)
    else:
        for damage in few(found.skipped):
            say(damage)
        own = found.own
        if not found.judged:
            say(no_records(folder))
        elif not own:
            published = f"its {len(found.judged)} records are published figures"
            say(f"{folder}: {published}: see harness report {folder}")
            if not as_json:
                return OK
        study = study_of(own)
    study = with_energy(study, price, log)
    show_cells_table(study, as_json, wide)
    if not as_json and (disturbed := disturbance_summary(study.cells)):
        say(disturbed)
    return OK
