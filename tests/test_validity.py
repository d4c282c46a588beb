"""The rates that the docs state can be computed again with one command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow("simulates every part of the audit for half a minute")
def test_the_table_of_rates_has_every_part():
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.validity", "--short"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=1700,
    )
    assert ran.returncode == 0, ran.stderr
    heading, *rows = ran.stdout.splitlines()
    assert heading.split() == ["part", "case", "found", "target"]
    parts = {"comparing", "drift", "one_series", "nights", "prefill", "processes", "quality"}
    assert {row.split()[0] for row in rows} == parts
