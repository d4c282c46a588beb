"""Hypothesis strategies for damage: parts of a record or bytes of a file that are replaced, gone or cut off.

A strategy draws what is changed, not the changed value: a failing example is short to read and shrinks well.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

GONE = "(gone)"
Place = tuple[str | int, ...]
Edits = list[tuple[Place, Any]]
Patches = list[tuple[int, bytes]]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any) -> list[Place]:
    """The ways to every part of a nested value; of a list only to the first two, which stand for the rest."""
    if isinstance(value, dict):
        parts: Iterable[tuple[str | int, Any]] = value.items()
    elif isinstance(value, list):
        parts = enumerate(value[:2])
    else:
        return []
    return [way for key, part in parts for way in [(key,), *((key, *rest) for rest in places(part))]]


def edits(
    ways: Sequence[Place], junk: Sequence[Any], min_size: int = 1, max_size: int = 5
) -> st.SearchStrategy[Edits]:
    """What to put at which places; GONE: take it out."""
    instead = st.just(GONE) | st.sampled_from(junk) | st.integers(0, 64) | JSON
    return st.lists(st.tuples(st.sampled_from(ways), instead), min_size=min_size, max_size=max_size)


def edited(value: Any, changes: Edits) -> Any:
    """A copy with the edits made; one whose place an earlier edit took away is passed over."""
    value = copy.deepcopy(value)
    for (*parents, last), new in changes:
        place = value
        try:
            for key in parents:
                place = place[key]
            if new == GONE:
                del place[last]
            else:
                place[last] = copy.deepcopy(new)
        except (KeyError, IndexError, TypeError):
            continue
    return value


def patches(
    end: int, pieces: Sequence[bytes] = (), max_size: int = 3, begin: int = 0
) -> st.SearchStrategy[Patches]:
    """What to write over a file, and at which offsets from `begin` to below `end`: any byte, or a piece."""
    piece = st.binary(min_size=1, max_size=1)
    if pieces:
        piece |= st.sampled_from(pieces)
    return st.lists(st.tuples(st.integers(begin, end - 1), piece), min_size=1, max_size=max_size)


def patched(content: bytes, changes: Patches) -> bytes:
    """The content with the patches written over it."""
    changed = bytearray(content)
    for at, piece in changes:
        changed[at : at + len(piece)] = piece
    return bytes(changed)
