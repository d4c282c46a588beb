"""README and docs agree with the code: commands, options, exit codes, modules, links."""

import re
import runpy
from pathlib import Path

import pytest
import yaml

from harness import cli, config
from harness.config import Experiment, Protocol, Warmup
from harness.stacks.header import stacks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
NAMING = (".py", ".sh", ".yml", ".yaml")
OF_OTHERS = (
    "docs/build.md",
    "docs/gguf.md",
    "docs/api.md",
    "docs/tutorials/working-with-profile-exports.md",
    "docs/a.md",
)
"""Pages of other projects, and of a test's folder."""


def test_the_readme_is_read_in_one_sitting():
    assert len(README.encode()) <= 5 * 1024
    prose = [line for line in README.splitlines() if not line.startswith("|")]
    assert max(map(len, prose)) < 200


def test_every_shipped_config_is_in_the_docs():
    text = (ROOT / "docs" / "reference" / "config.md").read_text()
    for path in (ROOT / "configs").glob("*.yaml"):
        assert f"`configs/{path.name}`" in text


def prose(page: Path) -> str:
    return re.sub(r"(?ms)^```.*?^```$", "", page.read_text())


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"(?m)^#+ (.*)$", prose(page))
    return {re.sub(r"[^\w\s-]", "", each).strip().lower().replace(" ", "-") for each in headings}


def test_every_link_of_the_readme_and_of_the_docs_leads_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", prose(page)):
            target = page.parent / link if link else page
            assert target.exists(), (page.name, link)
            assert not anchor or anchor in anchors(target), (page.name, link, anchor)


def test_the_navigation_has_every_page_of_the_docs():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = re.findall(r"[\w/-]+\.md", str(nav))
    assert sorted(pages) == sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))


def test_every_page_of_the_docs_that_a_file_names_is_there():
    """In messages, comments, workflows and configs."""
    for folder in ("harness", "runners", "ci", "configs", "tests", "benchmarks", ".github"):
        for path in (each for each in (ROOT / folder).rglob("*") if each.suffix in NAMING):
            for page in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", path.read_text()):
                assert (ROOT / page).exists() or page in OF_OTHERS, (path, page)


def test_every_key_of_a_config_and_every_option_of_llamacpp_is_documented():
    text = (ROOT / "docs" / "reference" / "config.md").read_text()
    keys = {*Experiment.model_fields, *Protocol.model_fields, *stacks()["llamacpp"].options} - {"source"}
    assert not {key for key in keys if f"`{key}`" not in text}
    for value in (*stacks()["llamacpp"].options["quant"].choices, *Warmup.model_fields):
        assert value in text


@pytest.mark.parametrize(
    ("stack", "heading"),
    [
        ("hf", "transformers"),
        ("bnb", "bitsandbytes"),
        ("torchao", "torchao"),
        ("gptq", "auto-gptq"),
        ("autoawq", "autoawq"),
        ("gptqm", "gptqmodel"),
        ("vllm", "vLLM"),
    ],
)
def test_every_option_of_the_stacks_that_load_checkpoints_is_documented(stack, heading):
    sections = (ROOT / "docs" / "reference" / "stacks.md").read_text().split("\n## ")
    (section,) = (text for text in sections if text.startswith(f"{heading} (`stack: {stack}`)"))
    rows = "\n".join(line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `"))
    options = stacks()[stack].options
    of_hf = set() if stack == "hf" else {*stacks()["hf"].options} - {"dtype"}  # their section has them
    assert not {name for name in {*options} - of_hf if not re.search(f"`{name}[`:]", rows)}
    own = {choice for name, o in options.items() if f"`{name}:" in rows for choice in o.choices}
    assert not {choice for choice in own if not re.search(rf"\b{choice}\b", rows)}


def test_what_pages_take_from_the_code_is_what_the_code_says():
    """Commands, layers, folders, machines, models, figures, warnings: docs/refresh.py writes them."""
    made = runpy.run_path(str(ROOT / "docs" / "refresh.py"))
    blocks = 0
    for page in made["PAGES"]:
        text = page.read_text()
        blocks += text.count("<!-- end -->")
        assert made["refreshed"](text) == text, page.name
    assert blocks == 9
    assert made["SCHEMA"].read_text() == made["record_schema"]()


def test_the_exit_codes_are_those_of_the_code():
    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    codes = {cli.OK, cli.NOT_OK, cli.NOT_STARTED, cli.REGRESSION, cli.INTERRUPTED}
    assert {int(code) for code in re.findall(r"\*\*(\d+)\*\*", text)} == codes


def test_the_configuration_of_the_guide_is_right(tmp_path):
    path = tmp_path / "guide.yaml"
    guide = (ROOT / "docs" / "guide" / "run.md").read_text()
    path.write_text(re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)[0])
    assert {variant.stack for variant in config.load(path).variants} == {"llamacpp", "hf", "bnb"}
