"""The shipped tables: each record has the form that a user's has, and says what its own words derive."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from csv_tables import of_each

import harness
from harness import cli
from harness.base import data
from harness.base.files import strict_json
from harness.config import own_machines
from harness.config.mistakes import Mistakes
from harness.theory import machine_names, machines
from harness.theory.decoder import parameters
from harness.theory.hf_config import SHAPES
from harness.theory.machines import CITED, DOCUMENTS, MACHINES

RECORDS = {name: record for name, record in data.table("machines.toml").items() if name != DOCUMENTS}
SOURCES = data.table("machines.toml")[DOCUMENTS]
ALIASES = data.table("aliases.toml")


@of_each("name", RECORDS)
def test_a_shipped_record_has_the_form_of_a_users(name):
    mistakes = Mistakes(str)
    assert own_machines.checked(name, RECORDS[name], SOURCES, mistakes), mistakes.found


@of_each("name", RECORDS)
def test_a_rate_is_what_its_source_derives(name):
    """`1,920 cores x 2 x 1.68 GHz`, `8 x FP32`, `233 AI TOPS (...) / 4`: the figure is the product."""
    machine = MACHINES[name]
    for rate, (value, source) in machine.rates.items():
        tera = value / 1e12
        derivation = source.partition(": ")[0]
        if found := re.fullmatch(r"(twice FP32, )?([\d,]+) cores x 2 x ([\d.]+) GHz", derivation):
            twice, cores, ghz = found.groups()
            derived = (2 if twice else 1) * int(cores.replace(",", "")) * 2 * float(ghz) / 1e3
        elif found := re.match(r"([\d.]+) x FP32,", derivation):
            derived = float(found[1]) * machine.rates["fp32"].value / 1e12
        elif found := re.match(r"(\d+) AI TOPS \([^)]*\) / (\d+)", derivation):
            derived = int(found[1]) / int(found[2])
        elif found := re.match(r"(\d+) cores x 128 units a core x 2 x ([\d.]+) GHz", derivation):
            derived = int(found[1]) * 128 * 2 * float(found[2]) / 1e3
        elif found := re.match(r"([\d,]+) operations a clock of (?:each of )?(\d+) units", derivation):
            ghz = re.search(r" x ([\d.]+) GHz", source)
            derived = int(found[1].replace(",", "")) * int(found[2]) * float(ghz[1]) / 1e3
        elif found := re.match(r"(\d+) tensor cores x 1,024 operations x ([\d.]+) GHz", derivation):
            derived = int(found[1]) * 1024 * float(found[2]) / 1e3 / (2 if rate == "fp16" else 1)
        else:
            continue
        assert tera == pytest.approx(derived, rel=5e-4), rate


def test_most_rates_are_derived_in_words():
    words = r" x FP32|cores x |AI TOPS|operations a clock"
    derived = [
        bool(re.search(words, figure.source)) for m in MACHINES.values() for figure in m.rates.values()
    ]
    assert sum(derived) > 0.7 * len(derived)


def test_the_records_are_read_one_by_one_as_the_whole_file_has_them():
    assert list(MACHINES) == list(RECORDS)
    assert len(MACHINES) == 211
    whole = {name: machines.machine(record, SOURCES) for name, record in RECORDS.items()}
    assert dict(MACHINES) == whole


def test_every_document_is_cited_and_no_two_are_the_same():
    cited = {
        word
        for record in RECORDS.values()
        for source in (record.get("source", ""), *record.get("sources", {}).values())
        for word in CITED.findall(source)
    }
    assert cited - {"source"} == set(SOURCES)
    assert len(set(SOURCES.values())) == len(SOURCES)


@pytest.mark.parametrize("command", ["--help", "--version"])
def test_no_table_is_read_for_the_first_screen(command):
    imported = [sys.executable, "-X", "importtime", "-m", "harness", command]
    ran = subprocess.run(imported, capture_output=True, text=True, check=True)
    assert "harness.cli" in ran.stderr
    assert "harness.base.data" not in ran.stderr
    assert "tomllib" not in ran.stderr


def test_aliases_are_of_known_machines_and_resolve():
    words = ALIASES["machines"]["words"]
    assert set(words) <= set(MACHINES)
    for pattern, plain in ALIASES["machines"]["spellings"]:
        re.compile(pattern)
        assert isinstance(plain, str)
    for name, of_name in words.items():
        assert set(of_name) <= {"optional", "also"}
        key = set(re.split("-", name))
        assert set(of_name.get("optional", ())) <= key
        assert not set(of_name.get("also", ())) & key
        typed = " ".join([name, *of_name.get("also", ())])
        assert MACHINES[name].name in {found.name for found in machine_names.machines(typed).values()}
        shorter = "-".join(word for word in name.split("-") if word not in of_name.get("optional", ()))
        assert MACHINES[name].name in {found.name for found in machine_names.machines(shorter).values()}


def test_no_alias_is_listed_twice():
    for part in ("machines", "models"):
        for words in (value for value in ALIASES[part].values() if isinstance(value, list)):
            assert len(words) == len({str(word) for word in words})


OWN = """\
[documents]
page = "TechPowerUp: https://www.techpowerup.com/gpu-specs/geforce-rtx-4090-d.c4189"

