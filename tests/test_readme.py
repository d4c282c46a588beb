"""The README's list of modules is the modules there are, each in its own words."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from harness import cli, config
from harness.config import Experiment, Protocol, Warmup
from harness.stacks.header import stacks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def modules() -> dict[str, str]:
    """Path -> the first sentence of its docstring. A package stands for its __init__."""
    found = {}
    for path in sorted([*ROOT.glob("harness/**/*.py"), *ROOT.glob("runners/*.py")]):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        sentence = re.split(r"(?<=[.?!])\s", docstring, maxsplit=1)[0]
        relative = path.relative_to(ROOT)
        name = f"{relative.parent}/" if path.name == "__init__.py" else str(relative)
        found[name] = " ".join(sentence.split()).rstrip(".")
    return found


def table() -> str:
    return "\n".join(f"| `{name}` | {sentence} |" for name, sentence in modules().items())


def test_the_readme_lists_every_module_in_one_line():
    assert table() in README


def test_every_subcommand_and_config_is_in_the_readme():
    for command in (
        "run",
        "list",
        "validate",
        "init",
        "synth",
        "env",
        "doctor",
        "theory",
        "machine",
        "fit",
        "report",
        "check-weights",
        "memory",
    ):
        assert f"harness {command}" in README
    for path in (ROOT / "configs").glob("*.yaml"):
        assert f"configs/{path.name}" in README


def test_every_key_of_a_config_and_every_option_of_llamacpp_is_documented():
    text = (ROOT / "docs" / "config.md").read_text()
    keys = {*Experiment.model_fields, *Protocol.model_fields, *stacks()["llamacpp"].options} - {"source"}
    assert not {key for key in keys if f"`{key}`" not in text}
    for value in (*stacks()["llamacpp"].options["quant"].choices, *Warmup.model_fields):
        assert value in text


@pytest.mark.parametrize(
    ("stack", "heading"),
    [
        ("hf", "transformers"),
        ("bnb", "bitsandbytes"),
        ("gptq", "auto-gptq"),
        ("autoawq", "autoawq"),
        ("gptqm", "gptqmodel"),
    ],
)
def test_every_option_of_the_stacks_that_load_checkpoints_is_documented(stack, heading):
    sections = (ROOT / "docs" / "stacks.md").read_text().split("\n## ")
    (section,) = (text for text in sections if text.startswith(f"{heading} (`stack: {stack}`)"))
    rows = "\n".join(line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `"))
    options = stacks()[stack].options
    assert not {name for name in options if not re.search(f"`{name}[`:]", rows)}
    own = {choice for name, o in options.items() if f"`{name}:" in rows for choice in o.choices}
    assert not {choice for choice in own if not re.search(rf"\b{choice}\b", rows)}


def test_the_tables_of_the_theory_are_those_of_the_code():
    refreshed = runpy.run_path(str(ROOT / "docs" / "refresh.py"))["refreshed"]
    page = (ROOT / "docs" / "theory.md").read_text()
    assert page.count("<!-- end -->") == 12
    assert refreshed(page) == page


def test_the_exit_codes_are_those_of_the_code():
    codes = {"0": cli.OK, "1": cli.NOT_OK, "2": cli.NOT_STARTED, "130": cli.INTERRUPTED}
    assert all(str(value) == name for name, value in codes.items())
    for name in codes:
        assert f"**{name}**" in README


def test_no_module_outgrows_its_room():
    """About 300 lines, headers and docstrings included; then it becomes a folder."""
    for path in [*ROOT.glob("harness/**/*.py"), *ROOT.glob("runners/*.py")]:
        body = re.sub(r"(?ms)^# /// script$.*?^# ///$", "", path.read_text())
        assert len(body.splitlines()) <= 340, path


if __name__ == "__main__":  # the table, to paste
    print(table())


def test_the_readmes_own_configuration_is_right(tmp_path):
    path = tmp_path / "readme.yaml"
    path.write_text(re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)[0])
    assert {variant.stack for variant in config.load(path).variants} == {"llamacpp", "hf", "bnb", "gptqm"}
