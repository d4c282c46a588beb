"""A leaderboard as a plain git repository, made from its template: pull requests are branches here."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import HARNESS
from forging import HONEST, Forgery
from git import Actor, Repo

TEMPLATE = Path(__file__).parent.parent / "ci" / "leaderboard"
ME = Actor("me", "me@localhost")
Change = Callable[[Path], object]


class Leaderboard:
    def __init__(self, folder: Path) -> None:
        shutil.copytree(TEMPLATE, folder)
        (folder / "bundles").mkdir()
        self.folder, self.repo = folder, Repo.init(folder, initial_branch="main")
        self.commit("Begin")

    def commit(self, message: str) -> str:
        self.repo.git.add(all=True)
        return self.repo.index.commit(message, author=ME, committer=ME).hexsha

    def propose(self, change: Change) -> str:
        """The head of a pull request with this change; main is checked out again."""
        self.repo.git.checkout("-B", "proposed", "main")
        change(self.folder)
        head = self.commit("Propose")
        self.repo.git.checkout("main")
        return head

    def check(self, head: str) -> tuple[int, str]:
        return self.ran("./check.sh", "main", head)

    def ran(self, *command: str) -> tuple[int, str]:
        ran = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, env=os.environ | {"HARNESS": HARNESS}
        )
        return ran.returncode, ran.stdout + ran.stderr


@pytest.fixture
def board(tmp_path: Path) -> Leaderboard:
    return Leaderboard(tmp_path / "board")


def adding(name: str, source: Path = HONEST) -> Change:
    return lambda folder: shutil.copyfile(source, folder / "bundles" / name)


def test_a_bundle_is_checked_merged_and_on_the_page(board):
    head = board.propose(adding("mine.tar.zst"))
    code, said = board.check(head)
    assert (code, said.startswith("accepted: ")) == (0, True), said
    board.repo.git.merge(head)
    code, said = board.ran("./page.sh")
    assert code == 0, said
    page = (board.folder / "site" / "index.html").read_text()
    assert "q8_0" in page
    assert "synthetic" in page


def test_a_second_bundle_with_the_same_records_is_refused(board):
    board.repo.git.merge(board.propose(adding("mine.tar.zst")))
    code, said = board.check(board.propose(adding("again.tar.zst")))
    assert code == 1
    assert "began at the same moment as mine.tar.zst" in said


def linked(folder: Path) -> None:
    (folder / "bundles" / "x.tar.zst").symlink_to("/etc/passwd")


def two(folder: Path) -> None:
    adding("a.tar.zst")(folder)
    adding("b.tar.zst")(folder)


def with_script(folder: Path) -> None:
    adding("a.tar.zst")(folder)
    (folder / "check.sh").write_text("#!/bin/sh\nexit 0\n")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (two, "adds one bundle and changes nothing else"),
        (with_script, "adds one bundle and changes nothing else"),
        (linked, "is not a new regular file"),
        (adding("Mine.tar.zst"), "a bundle is named"),
        (lambda folder: (folder / "bundles" / "x.tar.zst").write_text("x"), "not a bundle"),
        (lambda folder: (folder / "check.sh").unlink(), "is not a new regular file"),
    ],
    ids=["two bundles", "a script too", "a link", "another name", "no bundle", "a script gone"],
)
def test_a_pull_request_that_is_not_one_good_bundle_is_refused(board, change, reason):
    code, said = board.check(board.propose(change))
    assert code == 1
    assert reason in said


def test_an_accepted_bundle_is_never_changed(board):
    board.repo.git.merge(board.propose(adding("mine.tar.zst")))
    changed = board.propose(lambda folder: (folder / "bundles" / "mine.tar.zst").write_bytes(b"x"))
    code, said = board.check(changed)
    assert (code, "is never changed or removed" in said) == (1, True)


def test_a_bundle_that_is_refused_today_leaves_the_page_and_is_named(board, tmp_path):
    forgery = Forgery()
    forgery.series(forgery.of(".llamacpp.q8_0.decode")[0], lambda ns: ns / 2)
    board.repo.git.merge(board.propose(adding("mine.tar.zst")))
    board.repo.git.merge(board.propose(adding("forged.tar.zst", forgery.write(tmp_path / "forged.tar.zst"))))
    code, said = board.ran("./page.sh")
    assert code == 1
    assert "left out, since harness share --verify refuses it today: bundles/forged.tar.zst" in said
    assert (board.folder / "site" / "index.html").exists()
