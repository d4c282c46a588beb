"""Cells that may be ranked together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.columns import Search, ShownCell
from harness.dataset.row_names import synthetic
from harness.dataset.study import Study, labels, ok, provisional, timed

Named = Sequence[tuple[str, ShownCell]]


@dataclass(frozen=True)
class Group:
    """One model on one machine, measured here or published. With labels: `every` cell, `named`, the decodes
    that are ok, and `searched`, the searches that are ok. `provisional`: none is, and `named` are those that
    only the machine disturbed."""

    model: str
    title: str
    every: Named
    named: Named
    searched: Sequence[tuple[str, Search]]
    provisional: bool = False

    @property
    def several(self) -> Named:
        """The cells of several users at once, unless they failed."""
        usable = [(label, row) for label, row in self.every if ok(row) or provisional(row)]
        return [(label, row) for label, row in usable if row["users"]]


def group(model: str, title: str, cells: Sequence[ShownCell], searches: Sequence[Search]) -> Group:
    """A group of these cells and searches; where no cell is ok, of the decodes that only the machine
    disturbed. Decodes of random weights are not ranked."""
    labelled = list(zip(labels(cells, model), cells, strict=True))
    decodes = [(label, row) for label, row in labelled if not timed(row) and not synthetic(row)]
    searched = [(label, row) for label, row in zip(labels(searches, model), searches, strict=True) if ok(row)]
    disturbed = [(label, row) for label, row in decodes if provisional(row)]
    if disturbed and not any(map(ok, cells)):
        return Group(model, title, labelled, disturbed, searched, provisional=True)
    return Group(model, title, labelled, [(label, row) for label, row in decodes if ok(row)], searched)


def groups(study: Study) -> list[Group]:
    """The groups in order of models; titles name machine and origin if a model has several."""
    places: dict[tuple[str, str, bool], tuple[list[ShownCell], list[Search]]] = {}
    for row in study.rows:
        origin = row["model"], row["machine"], row["kind"] == "reported"
        places.setdefault(origin, ([], []))[0].append(row)
    for search in study.searches:
        origin = search["model"], search["machine"], search["kind"] == "reported"
        places.setdefault(origin, ([], []))[1].append(search)
    order = list(dict.fromkeys((*study.models, *(row["model"] for row in study.searches))))
    models = Counter(model for model, *_ in places)
    return [
        group(
            model,
            model + (f" on {machine}{', third-party' * reported}" if models[model] > 1 else ""),
            *places[model, machine, reported],
        )
        for model, machine, reported in sorted(places, key=lambda origin: order.index(origin[0]))
    ]
