"""docs/reference/security.md: every claim names a test that exists, and every bound has its value."""

import ast
import re
from pathlib import Path
from types import ModuleType

from harness.base import bounds
from runners import answers

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "reference" / "security.md").read_text()
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def test_every_claim_names_a_test_and_every_test_is_there():
    claims = [line for line in PAGE.splitlines() if re.match(r"\| [^|]*\| [^|]+\| [^|]*\|$", line)]
    assert len(claims) > 60
    for line in claims:
        assert NAMED.search(line) or line.endswith(("| --- |", "| test |")), line
    for file, name in NAMED.findall(PAGE):
        tree = ast.parse((TESTS / file).read_text())
        assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}, (file, name)


def test_every_bound_is_on_the_page_with_its_value():
    table = PAGE.partition("| bounds |")[2].partition("\n\n")[0]
    listed = dict(re.findall(r"`([A-Z_]+)` ([^;|]*[^;| ])", table))
    assert listed == {**_values(bounds), **_values(answers)}


def _values(module: ModuleType) -> dict[str, str]:
    numbers = {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
    return {name: _written(name, value) for name, value in numbers.items() if name.isupper()}


def _written(name: str, value: float) -> str:
    if name.endswith("_S"):
        return f"{value:g} s"
    if name.endswith("_BYTES"):
        size = int(value)
        unit = next(unit for unit in (3, 2, 1) if size >> 10 * unit)
        return f"{size >> 10 * unit} {'_KMG'[unit]}iB"
    return f"{value:,}" if value < 1e12 else f"2^{int(value).bit_length() - 1}"