[rtx-4090-d]
name = "GeForce RTX 4090 D"
family = "cuda"
compute_capability = "8.9"
memory_gib = 24
bandwidth_gb_per_s = 1008
tflops.fp16 = 73.54
tflops.fp16-tensor = 294
source = "{page}"
sources.fp16-tensor = "4 x FP16: {source}"
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes the user's file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "harness" / "machines.toml"
    file.parent.mkdir()

    def write(text: str) -> Path:
        file.write_text(text, encoding="utf-8")
        return file

    return write


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("theory qwen1.5-7b --machine rtx-4090-d", "rtx-4090-d: 1,008 GB/s; 294 TFLOP/s"),
        ("theory qwen1.5-7b --machine RTX-4090-D", "rtx-4090-d: 1,008 GB/s; 294 TFLOP/s"),
        ("recommend qwen1.5-7b --machine rtx-4090-d", "qwen1.5-7b on GeForce RTX 4090 D with 25.8"),
        ("fit LOG --model qwen1.5-7b --machine rtx-4090-d", "1,923"),
    ],
)
def test_a_users_machine_is_found_by_every_command_that_takes_a_machine(
    own, tmp_path, capsys, command, shown
):
    own(OWN)
    log = tmp_path / "log.csv"
    log.write_text("latency_ms\n" + "".join(f"{14 + n / 1000}\n" for n in range(2100)))
    assert cli.main(command.replace("LOG", str(log)).split()) == 0
    assert shown in capsys.readouterr().out


def test_a_users_machine_is_listed_with_its_sources(own, capsys):
    own(OWN)
    assert cli.main(["theory", "--list-machines"]) == 0
    last = capsys.readouterr().out.split("\n\n")[-1]
    page = "TechPowerUp: https://www.techpowerup.com/gpu-specs/geforce-rtx-4090-d.c4189"
    assert last == f"rtx-4090-d\n  memory, bandwidth, fp16: {page}\n  fp16-tensor: 4 x FP16: {page}\n"


