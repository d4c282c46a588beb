"""Parts of pages: every path of a column exists, and series say what the page needs of them."""

import types
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import NotRequired, is_typeddict

from harness.analysis.columns import SpeculationRow, TaskRow, UsersRow
from harness.report import longest, memory, parts, prefill, workloads
from harness.report.plots import Chart, Mark

COLUMNS = [
    *((longest.ContextRow, column) for column in longest.COLUMNS),
    *((memory.MemoryRow, column) for columns in memory.TABLES.values() for column in columns),
    *((prefill.SweepRow, column) for column in prefill.COLUMNS),
]
PATHS = [
    *(
        (kind, path, column.heading)
        for kind, column in COLUMNS
        if (path := getattr(column.text, "keywords", {}).get("path"))
    ),
    *((longest.ContextRow, path, name) for name, path, *_ in longest.SHOWN),
    *((memory.Moment, part.path, part.name) for part in memory.PARTS),
]
MARK = Mark("#123456", "circle")


def step(kind: Any, name: str) -> Any:
    """The type at a name within a type; None is left out of unions."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (of for of in get_args(kind) if of is not type(None))
    if get_origin(kind) is NotRequired:
        return step(*get_args(kind), name)
    if is_typeddict(kind) or is_dataclass(kind):
        return get_type_hints(kind)[name]
    assert get_origin(kind) in (list, dict), f"{name} of {kind}"
    return get_args(kind)[-1]


@pytest.mark.parametrize(
    ("kind", "path", "heading"), PATHS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_path_leads_to_a_value_of_its_row(kind, path, heading):
    for name in path.split("."):
        kind = step(kind, name)
    assert {*get_args(kind), kind} & {int, float, str}, f"{heading}: {kind}"


@pytest.mark.parametrize(
    ("columns", "kind", "further"),
    [
        (workloads.USERS, UsersRow, {"limit"}),
        (workloads.TURNS, TaskRow, {"prefix", "prefill_share"}),
        (
            *(workloads.GUESSES, SpeculationRow),
            {"acceptance", "length", "accepted_share", "guesses_per_pass", "plain_tokens_per_s", "speed_up"},
        ),
    ],
)
def test_every_path_into_a_timed_row_is_one_of_its_figures(columns, kind, further):
    paths = [
        column.text.keywords["path"].split(".") for column in columns if hasattr(column.text, "keywords")
    ]
    names = {path[1] for path in paths if path[0] == "at"}
    assert len(names) > 4
    assert names <= {*get_type_hints(kind), *further}


def test_what_is_missing_on_a_path_is_no_figure():
    row = {"a": None, "b": {"c": [{"d": 1.5}], "e": []}, "f": "text"}
    found = [parts.figure_at(row, path) for path in ("b.c.-1.d", "a.x.y", "b.x", "b.e.0.d", "f", "b")]
    assert found == [1.5, None, None, None, None, None]


def test_a_series_has_a_place_in_the_legend_and_a_hover_text_or_none():
    theory = parts.lines("a<b", [1], [2], MARK, v=3, kind="theory", dash="dot")
    assert (theory["name"], theory["mode"], theory["hoverinfo"]) == ("a&lt;b", "lines", "skip")
    assert theory["meta"] == {"v": 3, "kind": "theory"}
    known = {"theory": ("T", "dotted, T"), "ridge": ("R", "open, R")}
    chart = Chart("n", "t", "A of B.", [theory], {}, known=known)
    assert (chart.overlays, chart.text) == ({"theory": "T"}, "A of B; dotted, T.")
    symbols = parts.scatter("a", [1], [2], MARK, "%{x}", 0, marker={"size": 3}, cliponaxis=False)
    assert symbols["hovertemplate"] == "%{x}<extra>%{fullData.name}</extra>"
    assert symbols["marker"] == {"color": "#123456", "symbol": "circle", "size": 3}
    assert parts.points([{"x": 1, "y": None}, {"x": 2, "y": 0.123456}], "x", "y") == ([2], [0.1235])


@given(st.lists(st.tuples(*[st.none() | st.floats(-1e6, 1e6)] * 3)))
def test_whiskers_reach_to_the_ends_of_intervals_and_an_open_end_has_none(rows):
    values, ends = [value for value, *_ in rows], [[low, high] for _, low, high in rows]
    whiskers = parts.error_bars(values, ends, "#123456")
    for (value, low, high), up, down in zip(rows, whiskers["array"], whiskers["arrayminus"], strict=True):
        assert up == pytest.approx(max(0, high - value) if None not in (value, high) else 0, abs=1e-4)
        assert down == pytest.approx(max(0, value - low) if None not in (value, low) else 0, abs=1e-4)
