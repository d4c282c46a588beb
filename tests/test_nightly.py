"""One night after another by the real script, with a regression planted in the fake stack."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "ci" / "nightly.sh"
# Long enough that waking late on a busy machine is under a percent of any figure.
CELL = {"name": "good", "B_ms": 15.0, "prefill_ms": 90.0}
SHORT = {"new_tokens": 40, "repeats": 3}


@pytest.fixture
def nightly(tmp_path):
    """Runs a night in the test's folder: `nightly(config, "--first", HARNESS_FAKE_SLOWER="1.4")`."""

    def run(*arguments, **variables):
        night = started(tmp_path, *arguments, **variables)
        out, err = night.communicate(timeout=600)
        return subprocess.CompletedProcess(night.args, night.returncode, out, err)

    return run


def started(tmp_path: Path, *arguments, **variables):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {key: value for key, value in os.environ.items() if not key.startswith("GITHUB_")}
    return subprocess.Popen(
        [SCRIPT, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=ours | {"PATH": path} | variables,
    )


def pages(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "reports" / "nightly" / "pages").iterdir()}


@pytest.mark.slow("nights of whole campaigns, each by the script")
def test_a_planted_slowdown_is_found_in_the_night_it_comes(nightly, config, tmp_path):
    cells = config(CELL, **SHORT)
    first = nightly(cells, "--first")
    assert first.returncode == 0, first.stderr
    assert "nothing was compared, this is the first night" in first.stdout
    assert pages(tmp_path) == {"index.html", "report.html", "history.html"}

    # Wide, so that a busy machine cannot make a regression of it.
    second = nightly(cells, FAIL_ON="slower:40%")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "| tok/s |" in second.stdout
    assert "::" not in second.stdout

    summary = tmp_path / "summary.md"
    third = nightly(cells, HARNESS_FAKE_SLOWER="1.4", GITHUB_STEP_SUMMARY=str(summary))
    assert third.returncode == 3, third.stderr
    (line,) = [line for line in summary.read_text().splitlines() if "| tok/s |" in line]
    assert "SLOWER (fails)" in line
    errors = [line for line in third.stdout.splitlines() if line.startswith("::error title=SLOWER")]
    assert any("tok/s" in line for line in errors)
    assert pages(tmp_path) == {"index.html", "compare.html", "history.html", "report.html"}
    out = tmp_path / "reports" / "nightly"
    figures = {entry["name"].split()[1]: entry for entry in json.loads((out / "benchmark.json").read_text())}
    assert figures["ms_per_token"]["value"] == pytest.approx(1.4 * CELL["B_ms"], rel=0.05)
    with tarfile.open(out / "records.tar.gz") as packed:
        assert sum(name.endswith("record.json") for name in packed.getnames()) == SHORT["repeats"]


def test_a_night_without_a_night_before_it_is_not_green(nightly, config, tmp_path):
    ran = nightly(config(CELL, **SHORT))
    assert ran.returncode == 2
    assert "results/nightly/fake has no records to compare with" in ran.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.slow("nights of whole campaigns, each by the script")
@pytest.mark.parametrize("first", [[], ["--first"]])
def test_nights_of_other_cells_are_not_compared_with_and_no_first_ones(nightly, config, tmp_path, first):
    assert nightly(config(CELL, **SHORT | {"repeats": 1}), "--first").returncode == 0
    other = nightly(config(CELL | {"B_ms": 16.0}, **SHORT | {"repeats": 1}), *first)
    assert other.returncode == 2
    assert "nothing was compared" in other.stdout
    assert "first night" not in other.stdout + other.stderr
    assert other.stderr.count("--first is ignored: results/nightly/fake has records") == len(first)
    assert {"report.html", "history.html"} <= pages(tmp_path)


