"""Which distributions an environment needs beside those that the target has, in the versions of the locks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from harness.stacks.pack.fetch import Fetcher, Wanted, metadata
from harness.stacks.pack.known import Have, Pin
from harness.stacks.pack.trim import DO_WITHOUT


@dataclass
class Chosen:
    """The distributions of one environment, by normalized name: the files to pack, and the versions that the
    target has of the others (null: unknown). `notes`: sentences about those that fit badly."""

    files: dict[str, Path] = field(default_factory=dict)
    expects: dict[str, str | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Closure:
    """`pins`: of the locks; `compiled`: names of those whose source is packed; `accepted`: the versions of
    some that the target may have, whatever asks for others."""

    fetcher: Fetcher
    pins: Mapping[str, Pin]
    have: Have
    compiled: Sequence[str] = ()
    accepted: Mapping[str, SpecifierSet] = field(default_factory=dict)

    def of(self, roots: Sequence[str]) -> Chosen:
        """What these requirements need, and what that needs in turn. Raises PackError."""
        chosen, expanded = Chosen(), dict[str, set[str]]()
        level = [need for need in map(Requirement, roots) if self._holds(need, {""})]
        while level:
            wanted = {}
            for each in level:
                name = canonicalize_name(each.name)
                if name in chosen.files or name in wanted:
                    continue
                if self._is_there(each, name, chosen):
                    chosen.expects[name] = self.have.versions[name]
                else:
                    chosen.expects.pop(name, None)
                    wanted[name] = self._wanted(each, name)
            chosen.files |= self.fetcher.fetch(list(wanted.values()))
            level = [need for each in level for need in self._needs(each, chosen, expanded)]
        return chosen

    def _is_there(self, requirement: Requirement, name: str, chosen: Chosen) -> bool:
        """Whether the target's own version is used: one that fits, one that is accepted, and one of what is
        in no lock, such as torch."""
        if name not in self.have.versions or self.have.satisfies(name, requirement.specifier):
            return name in self.have.versions
        accepted = name in self.accepted and self.have.satisfies(name, self.accepted[name])
        if not accepted and name in self.pins:
            return False
        chosen.notes.append(f"{name} {self.have.versions[name]} is there; {requirement} is what is tested")
        return True

    def _wanted(self, requirement: Requirement, name: str) -> Wanted:
        if pin := self.pins.get(name):
            return Wanted(name, f"{name}=={pin.version}", pin.hashes, name in self.compiled)
        requirement = Requirement(str(requirement))
        requirement.marker = None
        requirement.extras = set()
        return Wanted(name, str(requirement), source=name in self.compiled)

    def _needs(
        self, requirement: Requirement, chosen: Chosen, expanded: dict[str, set[str]]
    ) -> Iterator[Requirement]:
        """What a packed distribution needs on the target, with these extras; once for each of them."""
        name = canonicalize_name(requirement.name)
        if name not in chosen.files:
            return
        extras = {"", *requirement.extras} - expanded.setdefault(name, set())
        expanded[name] |= extras
        texts = metadata(chosen.files[name]).get_all("Requires-Dist", ()) if extras else ()
        without = DO_WITHOUT.get(name, frozenset())
        for need in map(Requirement, texts):
            if self._holds(need, extras) and canonicalize_name(need.name) not in without:
                yield need

    def _holds(self, need: Requirement, extras: Set[str]) -> bool:
        """Whether its marker holds on the target, with any of these extras."""
        markers = self.fetcher.target.markers()
        return need.marker is None or any(need.marker.evaluate(markers | {"extra": each}) for each in extras)
