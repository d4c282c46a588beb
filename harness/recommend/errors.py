"""How far off predictions have been: of the published study, and of those that were measured here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from harness.dataset.study import Study
from harness.recommend.type_rates import FOLDER

# As benchmarks/predictions.py and benchmarks/predictions_here.py print them.
KNOWN: Mapping[str, str] = {
    "cuda": (
        "how far off: on an RTX 4090, with a whole model size left out, B by 0.8% (median) in llama.cpp and "
        "2.3% in PyTorch's stacks; 89% and 86% of rows lay in their interval."
    ),
    "cpu": (
        "how far off: on one CPU, calibrated with three variants and the rate of each type, 5.6 to 5.9% in "
        "three runs (median of 18; 13 to 21% without the rates); 13 to 17 of 18 lay in their interval."
    ),
}
HEADING = "predictions"


def with_predictions(study: Study, folders: Iterable[Path]) -> Study:
    """The study with what became of predictions that `harness recommend --prove` kept in these results."""
    proved = [folder for folder in folders if (folder / FOLDER).is_dir()]
    if not proved:
        return study
    from harness.recommend import outcomes  # not at the top: most studies have none

    found = [said for folder in proved if (said := outcomes.so_far(folder))]
    return replace(study, methods={**study.methods, HEADING: [*found, *KNOWN.values()]}) if found else study
