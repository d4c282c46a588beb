"""What llama.cpp loads of a GGUF in parts, of one with a head that drafts, or with an unknown vocabulary."""

from pathlib import Path

import gguf_holes
import numpy as np
import pytest
from conftest import failures, records_below
from gguf_again import in_parts, written_again
from test_hf import said
from test_llamacpp import made, real, request_of, vars_of, with_vocabulary

from harness.models import locate

__all__ = ["made", "real"]  # fixtures


@pytest.fixture
def plain(tmp_path) -> Path:
    path = tmp_path / "plain.gguf"
    gguf_holes.write_random(path, gguf_holes.config("qwen3_5_text", num_hidden_layers=4))
    return path


def test_a_model_in_parts_is_one_model_whichever_part_is_named(plain, tmp_path):
    whole, parts = locate.local(plain), in_parts(plain, tmp_path / "split", 3)
    of_parts = [locate.local(path) for path in parts]
    assert {each.path for each in of_parts} == {parts[0]}
    assert len({each.fingerprint for each in of_parts}) == 1
    for each in of_parts:
        assert (each.sizes, each.decoder, each.shards) == (whole.sizes, whole.decoder, 3)
        assert each.file_bytes == sum(path.stat().st_size for path in parts)


def test_a_part_that_changes_makes_another_model(plain, tmp_path):
    parts = in_parts(plain, tmp_path / "split", 2)
    before = locate.local(parts[0]).fingerprint
    with parts[1].open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert locate.local(parts[0]).fingerprint != before


def test_a_model_in_parts_runs_as_it_is(harness, real, made, tmp_path):
    source = made("tiny-llama", "q4_0")
    parts = in_parts(source, tmp_path / "split", 2)
    model = {"name": "m", "weights": str(parts[1])}
    assert failures(harness("run", real({}, model=model, new_tokens=8), "--json").json) == []
    record = records_below(tmp_path / "results")[0]
    known, loaded = record["model"]["weights"], record["loaded"]
    assert (known["quant"], loaded["quant"], known["shards"]) == ("q4_0", "q4_0", 2)
    assert known["header"]["model_bytes"] == locate.local(source).sizes["model_bytes"]
    assert loaded["model_bytes"] == known["header"]["model_bytes"]


def test_a_model_in_parts_is_dequantized_whole(job, made, tmp_path):
    source = made("tiny-llama", "q4_0")
    made_of = []
    for path in (source, in_parts(source, tmp_path / "split", 3)[0]):
        target = tmp_path / path.stem
        model = {"name": "m", "path": None, "shape": vars_of("tiny-llama")}
        job(job="dequantize", model=model, files={"source": str(path), "target": str(target)})
        made_of.append((target / "model.safetensors").read_bytes())
    assert made_of[0] == made_of[1]


DRAFTS = ("eh_proj", "enorm", "hnorm", "shared_head_norm")


@pytest.mark.parametrize(
    ("kind", "arch", "last", "changes"),
    [
        ("qwen3_5_text", "qwen35", "blk.3.", {"full_attention_interval": 4}),
        ("glm4_moe", "glm4moe", "blk.4.", {}),
    ],
)
def test_a_head_that_drafts_is_not_loaded_and_its_bytes_are_counted(
    worker, llamacpp_interpreter, tmp_path, kind, arch, last, changes
):
    plain = tmp_path / "m.gguf"
    gguf_holes.write_random(plain, gguf_holes.config(kind, num_hidden_layers=5, **changes))
    drafts = {}

    def more(tensors):
        """The last layer with attention once more, and the head's own tensors."""
        known = {tensor.name: tensor for tensor in tensors}
        for name, tensor in known.items():
            if name.startswith(last):
                drafts[name.replace(last, "blk.5.")] = tensor
        embedding, norm = known["token_embd.weight"], known["output_norm.weight"]
        drafts["blk.5.nextn.eh_proj.weight"] = wide(embedding, norm.n_elements)
        drafts.update({f"blk.5.nextn.{name}.weight": norm for name in DRAFTS[1:]})
        return drafts

    def wide(embedding, hidden):
        rows = np.resize(embedding.data, (hidden, 2 * hidden))
        return embedding._replace(data=rows, n_bytes=rows.nbytes)

    keys = {f"{arch}_block_count": 6, f"{arch}.nextn_predict_layers": 1}
    path = written_again(plain, tmp_path / "drafting.gguf", more, **keys)
    without, ids, _ = said(worker(request_of(plain), llamacpp_interpreter))
    loaded, same, _ = said(worker(request_of(path), llamacpp_interpreter))
    assert same == ids
    assert "draft_bytes" not in without
    assert loaded["draft_bytes"] == sum(tensor.n_bytes for tensor in drafts.values())
    assert loaded["model_bytes"] - loaded["draft_bytes"] == without["model_bytes"]
    assert loaded["memory"]["kv"] == without["memory"]["kv"]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"tokenizer_ggml_pre": "martian"}, "unknown pre-tokenizer type: 'martian'"),
        ({"tokenizer_ggml_model": "martian"}, "unknown tokenizer: 'martian'"),
    ],
)
def test_a_vocabulary_that_the_build_does_not_read_costs_the_text_and_not_the_speed(
    harness, real, job, tmp_path, keys, why
):
    known = with_vocabulary(job, tmp_path / "vocab.gguf", vars_of("tiny-qwen2", vocab_size=2000), "f16")
    path = written_again(known, tmp_path / "odd.gguf", **keys)
    model = {"name": "m", "weights": str(path)}
    assert failures(harness("run", real({}, model=model, new_tokens=8), "--json").json) == []
    record = records_below(tmp_path / "results")[0]
    assert record["workload"]["prompt_source"] == "fixed ids (no tokenizer)"
    assert record["loaded"]["vocab_size"] == 2000
    told = f"llama.cpp does not read its vocabulary ({why}): it runs without, on fixed ids"
    assert record["loaded"]["warnings"] == [told]
