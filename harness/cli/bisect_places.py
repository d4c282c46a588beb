"""What lies between GOOD and BAD of `harness bisect`: versions of a package, or sets of options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from harness.base.text import plural
from harness.campaign import ab as campaign_ab
from harness.cli import Mistake, ab
from harness.config import Experiment
from harness.stacks import build, versions
from harness.stacks.header import project_of

_VERSION = re.compile(r"([A-Za-z0-9][\w.-]*(?:\[[\w.,-]+\])?)==(\S+)")


@dataclass(frozen=True)
class Place:
    """A version, or a set of options. `since`: what is new in it; `config`: where its experiment is kept;
    `package`: its requirement; empty: that of the stack."""

    title: str
    since: str
    config: Path
    experiment: Experiment
    package: Sequence[str] = ()


def places_between(arguments: argparse.Namespace) -> list[Place]:
    """From GOOD to BAD. Raises Mistake, ConfigError, NotListed."""
    given = arguments.good, arguments.bad
    matches = [_VERSION.fullmatch(each) for each in given]
    named = [match for match in matches if match]
    if len(named) == 1:
        raise Mistake("GOOD and BAD must both be versions, NAME==VERSION, or both options, KEY=VALUE,...")
    if not named:
        if arguments.versions:
            raise Mistake("--versions is for versions, and GOOD and BAD are options")
        places = [
            Place(title, since, *ab.loaded(arguments.of, arguments, settings))
            for title, since, settings in _of_options(*map(_options, given))
        ]
        for each in places[1:]:
            planned(arguments, places[0], each)
        return places
    packages = {project_of(match[1]) for match in named}
    if len(packages) > 1:
        raise Mistake(
            f"GOOD is of {project_of(given[0])} and BAD of {project_of(given[1])}: name one package"
        )
    good, bad = (_version(match[2]) for match in named)
    if good == bad:
        raise Mistake(f"GOOD and BAD are the same version, {good}")
    loaded = ab.loaded(arguments.of, arguments, ())
    ends = [Place(str(v), str(v), *loaded, (text,)) for v, text in zip((good, bad), given, strict=True)]
    planned(arguments, *ends)
    between = [
        Place(str(each), str(each), *loaded, (f"{named[0][1]}=={each}",))
        for each in _between(packages.pop(), good, bad, arguments.versions)
    ]
    return [ends[0], *between, ends[1]]


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise Mistake(f"{text}: is no version, as 1.2.3 is") from None


def _between(project: str, good: Version, bad: Version, given: str | None) -> list[Version]:
    """The versions between two, from good to bad. Raises Mistake, NotListed."""
    low, high = sorted((good, bad))
    if given is not None:
        found = sorted({_version(each) for each in given.split(",") if each})
        if outside := [each for each in found if not low < each < high]:
            raise Mistake(f"--versions {outside[0]}: does not lie between {good} and {bad}")
    else:
        offered = versions.offered(project, build.build_variables({}))
        if not offered:
            raise Mistake(f"no index and no wheel folder has {project}; name its versions with --versions")
        for each in (good, bad):
            if each not in offered:
                newest = f"there are {len(offered)}, the newest {offered[-1]}"
                raise Mistake(f"{project} has no version {each}; {newest}")
        found = [each for each in offered if low < each < high and not each.is_prerelease]
    return found if good == low else found[::-1]


def _options(text: str) -> dict[str, str]:
    """`threads=4,flash_attn=true`"""
    found = dict(part.split("=", 1) for part in text.split(",") if "=" in part[1:])
    if len(found) != text.count(",") + 1:
        raise Mistake(f"{text}: must be NAME==VERSION, or options as in threads=4,flash_attn=true")
    return found


def _of_options(good: dict[str, str], bad: dict[str, str]) -> Iterator[tuple[str, str, list[str]]]:
    """Title, what is new, and settings: of GOOD, then with one changed option more at each place, up to BAD.
    Raises Mistake."""
    changed = [
        key for key in (*bad, *(key for key in good if key not in bad)) if good.get(key) != bad.get(key)
    ]
    if not changed:
        raise Mistake("GOOD and BAD are the same options")
    for count in range(len(changed) + 1):
        held = good | {key: bad[key] for key in changed[:count] if key in bad}
        words = {
            key: f"{key}={value}" for key, value in held.items() if key in bad or key not in changed[:count]
        }
        title = " ".join(words[key] for key in changed if key in words) or "defaults"
        new = changed[count - 1]
        yield title, words.get(new, f"no {new}"), list(words.values())


def planned(arguments: argparse.Namespace, base: Place, new: Place) -> campaign_ab.Plan:
    """Two places as the sides of `harness ab`, with one pair of their name. Raises Mistake."""
    try:
        wanted = ab.planned(base.experiment, new.experiment, (base.package, new.package), arguments)
    except Mistake as wrong:  # in the words of `harness ab`
        own = re.sub(r"--package-[ab] ", "", str(wrong))
        raise Mistake(re.sub("side [AB] has", "the cell has", own)) from wrong
    if len(wanted.pairs) > 1:
        raise Mistake(f"{plural(len(wanted.pairs), 'cell')}; bisect takes one: choose with --only")
    ((name, cells),) = wanted.pairs.items()
    return replace(wanted, pairs={f"{name}: {base.title} -> {new.title}": cells})
