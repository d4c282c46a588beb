"""Tables of tests as CSV, in tests/tables/: figures as others publish them, and names as people type them."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def rows(name: str) -> list[list[str]]:
    """Without the line of column names."""
    with (Path(__file__).parent / "tables" / f"{name}.csv").open(newline="") as file:
        return list(csv.reader(file))[1:]


def of_each(names: str | tuple[str, ...], cells: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Like parametrize, but one test for all rows of a table, which fails with every row that is wrong."""

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        def test() -> None:
            wrong = []
            for row in cells:
                values = (row,) if isinstance(names, str) else row
                try:
                    check(**dict(zip((names,) if isinstance(names, str) else names, values, strict=True)))
                except Exception as error:
                    wrong.append(f"{row}: {error!r}")
            assert not wrong, "\n".join(wrong)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate
