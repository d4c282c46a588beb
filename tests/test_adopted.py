"""An interpreter that is already there runs a stack in place of a built environment: its packages are
recorded, and one that cannot is refused in a sentence."""

import json
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import shell_script

from harness.stacks import adopted, build
from harness.stacks.header import stacks

ROOT = Path(__file__).parent.parent
ACCEPTS = '# accepts = ["python>=3.10", "tiny-good>=0.5"]'


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack that is the fake, and needs the packages tiny-good and tiny-plain."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HARNESS_RUNNERS", str(tmp_path / "runners"))
    shutil.copytree(ROOT / "runners", tmp_path / "runners", ignore=shutil.ignore_patterns("__pycache__"))
    text = (tmp_path / "runners" / "stacks" / "fake.py").read_text()
    text = text.replace("# dependencies = []", '# dependencies = ["tiny-good[more]==1.0", "tiny-plain==2.0"]')
    text = text.replace("# [tool.harness]\n", f"# [tool.harness]\n{ACCEPTS}\n").replace(
        "\nimport ", "\nimport tiny_good\nimport ", 1
    )
    (tmp_path / "runners" / "stacks" / "tiny.py").write_text(text)


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Path]:
    """A Python with packages: `python(tiny_good="1.1")`; null leaves one out."""

    def make(name: str = "theirs", **versions: str | None) -> Path:
        folder = tmp_path / name
        if not folder.exists():
            venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        for old in site.glob("*.dist-info"):
            shutil.rmtree(old)
        needs = {"tiny_good": ["deep>=1; extra == 'more'", "absent; sys_platform == 'none'", "?"]}
        all_versions = {"tiny_good": "1.0", "tiny_plain": "2.0", "deep": "3", "else": "4"} | versions
        for package, version in all_versions.items():
            (site / f"{package}.py").write_text("")
            if version is None:
                continue
            (info := site / f"{package}-{version}.dist-info").mkdir()
            lines = [f"Requires-Dist: {each}\n" for each in needs.get(package, ())]
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\n"
                f"Version: {version}\n{''.join(lines)}"
            )
        return folder / "bin" / "python"

    return make


@pytest.fixture
def config(real_config) -> Path:
    return real_config({"stack": "tiny"}, model={"shape": "qwen1.5-0.5b"}, new_tokens=20)


def record_of(tmp_path: Path) -> dict[str, object]:
    """The newest record."""
    paths = (tmp_path / "results").rglob("record.json")
    return json.loads(max(paths, key=lambda path: path.stat().st_mtime_ns).read_text())


def test_an_adopted_interpreter_runs_the_stack_and_the_record_has_its_versions(
    harness, python, config, tmp_path
):
    used = harness("env", "use", "tiny", python(tiny_good="1.1"))
    assert used.code == 0, used.err
    pin = "tiny-good 1.1, pinned 1.0"
    assert f"tiny/cpu is not pinned: {pin}" in used.out
    assert harness("run", config).code == 0
    record = record_of(tmp_path)
    assert record["environment"]["adopted"] == {"python": platform.python_version(), "pins_not_met": [pin]}
    assert record["environment"]["lock"] == ["deep==3", "tiny-good==1.1", "tiny-plain==2.0"]
    assert str(tmp_path / "theirs") not in json.dumps(record)
    (row,) = harness("report", "--list", "--json").json
    details = [flag["detail"] for flag in row["flags"] if flag["code"] == "not_pinned"]
    assert details == [f"an adopted interpreter, not pinned: {pin}"]


def test_an_adopted_interpreter_may_lack_what_only_some_models_need(harness, python, tmp_path):
    path = tmp_path / "runners" / "stacks" / "tiny.py"
    path.write_text(path.read_text().replace(ACCEPTS, f'{ACCEPTS}\n# may_lack = ["tiny-plain"]', 1))
    used = harness("env", "use", "tiny", python(tiny_plain=None))
    assert used.code == 0, used.err
    assert "tiny/cpu lacks tiny-plain: not installed" in used.out


def test_the_pinned_versions_in_an_adopted_interpreter_are_pinned(harness, python, config, tmp_path):
    assert "not pinned" not in harness("env", "use", "tiny", python(tiny_good="1.0+cu130")).out
    harness("run", config)
    assert record_of(tmp_path)["environment"]["adopted"]["pins_not_met"] == []


