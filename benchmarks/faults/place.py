"""A folder in which commands run under a fault, and what must hold of each of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness import records
from harness.base.files import cache_folder
from harness.records import ResultsError

HARNESS = Path(sys.executable).parent / "harness"
LIMIT_S = 900.0
TOKENS = 40


@dataclass
class Place:
    """`disk`: where the fault is; the config and the environments lie beside it. `problems`: what was wrong;
    `runs`: commands run."""

    folder: Path
    problems: list[str] = field(default_factory=list)
    runs: int = 0

    def __post_init__(self) -> None:
        for name in ("disk", "beside", "tmp"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.beside / "envs").symlink_to(cache_folder() / "envs")
        # A busy machine must not make a cell invalid: what is tested is what is kept, not how fast it was.
        warmup = {"at_least_s": 0}
        protocol = {"new_tokens": TOKENS, "repeats": 2, "timeout_s": 60, "retry_disturbed": 0}
        protocol |= {"measure_bandwidth": False, "warmup": warmup}
        config = {"protocol": protocol, "models": [{"shape": "tiny-qwen2"}]}
        config["variants"] = [{"stack": "fake", "name": f"v{i}"} for i in range(2)]
        self.config.write_text(json.dumps(config))  # JSON is YAML

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    @property
    def beside(self) -> Path:
        return self.folder / "beside"

    @property
    def config(self) -> Path:
        return self.beside / "config.yaml"

    def run(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command; a traceback or a death is a problem."""
        command = [str(HARNESS), *map(str, words)]
        given = {"HARNESS_CACHE": str(self.beside), "TMPDIR": str(self.folder / "tmp")} | variables
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ | given, cwd=self.beside
        )
        self.runs += 1
        named = " ".join(map(str, words))
        if "Traceback (most" in ran.stderr + ran.stdout:
            self.problems.append(f"{named}: a traceback: {ran.stderr.strip()[-500:]}")
        if ran.returncode not in (0, 1, 2, 3):
            self.problems.append(f"{named}: ended with {ran.returncode}: {ran.stderr.strip()[-500:]}")
        if ran.returncode in (1, 2) and not ran.stderr.strip():
            self.problems.append(f"{named}: ended with {ran.returncode} and no message")
        return ran

    def completes(self, why: str, *words: str | Path, **variables: str) -> None:
        """The same command must end with 0 once the fault is gone; or with 1 where it was disturbed."""
        ran = self.run(*words, **variables)
        if ran.returncode and not (ran.returncode == 1 and "disturbed" in ran.stderr + ran.stdout):
            self.problems.append(f"{why}: then ended with {ran.returncode}: {ran.stderr.strip()[-500:]}")

    def records(self, root: Path) -> dict[Path, str]:
        """The records below a folder by their files, checked: each must read, with a whole series if it ended
        well."""
        found = {}
        for stored in records.records(root, lambda damage: self.problems.append(str(damage))):
            try:
                tokens = len(stored.times)
            except ResultsError as damage:
                self.problems.append(str(damage))
                continue
            if tokens != stored.record["tokens"]:
                said = stored.record["tokens"]
                self.problems.append(f"{stored.folder}: {said} tokens, {tokens} in its series")
            found[stored.folder] = (stored.folder / "record.json").read_text()
        return found

    def kept(self, before: dict[Path, str], root: Path, why: str) -> None:
        """No record that was there may be lost or changed."""
        now = self.records(root)
        for folder, text in before.items():
            if now.get(folder) != text:
                self.problems.append(f"{why}: {folder} is {'changed' if folder in now else 'lost'}")


@contextlib.contextmanager
def small_disk(at: Path, options: str) -> Iterator[None]:
    """A tmpfs with these options at a folder; needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def remount(at: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(at)], check=True)
