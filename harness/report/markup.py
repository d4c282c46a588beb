"""Fill the templates of pages: each page is one file that draws its figures and opens offline.

All values are escaped. Only what this package ships is not: the scripts and the style.
"""

from __future__ import annotations

import gzip
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.report import drawing

ONE_LINE = 100  # characters of a list that is shown as text


def filled(template: str, **values: Any) -> str:
    """The page of a template, as text."""
    plotly, packed = _plotly()
    scripts = [_asset("page.js")]
    # Defence in depth behind escaping: only page.js and plotly.js may run, and nothing may be fetched.
    hashes = " ".join(
        f"'sha256-{b64encode(sha256(s).digest()).decode()}'" for s in (scripts[0].encode(), plotly)
    )
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:;"
        " base-uri 'none'; form-action 'none'"
    )
    found = _environment().get_template(template)
    look = {
        "style": _asset("page.css"),
        "hues": drawing.HUES,
        "night": drawing.NIGHT,
        "shapes": drawing.SHAPES,
    }
    return found.render(policy=policy, look=look, scripts=scripts, plotly=packed, **values)


@cache
def _plotly() -> tuple[bytes, str]:
    """plotly.js, and the same compressed: page.js unpacks it once a figure comes near the view."""
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs().encode()
    return script, b64encode(gzip.compress(script, mtime=0)).decode()


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("harness.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "one_line": _one_line,
        "hue": lambda colour: f"var(--h{colour.removeprefix('#')})",
        "sized": _sized,
        "split_at_urls": re.compile(r"(https?://[^\s<>\"',;]+)").split,
    }
    json = {"allow_nan": False, "separators": (",", ":"), "ensure_ascii": False}
    made.policies["json.dumps_kwargs"] = json
    return made


def _asset(name: str) -> str:
    return (resources.files("harness.report") / "assets" / name).read_text(encoding="utf-8")


def _one_line(values: list[Any] | tuple[Any, ...]) -> str | None:
    """A short list of plain values as text; null: any other list."""
    nested = any(isinstance(each, (Mapping, list, tuple)) for each in values)
    texts = [str(each) for each in values]
    return None if nested or sum(map(len, texts)) >= ONE_LINE else ", ".join(texts) or "-"


def _sized(value: Any, key: object) -> Any:
    """The value of a key; large numbers of bytes in GiB."""
    big = str(key).endswith("bytes") and isinstance(value, (int, float)) and value >= 2**20
    return f"{value / 2**30:,.2f} GiB" if big else value
