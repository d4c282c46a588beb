"""The shell blocks of the pages in docs/start and docs/guide run as they are printed, in order, page by page.

A comment right before a block says what is special about it:

    <!-- test: not run: REASON -->    it cannot run here
    <!-- test: slow: REASON -->       it needs a real stack: not in the first tier
    <!-- test: measures: REASON -->   the same, and its last command measures: a busy machine may disturb that
    <!-- test: before: COMMAND -->    what the test does first, in place of the reader

A block of `text` right after a block of `sh` is what that prints; `...` stands for anything.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import HARNESS, failures

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
IN_A_CLONE = ("Makefile", "ci", "configs", "docs", "harness", "pyproject.toml", "runners", "tests")
LANGUAGES = {"sh", "text", "yaml", "python", "ini"}
# Runs are shorter here: no wait to measure again what another process disturbed; one repeat of a real model.
SETTINGS = ("retry_disturbed=0",)
OF_REAL_MODELS = (*SETTINGS, "repeats=1", "measure_bandwidth=false")
COMMAND = """#!/bin/sh
[ "$1" != run ] || set -- "$@" {settings}
exec {harness} "$@"
"""
BLOCK = re.compile(
    r"(?P<comments>(?:^<!-- test: [^\n]*\n)*)^```sh\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<shown>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A shell block of a page. `line`: of its first command; `shown`: its output as printed there."""

    line: int
    code: str
    shown: str | None = None
    before: str | None = None
    not_run: str | None = None
    slow: str | None = None
    measures: str | None = None

    @property
    def first_tier(self) -> bool:
        return not (self.not_run or self.slow or self.measures)


def pages() -> list[str]:
    """The pages of the groups whose blocks run, as the navigation has them."""
    groups: dict[str, Any] = {}
    for group in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]:
        groups |= group
    return [page for kind in ("Start", "Guide") for entry in groups[kind] for page in entry.values()]


def blocks(text: str) -> list[Block]:
    """The shell blocks of a page. A comment of an unknown kind or without a reason is a TypeError."""
    found = []
    for match in BLOCK.finditer(text):
        comments = re.findall(r"<!-- test: ([a-z ]+): (\S.*) -->\n", match["comments"])
        if len(comments) != match["comments"].count("\n"):
            raise TypeError(f"not `test: KIND: REASON`: {match['comments']}")
        marks = {kind.replace(" ", "_"): value for kind, value in comments}
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(line, match["code"], match["shown"], **marks))
    return found


def script(chosen: Sequence[Block], outputs: Path) -> str:
    """The blocks as one script of bash, which stops where one fails. A measurement may be not ok (1)."""
    lines = ["set -euo pipefail"]
    for block in chosen:
        output = outputs / str(block.line)
        lines += [f"{{ {block.before}; }} >{output}.before"] if block.before else []
        lines += [f"echo {block.line} >{outputs / 'at'}", "{", f"{block.code}}} >{output}.out"]
        lines[-1] += " || [ $? = 1 ]" if block.measures else ""
    return "\n".join(lines)


def run(page: str, chosen: Sequence[Block], folder: Path) -> None:
    """Runs blocks of a page in a new clone of the project, and compares their output."""
    clone, outputs = folder / "clone", folder / "outputs"
    commands, measures = clone / ".venv" / "bin", any(block.measures for block in chosen)
    for each in (commands, outputs):
        each.mkdir(parents=True)
    for name in IN_A_CLONE:
        (clone / name).symlink_to(ROOT / name)
    settings = " ".join(f"--set {each}" for each in (OF_REAL_MODELS if measures else SETTINGS))
    (commands / "harness").write_text(COMMAND.format(settings=settings, harness=HARNESS))
    (commands / "harness").chmod(0o755)
    variables = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}", "COLUMNS": "80"}
    ran = subprocess.run(
        ["bash", "-c", script(chosen, outputs)], cwd=clone, env=variables, stderr=subprocess.PIPE, text=True
    )
    place = f"{page}:{(outputs / 'at').read_text().strip()}"
    assert ran.returncode == 0, f"{place} ended with {ran.returncode}: {ran.stderr}"
    for block in chosen:
        if block.shown is not None:
            printed = (outputs / f"{block.line}.out").read_text()
            expected = ".*".join(re.escape(part) for part in block.shown.split("..."))
            assert re.fullmatch(expected, printed, re.DOTALL), f"{page}:{block.line} prints {printed}"
    if measures:
        command = ["harness", "report", "--list", "--json"]
        listed = subprocess.run(command, cwd=clone, env=variables, capture_output=True)
        rows = json.loads(listed.stdout)
        assert rows
        assert failures(rows) == []


def having(kind: Callable[[Block], object]) -> pytest.MarkDecorator:
    """A parameter: the pages that have a block of this kind."""
    found = [page for page in pages() if any(kind(block) for block in blocks((DOCS / page).read_text()))]
    return pytest.mark.parametrize("page", found)


@having(lambda block: block.first_tier)
def test_the_commands_of_a_page_run_as_they_are_printed(page, tmp_path, fake_interpreter):
    run(page, [block for block in blocks((DOCS / page).read_text()) if block.first_tier], tmp_path)


@having(lambda block: block.slow or block.measures)
def test_the_commands_of_a_page_run_with_real_stacks(page, tmp_path, llamacpp_interpreter, hf_interpreter):
    run(page, [block for block in blocks((DOCS / page).read_text()) if not block.not_run], tmp_path)


@pytest.mark.parametrize("page", pages())
def test_no_command_of_a_page_hides_from_the_test(page):
    text = (DOCS / page).read_text()
    kept = BLOCK.sub("", text)
    assert "<!-- test:" not in kept, "a comment that is not right before a block"
    languages = re.findall(r"^ *```(.*)\n(?:.*\n)*?^ *```$", kept, flags=re.MULTILINE)
    assert set(languages) <= LANGUAGES - {"sh"}, "a block without a language, or within a list"
    assert not re.findall(r"^ {4}(?:\.venv/bin/)?harness ", kept, flags=re.MULTILINE), "use a block of sh"


MADE = """\
<!-- test: before: echo 1 > count -->
```sh
cat count; export SEEN=yes
```

```text
...1
```

<!-- test: not run: no such command -->
```sh
no-such-command
```

```sh
[ "$SEEN" = yes ]
```
"""


def test_blocks_run_in_one_shell_and_those_marked_do_not(tmp_path):
    found = blocks(MADE)
    assert [block.not_run for block in found] == [None, "no such command", None]
    run("made.md", [block for block in found if block.first_tier], tmp_path)


@pytest.mark.parametrize(
    ("from_", "to", "why"),
    [
        ("echo 1", "echo 2", "made.md:3 prints 2"),
        ("= yes", "= no", "made.md:16 ended with 1"),
        ("<!-- test: not run: no such command -->\n", "", "made.md:11 ended with 127: .*no-such-command"),
    ],
)
def test_a_block_that_fails_or_prints_something_else_is_named_with_its_line(tmp_path, from_, to, why):
    chosen = [block for block in blocks(MADE.replace(from_, to)) if block.first_tier]
    with pytest.raises(AssertionError, match=why):
        run("made.md", chosen, tmp_path)


@pytest.mark.parametrize("comment", ["not run:", "not run: ", "skipped: no GPU", "not run no GPU"])
def test_a_mark_without_a_reason_or_of_another_kind_is_refused(comment):
    with pytest.raises(TypeError):
        blocks(f"<!-- test: {comment} -->\n```sh\nfalse\n```\n")
