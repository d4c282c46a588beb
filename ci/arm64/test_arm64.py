"""The Raspberry Pi profile on an emulated Arm machine: the short checks, where there is one."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

from ci.arm64.checks import SHORT
from harness.base.files import cache_folder

SCRIPT = Path(__file__).parent.parent / "arm64-chroot.sh"
MACHINE = cache_folder() / "arm64"  # the user's, as its environments are
LIMIT_S = 3600


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.slow("emulated programs take minutes")
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and chroot")
@pytest.mark.skipif(
    not (MACHINE / "passed" / "install").exists(),
    reason=f"no emulated Arm machine in {MACHINE}: ci/arm64-chroot.sh makes one",
)
def test_the_project_runs_on_an_emulated_arm_machine():
    ran = script(MACHINE, "--short")
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    assert f"{len(SHORT)} passed, 0 failed, 0 not possible" in ran.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulation is for x86-64")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shorter"], "--shorter: no such option"),
        (["--again"], "--again: name a step"),
        (["{folder}", "--short"], "no emulated Arm machine in {folder}: run ci/arm64-chroot.sh"),
        (["{folder}", "--again", "debian"], "--again debian: has not passed"),
    ],
)
def test_a_mistake_is_a_sentence_and_starts_nothing(tmp_path, arguments, says):
    ran = script(*(each.format(folder=tmp_path) for each in arguments))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("arm64: " + says.format(folder=tmp_path))
    assert not list(tmp_path.iterdir())
