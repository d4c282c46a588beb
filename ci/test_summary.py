"""What .ci/run ends with: the total and the slowest tests of both tiers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUMMARY = Path(__file__).parent / "summary.py"


def junit(path: Path, *cases: str) -> Path:
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def case(name: str, seconds: float, inside: str = "") -> str:
    return f'<testcase classname="tests.test_a" name="{name}" time="{seconds}">{inside}</testcase>'


def summary(*paths: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SUMMARY, *paths], capture_output=True, text=True)


def test_it_counts_all_files_together_and_names_the_slowest_first(tmp_path):
    one = junit(tmp_path / "1.xml", case("quick", 0.1), case("skipped", 0.0, "<skipped/>"))
    two = junit(tmp_path / "2.xml", case("slow", 90.0), *(case(f"t{i}", 0.01) for i in range(30)))
    ran = summary(one, two)
    assert ran.returncode == 0
    lines = ran.stdout.splitlines()
    assert lines[0] == "slowest 20 of 33 tests:"
    assert lines[1].split() == ["90.0", "s", "tests.test_a::slow"]
    assert lines[-1] == "32 passed, 0 failed, 1 skipped"


def test_what_failed_is_named_with_the_end_of_its_reason(tmp_path):
    lines = "\n".join(f"line {i}" for i in range(100))
    failed = junit(tmp_path / "1.xml", case("good", 1.0), case("bad", 1.0, f"<failure>{lines}</failure>"))
    named = summary(failed).stdout.split("failed: ")[1].splitlines()
    assert (named[0], named[1], named[30]) == ("tests.test_a::bad", "    line 70", "    line 99")


def test_a_failure_or_a_run_without_an_end_is_exit_code_1(tmp_path):
    failed = junit(tmp_path / "1.xml", case("bad", 1.0, "<failure/>"), case("worse", 1.0, "<error/>"))
    assert summary(failed).returncode == 1
    assert "0 passed, 2 failed, 0 skipped" in summary(failed).stdout
    missing = summary(junit(tmp_path / "2.xml", case("good", 1.0)), tmp_path / "gone.xml")
    assert missing.returncode == 1
    assert "gone.xml is missing" in missing.stderr