def test_a_package_installed_since_it_was_adopted_makes_other_records(harness, python, config, tmp_path):
    harness("env", "use", "tiny", python())
    harness("run", config)
    before = record_of(tmp_path)
    python(tiny_plain="2.1")
    harness("run", config)
    after = record_of(tmp_path)
    assert after["content_key"] != before["content_key"]
    assert after["environment"]["adopted"]["pins_not_met"] == ["tiny-plain 2.1, pinned 2.0"]
    python(tiny_plain="2.1", **{"else": "5"})  # of no concern to the stack
    assert "nothing to measure" in harness("run", config).err or record_of(tmp_path) == after


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ({"tiny_good": None}, "lacks tiny-good, which tiny needs"),
        ({"tiny_good": "0.4"}, "tiny needs tiny-good >=0.5; "),
    ],
)
def test_an_interpreter_without_what_the_stack_needs_is_refused(harness, python, versions, sentence):
    refused = harness("env", "use", "tiny", python(**versions))
    assert refused.code == 2
    assert sentence in refused.err
    assert len(refused.err.splitlines()) == 1
    assert harness("env", "list", "tiny", "--json").json[0]["state"] == "not built"


def test_an_interpreter_that_cannot_import_the_runner_is_refused(harness, python, tmp_path):
    theirs = python()
    (module,) = (tmp_path / "theirs").glob("lib/python*/site-packages/tiny_good.py")
    module.write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    refused = harness("env", "use", "tiny", theirs)
    assert refused.code == 2
    assert "libcudart.so.13" in refused.err
    assert harness("env", "list", "tiny", "--json").json[0]["state"] == "not built"


FALLBACK = "try:\n    import {}\nexcept ImportError:\n    import another_fork\n"


