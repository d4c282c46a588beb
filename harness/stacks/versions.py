"""The versions of a package that the indexes and wheel folders of uv offer (PEP 503, PEP 691)."""

from __future__ import annotations

import base64
import json
import re
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import unescape
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from harness.base import bounds
from harness.base.files import NotStarted
from harness.base.text import sized
from harness.base.variables import redacted

PYPI = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
_LINK = re.compile(r"<a\b([^>]*)>([^<]*)</a>", re.IGNORECASE)


class NotListed(NotStarted):
    """The versions of a package are not known; the message is one sentence."""


def offered(project: str, variables: Mapping[str, str]) -> list[Version]:
    """All versions of a project, pre-releases too, oldest first; without those that are yanked as a whole.

    `variables`: of uv, see build.build_variables. Raises NotListed: an index cannot be read.
    """
    files = [*_in_folders(variables.get("UV_FIND_LINKS", "").split(","))]
    for index in _indexes(variables):
        files += _listed(f"{index.rstrip('/')}/{project}/")
    return sorted({version for file in files if (version := _version_of(file, project))})


def _indexes(variables: Mapping[str, str]) -> list[str]:
    """The addresses of the indexes in uv's variables; a name may stand before one (`internal=https://...`)."""
    further = f"{variables.get('UV_INDEX', '')} {variables.get('UV_EXTRA_INDEX_URL', '')}"
    first = variables.get("UV_DEFAULT_INDEX") or variables.get("UV_INDEX_URL") or PYPI
    return [re.sub(r"^[\w.-]+=(?=\w+:)", "", each) for each in [*further.split(), first]]


def _in_folders(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        if folder and "://" not in folder:
            yield from (path.name for path in Path(folder).glob("*"))


def _listed(address: str) -> list[str]:
    """The files of one project in an index that are not yanked; none where it does not have the project."""
    parts = urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    request = urllib.request.Request(parts._replace(netloc=host).geturl(), headers={"Accept": ACCEPT})
    if parts.username is not None:  # not for the server that it may redirect to
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        code = base64.b64encode(pair.encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {code}")
    try:
        with urllib.request.urlopen(request, timeout=bounds.PACKAGES_S) as answer:
            content = answer.read(bounds.PACKAGES_BYTES + 1)
            if len(content) > bounds.PACKAGES_BYTES:
                raise ValueError(f"it sends more than {sized(bounds.PACKAGES_BYTES)}")
            text = content.decode(errors="replace")
            is_json = "json" in answer.headers.get_content_type()
        return [*(_of_json(text) if is_json else _of_html(text))]
    except HTTPError as failure:
        failure.close()
        if failure.code == 404:
            return []
        why = f"answers with {failure.code}"
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as failure:
        why = str(getattr(failure, "reason", failure)) or type(failure).__name__
    raise NotListed(
        f"the index cannot be read: {redacted(address)}: {redacted(why)}; name the versions with --versions"
    )


def _of_json(text: str) -> Iterator[str]:
    return (str(file["filename"]) for file in json.loads(text)["files"] if file.get("yanked", False) is False)


def _of_html(text: str) -> Iterator[str]:
    return (unescape(name).strip() for tags, name in _LINK.findall(text) if "data-yanked" not in tags.lower())


def _version_of(file: str, project: str) -> Version | None:
    """The version in the name of a wheel or source distribution of the project; None: it is none."""
    parse: Callable[[str], tuple[object, ...]]
    parse = parse_wheel_filename if file.endswith(".whl") else parse_sdist_filename
    try:
        name, version, *_ = parse(file)
    except (InvalidSdistFilename, InvalidWheelFilename):
        return None
    return version if name == canonicalize_name(project) and isinstance(version, Version) else None
