"""Messages for unknown names, with the closest known ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from harness.system.wording import shortened

MOST_LISTED = 24


def unknown(kind: str, name: str, known: Iterable[str], listing: str = "") -> str:
    """`unknown model qwen1.5-7; did you mean qwen1.5-7b?`, else all known names, else how to list them."""
    names = list(known)
    shown = shortened(name)
    # Comparing is quadratic in length, and no known name is that long.
    near = difflib.get_close_matches(name.lower(), names, 3) if len(name) <= 64 else []
    if near:
        hint = f"; did you mean {' or '.join(near)}?"
    elif len(names) <= MOST_LISTED:
        hint = f"; there are {', '.join(names)}"
    else:
        hint = f"; {listing}" if listing else ""
    return f"unknown {kind} {shown}{hint}"