def test_a_machine_of_from_may_be_like_a_users(own, tmp_path, capsys):
    own(OWN)
    (tmp_path / "own.yaml").write_text("machines: {modded: {like: rtx-4090-d, memory_gib: 48}}")
    given = ["theory", "qwen1.5-7b", "--machine", "modded", "--from", str(tmp_path / "own.yaml")]
    assert cli.main(given) == 0
    assert "modded: of its 51.5 GB (48 GB as sold)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff", "is not UTF-8 text"),
        (b"x = " + b"[" * 100_000, "is nested too deeply"),
        (b"#" * (1 << 20) + b"\n", "cannot be read: it is larger than 1 MiB"),
    ],
)
def test_a_users_file_that_cannot_be_read_is_one_sentence(own, capsys, content, said):
    file = own("")
    file.write_bytes(content)
    assert cli.main(["theory", "qwen1.5-7b", "--machine", "rtx-4090"]) == 2
    assert capsys.readouterr().err == f"{file}: {said}\n"


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("memory_gib =", "memory_gb =", 8, "rtx-4090-d.memory_gb: unknown key; did you mean memory_gib?"),
        ("= 24", "= 24576", 8, "rtx-4090-d.memory_gib: must be at most 16384, got 24576"),
        ("= 1008", '= "1008"', 9, 'rtx-4090-d.bandwidth_gb_per_s: expected a number, got "1008"'),
        ("= 1008", "= 1008e9", 9, "must be at most 100000"),
        ("= 294", "= 294e12", 11, "rtx-4090-d.tflops.fp16-tensor: must be at most 1000000"),
        ("tflops.fp16 =", "tflops.half =", 10, "rtx-4090-d.tflops.half: is no type of arithmetic"),
        ("name = ", "title = ", 4, "rtx-4090-d.name: is missing"),
        ('"cuda"', '"cud"', 6, 'rtx-4090-d.family: cannot be "cud"; did you mean cuda?'),
        ('"cuda"', '"hip"', 7, "rtx-4090-d.compute_capability: is of family cuda alone"),
        ('compute_capability = "8.9"', "", 4, "rtx-4090-d.compute_capability: is missing"),
        ('"8.9"', '"89"', 7, 'rtx-4090-d.compute_capability: is a text such as "8.9", got "89"'),
        ('source = "{page}"', "", 4, "rtx-4090-d.source: is missing: where is memory from?"),
        ("{page}", "{pages}", 12, "rtx-4090-d.source: {pages} is not in [documents]"),
        ("sources.fp16-tensor", "sources.int8", 13, "rtx-4090-d.sources.int8: unknown figure"),
        ("tflops.fp16 =", "bus_bits = 384\ntflops.fp16 =", 10, "bus_bits and bus_mt_per_s go together"),
        ("[rtx-4090-d]", "[rtx-4090]", 4, "rtx-4090: is a machine that is known already"),
        ("[rtx-4090-d]", '["RTX 4090 D"]', 4, "RTX 4090 D: a name has lower-case letters"),
        ("[rtx-4090-d]", "[this]", 4, 'and is not "this"'),
        ("[documents]", "x = 1\n[documents]", 1, "x: expected a table, as in [my-card], got 1"),
        ("= 24", "= 24 GiB", 8, "is not TOML: "),
        ("page = ", "page = 1 #", 2, "documents.page: expected text"),
    ],
)
def test_a_mistake_in_a_users_file_is_one_sentence_with_its_line(own, capsys, old, new, line, said):
    file = own(OWN.replace(old, new, 1))
    assert cli.main(["theory", "qwen1.5-7b", "--machine", "rtx-4090"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert any(each.startswith(f"{file}:{line}: ") and said in each for each in captured.err.splitlines())


@of_each("name", SHAPES)
def test_a_model_has_the_parameters_of_its_name(name):
    if size := re.search(r"-(\d[\d.]*)b\b", name):
        # Small models' names leave out an embedding; Qwen1.5-0.5B ties it on the hub.
        assert -0.05 < parameters(SHAPES[name]) / (float(size[1]) * 1e9) - 1 < 0.25
    else:
        assert name.startswith("tiny-")


def test_models_are_config_json_without_keys_that_nobody_reads():
    models = strict_json(data.text("models.json").encode())
    keys = {"model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"}
    keys |= {"num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"}
    keys |= {"sliding_window", "rope_theta", "rms_norm_eps", "tie_word_embeddings"}
    assert set(models) == set(SHAPES)
    assert {key for config in models.values() for key in config} == keys


def test_published_speeds_are_of_known_machines_and_models():
    rows = data.rows("llama_speeds.csv")
    assert len({(row["machine"], row["model"]) for row in rows}) == len(rows) == 10
    for row in rows:
        assert row["machine"] in MACHINES
        assert row["model"] in SHAPES
        nominal = float(row["nominal_parameters"])
        assert nominal == pytest.approx(parameters(SHAPES[row["model"]]), rel=0.05)
        assert all(0 < float(row[of]) < 1e4 for of in ("published_tok_s", "seen_tok_s") if row[of])


def test_each_slip_of_the_study_has_a_reason():
    rows = data.rows("study_slips.csv")
    assert all(len(row["why"]) > 20 for row in rows)
    assert set(rows[0]) == {"table", "row", "column", "why"}


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == harness.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # all that its schema requires
