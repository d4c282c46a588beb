"""Three stacks side by side through the whole command: one model for all, and what is wrong ends nothing."""

import shutil
from pathlib import Path

from conftest import records_below, write_config
from small_checkpoints import configure

from harness.config import load, plan


def written(tmp_path: Path, models: list[dict], variants: list[dict], **protocol: object) -> Path:
    # One thread, and windows that agree at once: other processes may be running.
    settings = {"new_tokens": 30, "threads": 1, "warmup": {"window_tokens": 4, "tolerance": 0.9}}
    settings |= {"repeats": 1, "measure_bandwidth": False, "retry_disturbed": 0}
    return write_config(tmp_path / "stacks.yaml", variants, settings, {"models": models} | protocol)


def test_the_stacks_decode_one_model_and_each_says_how_it_reads_its_cache(
    harness, tmp_path, llamacpp_interpreter, hf_interpreter, bnb_interpreter
):
    variants = [
        {"stack": "llamacpp", "quant": "f16"},
        {"stack": "hf", "cache": ["dynamic", "static"]},
        {"stack": "bnb", "quant": "nf4"},
    ]
    path = written(tmp_path, [{"shape": "tiny-qwen2"}], variants)
    rows = {row["variant"]: row for row in harness("run", path, "--json").json}
    assert {name: row["kv_read"] for name, row in rows.items()} == {
        "f16": "padded256",
        "bf16-dynamic": "copied",
        "bf16-static": "full",
        "nf4-dynamic": "copied",
    }
    assert {row["tokens"] for row in rows.values()} == {30}
    records = records_below(tmp_path / "results")
    assert {record["outcome"] for record in records} == {"ok"}
    assert len({tuple(record["workload"]["prompt"]) for record in records}) == 1
    assert {rows[name]["bpw"] for name in ("bf16-dynamic", "bf16-static")} == {16.0}
    assert rows["nf4-dynamic"]["model_bytes"] < 0.8 * rows["bf16-dynamic"]["model_bytes"]
    per_token = rows["bf16-dynamic"]["kv_bytes_per_token"]
    assert rows["bf16-dynamic"]["kv_buffer_bytes"] == (25 + 29) * per_token  # the last is never fed back
    assert rows["bf16-static"]["kv_buffer_bytes"] == (25 + 30) * per_token
    assert rows["bf16-static"]["W_theory_tokens_per_ms"] is None


def test_models_that_cannot_be_run_are_failed_records_of_one_line_and_the_rest_goes_on(
    harness, tmp_path, checkpoint, hf_interpreter
):
    """One is refused by its files (test_weights has each fault), one by the stack."""
    whole = checkpoint("tiny-llama")
    cut, foreign = tmp_path / "cut", tmp_path / "foreign"
    for folder in (cut, foreign):
        shutil.copytree(whole, folder)
    (cut / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes()[:-100])
    configure(foreign, model_type="unheard", architectures=["UnheardForCausalLM"])
    models = [{"name": path.name, "weights": str(path)} for path in (cut, foreign)]
    models.append({"name": "whole", "weights": str(whole)})
    ran = harness("run", written(tmp_path, models, [{"stack": "hf"}]), "--json")
    assert ran.code == 1
    rows = {row["model"]: row for row in ran.json}
    assert rows.pop("whole")["tokens"] == 30
    said = {name: row["reasons"][0] for name, row in rows.items()}
    assert {row["status"] for row in rows.values()} == {"error"}
    assert "cut short" in said["cut"]
    assert "unheard" in said["foreign"]
    assert all("\n" not in reason for reason in said.values())


def test_a_context_beyond_the_trained_one_is_a_remark_and_no_failure(harness, tmp_path, hf_interpreter):
    shape = {"arch": "llama", "vocab_size": 512, "hidden_size": 64, "layers": 1, "intermediate_size": 128}
    shape |= {"heads": 2, "kv_heads": 1, "context": 40}
    path = written(tmp_path, [{"name": "short", "shape": shape}], [{"stack": "hf"}])
    (row,) = harness("run", path, "--json").json
    assert row["tokens"] == 30
    assert "beyond_trained_context" in {flag["code"] for flag in row["flags"]}


def test_a_configuration_of_several_stacks_needs_none_of_them_to_be_planned(harness):
    folder = Path(__file__).parent.parent / "configs"
    three = {"llamacpp", "hf", "bnb"}
    for name, stacks in (("quickstart-all", three), ("4090-qwen15", three | {"gptq", "autoawq"})):
        path = folder / f"{name}.yaml"
        cells = plan.cells(load(path))
        assert {cell.variant.stack for cell in cells} == stacks
        lines = harness("run", path, "--dry-run", "--json").json
        assert [line["cell"] for line in lines] == [cell.id for cell in cells]
        assert all(line["memory_bytes"] > 0 for line in lines)
