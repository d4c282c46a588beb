"""Numbers in text, as locales write them: a decimal point or comma, and groups of thousands of the other.

Of both separators the last is decimal; one that repeats groups thousands. A single comma before exactly three
digits is either: other numbers of the same tool in the file decide, or there is a LogError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.records.foreign.log import LogError

NUMBER = r"[-+]?\d(?:[\d.,]*\d)?"  # as text readers look for it; value() gives its value
COUNT = r"[-+]?\d(?:[\d,]*\d)?"
_OTHER = {".": ",", ",": "."}
_GROUPS = r"[-+]?\d{{1,3}}(?:{0}\d{{3}})+"


def mark(numbers: Iterable[str]) -> str | None:
    """The decimal separator that these numbers show; null: none, or not all the same."""
    shown = {own for number in numbers if (own := _own_mark(number))}
    return shown.pop() if len(shown) == 1 else None


def value(number: str, decimal: str | None = None) -> float:
    """`decimal`: the separator that other numbers of the file show, or that their tool always prints. Raises
    LogError."""
    own = _own_mark(number) or decimal
    if own is None and "," in number:
        grouped, point = number.replace(",", ""), number.replace(",", ".")
        raise LogError(
            f"{number} is {grouped} or {point}: nothing in it says whether its comma is a decimal one; write "
            "its numbers with a decimal point"
        )
    own = own or "."
    whole, _, fraction = number.partition(own)
    other = _OTHER[own]
    if other in whole and re.fullmatch(_GROUPS.format(re.escape(other)), whole):
        whole = whole.replace(other, "")
    try:
        return float(f"{whole}.{fraction or 0}")
    except ValueError:
        raise LogError(f"{number} is not a number") from None


def mean(cell: str, decimal: str | None) -> tuple[float, float | None]:
    """A mean and its standard deviation, as `91.80 ± 0.05`; None without one. Raises LogError."""
    numbers = [value(number, decimal) for number in re.findall(NUMBER, cell)[:2]]
    return numbers[0], numbers[1] if "±" in cell and len(numbers) > 1 else None


def ungrouped(number: str) -> float:
    """Parse a number with decimals and without groups of thousands."""
    return value(number, "," if "," in number else ".")


def count(number: str) -> int:
    """Parse a whole number, whose commas group thousands. Raises LogError."""
    return int(value(number, "."))


def _own_mark(number: str) -> str | None:
    """The decimal separator as this number alone shows it."""
    found = re.findall("[.,]", number)
    if len(set(found)) == 2:
        return found[-1] if found.count(found[-1]) == 1 else None
    if len(found) > 1:
        return _OTHER[found[0]]
    if not found:
        return None
    whole, _, fraction = number.lstrip("+-").partition(found[0])
    grouped = len(fraction) == 3 and 1 <= len(whole) <= 3 and not whole.startswith("0")
    return None if grouped else found[0]
