"""The scripts of `harness completion` complete in the shells that they are for, on a terminal."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# What is typed after `harness` before the tab, and what the command then gets.
TYPED = {
    "ru": ["run"],
    "run --dr": ["run", "--dry-run"],
    "run cpu-": ["run", "cpu-qwen15-0.5b"],
    "run my": ["run", "my config.yaml"],
    "run x --stacks llamas": ["run", "x", "--stacks", "llamaserver"],
    "theory --machine rtx-4090-l": ["theory", "--machine", "rtx-4090-laptop"],
    "report --list res": ["report", "--list", "results"],
    "report --export par": ["report", "--export", "parquet"],
    "env cre": ["env", "create"],
    "env create --json llamac": ["env", "create", "--json", "llamacpp"],
    "env synth tiny-q": ["env", "synth", "tiny-qwen2"],
}
START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source ./script"),
    "zsh": (["zsh", "-f", "-i"], "autoload -U compinit; compinit -u -D; source ./script"),
}
# On the path of the shell: answers the shell as the real one, else writes down how it was called.
HARNESS = """\
#!/bin/sh
[ -n "$_ARGCOMPLETE" ] && exec {python} -m harness "$@"
printf "%s\\n" "$@" > new; mv new answer
"""


@contextmanager
def on_a_terminal(command: list[str], folder: Path) -> Iterator[Callable[[str], list[str]]]:
    """A shell in `folder`, and a call that types a line there and returns what `harness` was called with."""
    ours, theirs = pty.openpty()
    variables = {**environment(folder), "TERM": "dumb"}
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    shell = subprocess.Popen(command, cwd=folder, env=variables, start_new_session=True, **streams)
    answer, shown = folder / "answer", bytearray()

    def call(line: str) -> list[str]:
        answer.unlink(missing_ok=True)
        os.write(ours, f"{line}\n".encode())
        until = time.monotonic() + 120
        while not answer.exists() and time.monotonic() < until:
            if select.select([ours], [], [], 0.05)[0]:
                shown.extend(os.read(ours, 65536))
        assert answer.exists(), shown.decode(errors="replace")
        return [word.rstrip("/") for word in answer.read_text().splitlines()]  # zsh takes a folder's away

    try:
        yield call
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
        os.close(theirs)


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(folder), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def script(harness: Callable[..., Any], tmp_path: Path) -> Callable[[str], None]:
    """Writes the script of a shell to the test's folder, where there are files to complete."""

    def write(shell: str) -> None:
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        (tmp_path / "results").mkdir()
        (tmp_path / "my config.yaml").touch()
        ran = harness("completion", shell)
        assert ran.code == 0
        (tmp_path / "script").write_text(ran.out)
        (tmp_path / "harness").write_text(HARNESS.format(python=sys.executable))
        (tmp_path / "harness").chmod(0o755)

    return write


@pytest.mark.parametrize("shell", START)
def test_a_tab_completes_commands_options_choices_names_and_files(script, tmp_path, shell):
    script(shell)
    command, load = START[shell]
    with on_a_terminal(command, tmp_path) as call:
        call(f"{load}; harness")
        assert {typed: call(f"harness {typed}\t") for typed in TYPED} == TYPED


def test_bash_knows_every_option_of_a_command(script, tmp_path):
    script("bash")
    with on_a_terminal(START["bash"][0], tmp_path) as call:
        call("source ./script; harness")
        all_of_them = call("harness run --\033*")  # readline's insert-completions
    assert {"--dry-run", "--fresh", "--set", "--only", "--help"} < set(all_of_them)
    assert "--max-rounds" not in all_of_them


def test_fish_lists_commands_options_choices_names_and_files(script, tmp_path):
    script("fish")
    for typed, (*_, last) in TYPED.items():
        asked = f"source ./script; complete -C 'harness {typed}'"
        ran = subprocess.run(
            ["fish", "--no-config", "-c", asked],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
        )
        found = [line.partition("\t")[0].rstrip("/") for line in ran.stdout.splitlines()]
        assert found == [last], (typed, ran.stderr)
