"""A results folder that grows by a night at a time: records of one real run, made to look like others."""

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.records.files import write_columns

FIRST = datetime(2026, 9, 1, 2, tzinfo=timezone.utc)


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory, fake_interpreter: Any) -> list[Path]:
    """The records of one real run of the fake stack's variants a and b, twice each, once a session."""
    folder = tmp_path_factory.mktemp("once")
    protocol = {"new_tokens": 600, "repeats": 2, "timeout_s": 20, "measure_bandwidth": False}
    protocol["retry_disturbed"] = 0
    variants = [{"stack": "fake", "name": name, "B_ms": 0.1} for name in "ab"]
    config = {"protocol": protocol, "models": [{"shape": "tiny-qwen2"}], "variants": variants}
    (folder / "fake.yaml").write_text(json.dumps(config))
    command = [Path(sys.executable).parent / "harness", "run", "fake.yaml", "-o", "results"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    found = sorted(folder.rglob("record.json"))
    assert len(found) == 4, ran.stderr
    return found


class Nights:
    """`add` a night to the folder `root`; the first is 1 September 2026."""

    def __init__(self, records: Sequence[Path], root: Path) -> None:
        self.root, self.records = root, records
        self._noise = np.random.default_rng(8)

    def add(self, night: float, slower: float = 1.0, cell: str | None = None, **changed: Any) -> None:
        """One campaign: of `cell`, or of all, latencies `slower` times as long and other keys of the records,
        with __ between the levels."""
        began = FIRST + timedelta(days=night)
        for number, path in enumerate(self.records):
            record = json.loads(path.read_text())
            mine = cell in (None, record["variant"])
            n = np.arange(26, 26 + record["tokens"])
            ms = 1 + n / 4000 + self._noise.normal(0, 0.002, len(n))
            ms[0] = 4.0
            ms *= (slower if mine else 1.0) * np.exp(0.01 * self._noise.normal())
            ns = (ms * 1e6).astype(int).tolist()
            record |= {"started_utc": (began + timedelta(minutes=number)).isoformat()}
            record["campaign"]["id"] = began.isoformat()
            record["conditions"]["pressure"] = {}
            record["done"] |= {"cpu_wait_ns": 0, "major_faults": 0, "flushes": [], "start_ns": 0}
            record["done"] |= {"peak_rss_bytes": 17_000_000, "warmup": {"agreed": True}, "control": None}
            record["memory"] = {}
            record.pop("sensors", None)
            record["timing"] |= {"first_token_ns": ns[0], "last_token_ns": sum(ns)}
            for name, value in changed.items() if mine else ():
                *levels, key = name.split("__")
                inner = record
                for level in levels:
                    inner = inner[level]
                inner[key] = value
            model, cell_folder = path.parts[-4:-2]
            folder = self.root / record["machine"]["slug"] / model / cell_folder / f"{night:07.2f}-{number}"
            folder.mkdir(parents=True)
            (folder / "record.json").write_text(json.dumps(record))
            write_columns(folder / "tokens.parquet", {"n": n.tolist(), "latency_ns": ns})
