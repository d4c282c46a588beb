"""Installed, not editable: what is shipped comes along, and results go where the user stands."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ran

from harness.campaign.provenance import source_digest
from harness.stacks.build import key_of

pytestmark = [
    pytest.mark.slow("builds and installs the project"),
    pytest.mark.xdist_group("install"),
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parent.parent
SOURCES = ("harness", "runners", "configs", "results/published", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with this project in it, inside another project's checkout; what this project needs
    comes from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "--message", "Begin"]):
        subprocess.run([*git, *words], check=True)
    source, environment = folder / "source", folder / "environment"
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    uv = str(Path(sys.executable).parent / "uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    # Of a worker this is no place to import from, whatever the controller has there.
    (packages / "statistics.py").write_text("raise ImportError('of the controller')")
    install = [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--python", environment / "bin" / "python", source], check=True)
    return environment


@pytest.fixture
def command(installed: Path, tmp_path: Path) -> Callable[..., Ran]:
    """Runs the installed command in the test's folder."""

    def run(*arguments: str | Path) -> Ran:
        whole = [installed / "bin" / "harness", *arguments]
        ran = subprocess.run(whole, capture_output=True, text=True, cwd=tmp_path, timeout=800)
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    return run


def files(environment: Path) -> set[Path]:
    return {path for path in environment.rglob("*") if "__pycache__" not in path.parts}


def test_a_shipped_config_is_found_by_its_name(installed, command):
    ran = command("run", "--dry-run", "quickstart")
    assert ran.code == 0, ran.err
    assert sum(line.startswith("qwen1.5-0.5b.llamacpp.") for line in ran.out.splitlines()) == 5


def test_every_file_comes_along_and_no_other(installed):
    folders = ["harness", "runners", "configs", "results/published"]
    listed = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tracked = {
        re.sub(
            "^(?:(configs)|results/(published))", lambda found: f"harness/data/{found[1] or found[2]}", path
        )
        for path in listed.stdout.split()
    }
    links = {"harness/data/configs", "harness/data/published"}  # folders where installed
    (packages,) = installed.glob("lib/python*/site-packages")
    shipped = {
        str(path.relative_to(packages))
        for folder in ("harness", "runners")
        for path in files(packages / folder)
        if path.is_file()
    }
    assert shipped == tracked - links - {"harness/data/published/make.py"}  # which made it, of its sources


def test_the_published_study_is_found_and_its_page_is_the_users(installed, command, tmp_path):
    before = files(installed)
    ran = command("report", "published/rtx4090-qwen1.5")
    assert ran.code == 0, ran.err
    page = Path(ran.out.strip())
    assert page.is_relative_to(tmp_path)
    assert "RTX 4090" in page.read_text()
    assert files(installed) == before


def test_a_campaign_runs_from_the_installed_place_as_from_a_checkout(
    installed, command, config, tmp_path, fake_interpreter
):
    before = files(installed)
    ran = command("run", config({"B_ms": 2.0}).name, "--json")
    assert ran.code == 0, ran.err
    assert [row["status"] for row in ran.json] == ["ok"]
    (path,) = tmp_path.glob("results/**/record.json")
    record = json.loads(path.read_text())
    assert record["environment"]["key"] == key_of(fake_interpreter.environment)
    assert record["environment"]["runner"] == source_digest("fake")
    assert record["harness"]["git_commit"] is None  # that of the checkout around it is another project's
    assert files(installed) == before
