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
from typing import cast

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.base.bounds import PAGE_FACTS
from harness.base.text import sized
from harness.report import plots

PLAIN = (str, int, float, type(None))


def filled(template: str, version: str = "", **values: object) -> str:
    """The page of a template, as text. `version`: of a page that is served, and asks its server for newer
    ones."""
    plotly, packed = _plotly()
    scripts = [_asset("page.js"), *([_asset("live.js")] if version else [])]
    # Defence in depth behind escaping: only these scripts and plotly.js may run, and nothing may be fetched.
    hashes = " ".join(
        f"'sha256-{b64encode(sha256(s).digest()).decode()}'" for s in (*map(str.encode, scripts), plotly)
    )
    connects = "'self'" if version else "'none'"
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:;"
        f" base-uri 'none'; form-action 'none'; connect-src {connects}"
    )
    look = {
        "style": _asset("page.css"),
        "hues": plots.HUES,
        "night": plots.NIGHT,
        "shapes": plots.SHAPES,
    }
    page = {"policy": policy, "look": look, "scripts": scripts, "plotly": packed, "version": version}
    return _environment().get_template(template).render(**page, **values)


@cache
def _plotly() -> tuple[bytes, str]:
    """plotly.js, and the same compressed: page.js unpacks it once a figure comes near the view."""
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs().encode()
    return script, b64encode(gzip.compress(script, mtime=0)).decode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("harness.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "facts": facts,
        "hue": lambda colour: f"var(--h{colour.removeprefix('#')}, {colour})",
        "split_at_urls": re.compile(r"(https?://[^\s<>\"',;]+)").split,
    }
    plain = {"allow_nan": False, "separators": (",", ":"), "ensure_ascii": False}
    environment.policies["json.dumps_kwargs"] = plain
    return environment


def _asset(name: str) -> str:
    return (resources.files("harness.report") / "assets" / name).read_text(encoding="utf-8")


def facts(value: object) -> str:
    """Nested values as YAML, a list of texts as lines, large numbers of bytes in MB or GB; of more than
    PAGE_FACTS values the first."""
    left = PAGE_FACTS

    def readable(value: object, key: str = "") -> object:
        nonlocal left
        if not isinstance(value, (Mapping, list, tuple)):
            left -= 1
            is_size = key.endswith("bytes") and isinstance(value, (int, float)) and value >= 1e6
            return sized(cast(float, value)) if is_size else value if isinstance(value, PLAIN) else str(value)
        items = [*value.items()] if isinstance(value, Mapping) else [*enumerate(value)]
        shown: dict[object, object] = {}
        for name, inner in items:
            if left <= 0:
                shown["..."] = f"{len(items) - len(shown):,} more"
                break
            if inner is not None:
                shown[name] = readable(inner, str(name))
        return shown if isinstance(value, Mapping) else [*shown.values()]

    plain = readable(value)
    if isinstance(plain, list) and all(isinstance(inner, str) for inner in plain):
        plain = "\n".join(plain)  # sentences
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=110)
    return plain if isinstance(plain, str) else text