@pytest.mark.slow("nights of whole campaigns, each by the script")
def test_a_night_waits_for_the_one_before_it_and_is_compared_with_it(nightly, config, tmp_path):
    """The other run's files in OUT are left alone, and its records are read after its end."""
    cells = config(CELL, **SHORT)
    elsewhere, results = tmp_path / "elsewhere", tmp_path / "results" / "nightly" / "fake"
    assert nightly(cells, "--first", RESULTS=str(elsewhere)).returncode == 0
    out = tmp_path / "reports" / "nightly"
    packed = (out / "records.tar.gz").read_bytes()
    with (out / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        second = started(tmp_path, f"./{cells.name}", FAIL_ON="slower:40%")
        said = next((line for line in second.stderr if line.startswith("nightly: ")), "")
        assert said == f"nightly: waiting for the night that has {out}\n"
        assert (out / "records.tar.gz").read_bytes() == packed
        results.parent.mkdir(parents=True)
        elsewhere.rename(results)
    told, err = second.communicate(timeout=600)
    assert second.returncode == 0, told + err
    assert "| tok/s |" in told


@pytest.mark.parametrize("device", ["cuda", "vulkan"])
def test_a_device_that_is_not_here_ends_it_before_anything_is_measured(nightly, tmp_path, device):
    config = tmp_path / "elsewhere.yaml"
    experiment = {
        "device": device,
        "gpu": "No Such Card",
        "models": [{"shape": "tiny-qwen2"}],
        "variants": [{"stack": "fake" if device == "cuda" else "llamacpp"}],
    }
    config.write_text(json.dumps(experiment))
    ran = nightly(config, "--first")
    assert ran.returncode == 2
    (sentence,) = ran.stderr.splitlines()
    assert "elsewhere.yaml" in sentence
    assert not (tmp_path / "results").exists()


@pytest.mark.slow("nights of whole campaigns, each by the script")
def test_a_failing_cell_is_told_and_the_rest_is_compared_all_the_same(nightly, config, tmp_path):
    dies = {"name": "dies", "die_at_token": 5}
    cells = config(CELL, dies, **SHORT | {"repeats": 2})
    assert nightly(cells, "--first").returncode == 1
    ran = nightly(cells, FAIL_ON="slower:40%")
    assert ran.returncode == 1, ran.stderr
    assert "dies" in ran.stdout.split("report: ")[1]
    assert pages(tmp_path) == {"index.html", "compare.html", "history.html", "report.html"}


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ([], {}, "name a config"),
        (["--frist", "a.yaml"], {}, "--frist: no such option"),
        (["a.yaml", "b.yaml"], {}, "one config a night"),
        (["a.yaml"], {}, "a.yaml"),
        (["fake.yaml"], {"FAIL_ON": "slower:2%,memory:2%"}, "the threshold must be a percentage"),
        (["fake.yaml"], {"FAIL_ON": "slower:2% speed:2%"}, "must begin with one of"),
        (["fake.yaml"], {"FAIL_ON": "--x"}, "expected one argument"),
        (["fake.yaml"], {"BASELINE": "14"}, "must be last:N, as in last:14"),
    ],
)
def test_a_mistake_is_one_sentence_and_starts_nothing(nightly, config, tmp_path, arguments, variables, said):
    config(CELL, **SHORT)
    ran = nightly(*arguments, *(["--first"] if variables else []), **variables)
    assert ran.returncode == 2
    (sentence,) = ran.stderr.splitlines()
    assert said in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["fake.yaml"]


def test_shellcheck_finds_nothing():
    if not shutil.which("shellcheck"):
        pytest.skip("needs shellcheck")
    checked = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_with_a_reference_both_are_measured_in_turns_and_no_night_before_is_needed(nightly, config, tmp_path):
    slow = CELL | {"B_ms": 30.0, "clock": "virtual"}
    reference = config(CELL | {"clock": "virtual"}, name="reference", **SHORT)
    night = nightly(config(slow, name="<img src=x>", **SHORT), REFERENCE=str(reference), FAIL_ON="slower:20%")
    assert night.returncode == 3, night.stdout + night.stderr
    out = tmp_path / "reports" / "nightly"
    assert "SLOWER (fails)" in (out / "summary.md").read_text()
    assert pages(tmp_path) == {"index.html", "compare.html", "report.html", "history.html"}
    assert "<title>&lt;img src=x&gt;</title>" in (index := (out / "pages" / "index.html").read_text())
    assert "<img" not in index
