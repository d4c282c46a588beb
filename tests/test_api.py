"""The functions of `import harness`: what the page of the docs shows runs, and editors know their types."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import harness as package

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "python.md"
FUNCTIONS = ("fit", "load_results", "predict", "run", "theory_rows")
SHOWN, MEASURES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_what_the_page_shows_is_printed_without_a_stack(tmp_path):
    (printed,) = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    ran = subprocess.run(
        [sys.executable, "-c", SHOWN],
        cwd=tmp_path,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (ran.stdout, ran.returncode) == (printed, 0), ran.stderr


def test_run_measures_as_the_page_shows_and_gives_the_study(tmp_path, monkeypatch, config, capsys):
    monkeypatch.chdir(tmp_path)
    exec(MEASURES.replace('"model.gguf"', repr(str(config({})))), names := {"harness": package})
    status, speed = capsys.readouterr().out.split()
    assert status in ("ok", "provisional", "invalid")
    assert speed == "None" or float(speed) > 0
    study: package.Study = names["study"]
    assert {row["tokens"] for row in study.cells} == {128}
    assert {row["repeat"] for row in study.repeats} >= {1, 2, 3}
    assert len(package.load_results("results").cells) == len(study.cells)
    assert len(study.frame("repeats")) == len(study.repeats)


def test_the_record_has_the_command_that_measures_the_same(tmp_path, monkeypatch, config):
    monkeypatch.chdir(tmp_path)
    study = package.run(str(path := config({})), only="*", settings={"repeats": 1}, fresh=True)
    command = ["harness", "run", str(path), "--set", "repeats=1", "--only", "*", "--fresh"]
    assert {tuple(stored.record["campaign"]["command_line"]) for stored in study.stored} == {tuple(command)}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: package.run("no-such-model:latest"), "no-such-model"),
        (lambda: package.run("quickstart", stacks="llamacpp"), "a config has its variants"),
        (lambda: package.predict("qwen3-8b", "rtx-4090", context=1), "a prompt and a token need 2"),
        (lambda: package.predict("qwen3-8b", "rtx-4090", stacks="no-stack"), "unknown stack no-stack"),
        (lambda: package.theory_rows("qwen3-8"), "qwen3-8"),
        (lambda: package.theory_rows(()), "name a model"),
        (lambda: package.fit(__file__, model="qwen3-8b"), "go together|not|no"),
    ],
)
def test_a_mistake_is_an_error_with_one_sentence(call, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((package.NotStarted, package.LogError), match=says) as mistake:
        call()
    assert "\n" not in str(mistake.value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_typed_and_on_the_page_with_its_arguments(name):
    function = getattr(package, name)
    hints = get_type_hints(function)
    assert Any not in hints.values()
    assert "Raises" in function.__doc__
    (line,) = re.findall(rf"^\| `{name}\((.*?)\)` \|", PAGE.read_text(), re.MULTILINE)
    assert re.findall(r"[a-z_]\w*", line) == list(inspect.signature(function).parameters)


def test_all_names_are_imported_when_used_and_known_to_type_checkers():
    source = Path(package.__file__).read_text()
    typed = re.findall(r"^    from \S+ import (.+)$", source, re.MULTILINE)
    assert sorted(name for line in typed for name in line.split(", ")) == package.__all__
    assert [name for name in dir(package) if not name.startswith("_")] == package.__all__
    assert Path(package.__file__).with_name("py.typed").exists()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018