def test_the_first_import_that_failed_is_the_reason_and_not_its_fallback(harness, python, tmp_path):
    theirs = python()
    (module,) = (tmp_path / "theirs").glob("lib/python*/site-packages/tiny_good.py")
    module.write_text(FALLBACK.format("disk_cache"))
    refused = harness("env", "use", "tiny", theirs)
    assert refused.code == 2
    assert "No module named 'disk_cache'" in refused.err
    assert "another_fork" not in refused.err
    assert adopted.why_not(theirs, "tiny_good") == "No module named 'disk_cache'"


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ({}, "No module named 'llama_cpp', nor 'ik_llama_cpp'"),
        ({"llama_cpp": "import diskcache"}, "No module named 'diskcache'"),
        ({"ik_llama_cpp": "import elsewhere"}, "No module named 'elsewhere'"),
    ],
)
def test_a_library_that_lacks_what_it_imports_is_not_taken_for_a_missing_one(
    python, tmp_path, packages, reason
):
    theirs = python()
    for name, text in packages.items():
        (site,) = (tmp_path / "theirs").glob("lib/python*/site-packages")
        (site / f"{name}.py").write_text(text)
    ran = subprocess.run(
        [theirs, "-c", "import runners.llamacpp.lib"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stderr.strip().splitlines()[-1] == f"ModuleNotFoundError: {reason}"


def test_what_is_no_interpreter_is_refused_in_a_sentence(harness, python, tmp_path, monkeypatch):
    plain = tmp_path / "text"
    plain.write_text("")
    old = shell_script(tmp_path / "old", f'exec {sys.executable} {tmp_path}/old.py "$3"')
    (tmp_path / "old.py").write_text(OLD)
    other = shell_script(tmp_path / "other", f'exec {sys.executable} {tmp_path}/other.py "$3"')
    (tmp_path / "other.py").write_text(OLD.replace("3.8.1", "3.12.1").replace(platform.machine(), "sparc"))
    binary = tmp_path / "elsewhere"
    binary.write_bytes(b"\x7fELF of another machine")
    binary.chmod(0o755)
    python()
    for given, sentence in (
        (tmp_path / "nowhere", "does not exist"),
        (plain, "is not a program"),
        (tmp_path / "theirs", f"is not a program; is it {tmp_path}/theirs/bin/python?"),
        (Path(shutil.which("true")), "is not a working Python 3"),
        (binary, "cannot be run: Exec format error"),
        (old, "tiny needs Python >=3.10"),
        (other, "is for sparc"),
        (shell_script(tmp_path / "hangs", "sleep 60"), "did not answer within 0.3 s"),
    ):
        if given.name == "hangs":  # the others answer, however busy the machine is
            monkeypatch.setattr(adopted, "LIMIT_S", 0.3)
        refused = harness("env", "use", "tiny", given)
        assert refused.code == 2, given
        assert sentence in refused.err
        assert len(refused.err.splitlines()) == 1
    assert not (tmp_path / "cache" / "adopted").exists()


OLD = f"""import json, sys
known = {{"python": "3.8.1", "architecture": "{platform.machine()}", "markers": {{}}, "distributions": None}}
json.dump(known, open(sys.argv[1], "w"))
"""


def test_an_interpreter_that_prints_on_start_up_is_adopted(harness, python, tmp_path):
    theirs = python()
    (site,) = (tmp_path / "theirs").glob("lib/python*/site-packages")
    (site / "loud.pth").write_text("import sys; print('hello'); print('{}', file=sys.stderr)\n")
    assert harness("env", "use", "tiny", theirs).code == 0


def test_an_adopted_interpreter_that_is_gone_makes_its_cells_unavailable_and_is_not_replaced(
    harness, python, config, tmp_path
):
    harness("env", "use", "tiny", python())
    shutil.rmtree(tmp_path / "theirs")
    sentence = f"{tmp_path}/theirs/bin/python does not exist; harness env forget tiny --device cpu"
    (line,) = (each for each in harness("env", "list", "tiny", "--json").json if each["device"] == "cpu")
    assert sentence in line["problem"]
    assert sentence in harness("run", config, "--dry-run").err
    assert harness("run", config).code == 1
    assert sentence in record_of(tmp_path)["reason"]
    (finding,) = (f for f in harness("doctor", config, "--json").json["findings"] if "tiny" in f["what"])
    assert finding["level"] == "warn"


def test_forgetting_leaves_the_interpreter_as_it_was(harness, python, config, tmp_path):
    harness("env", "use", "tiny", python())
    files = sorted(path for path in (tmp_path / "theirs").rglob("*"))
    assert harness("run", config).code == 0
    (dry,) = harness("run", config, "--dry-run", "--json").json
    theirs = f"Python {platform.python_version()}, {tmp_path}/theirs/bin/python"
    assert dry["interpreter"] == f"tiny/cpu: adopted, {theirs}"
    assert harness("env", "forget", "tiny").code == 0
    assert sorted(path for path in (tmp_path / "theirs").rglob("*")) == files
    again = harness("env", "forget", "tiny")
    assert (again.code, again.err) == (2, "harness: no interpreter is adopted for tiny/cpu\n")
    (dry,) = harness("run", config, "--dry-run", "--json").json
    assert dry["interpreter"] == "tiny/cpu: will be built"


def test_another_version_that_was_asked_for_is_built_not_adopted(harness, python):
    harness("env", "use", "tiny", python())
    environment = stacks()["tiny"].environments["cpu"]
    assert build.find(environment).adopted
    assert build.find(environment.with_packages(["tiny-plain==2.1"])) is None


def test_torch_built_without_cuda_is_refused_for_a_gpu(harness, python, tmp_path):
    theirs = python(torch="2.11.0")
    (site,) = (tmp_path / "theirs").glob("lib/python*/site-packages")
    (site / "torch").mkdir()
    version = site / "torch" / "version.py"
    version.write_text("from typing import Optional\n__version__ = '2.11.0'\ncuda: Optional[str] = None\n")
    refused = harness("env", "use", "tiny", theirs, "--device", "cuda")
    assert (refused.code, refused.err) == (2, f"harness: torch 2.11.0 of {theirs} is built without CUDA\n")
    version.write_text("from typing import Optional\n__version__ = '2.11.0'\ncuda: Optional[str] = '13.0'\n")
    assert harness("env", "use", "tiny", theirs, "--device", "cuda").code == 0


def test_adopted_interpreters_run_in_no_shell(python, harness, tmp_path):
    """A path with spaces and quotes is a path."""
    odd = tmp_path / "it's a 'name'"
    theirs = python(odd.name)
    assert harness("env", "use", "tiny", theirs).code == 0
    assert str(theirs) in harness("env", "list", "tiny").out


@pytest.mark.slow("builds an environment")
@pytest.mark.network
def test_transformers_runs_at_the_lower_end_of_the_stated_versions(harness, real_config, monkeypatch):
    monkeypatch.setenv("HARNESS_RUNNERS", str(ROOT / "runners"))
    environment = stacks()["hf"].environments["cpu"].with_packages(["transformers==4.56.0"])
    theirs = build.create(environment, lambda line: None).python
    used = harness("env", "use", "hf", theirs)
    assert "hf/cpu is not pinned: transformers 4.56.0, pinned 5" in used.out
    workloads = [{"kind": "decode"}, {"kind": "prefill", "lengths": [1, 8], "passes": 5}]
    variant = {"stack": "hf", "cache": ["dynamic", "static"]}
    rows = harness("run", real_config(variant, new_tokens=8, workloads=workloads), "--json").json
    assert len(rows) == 4
    assert {row["status"] for row in rows} <= {"ok", "invalid"}, rows  # a busy machine invalidates
