"""The real auto-gptq, autoawq and gptqmodel on a CPU: small packed checkpoints, each kernel as it runs. What
these, transformers and bitsandbytes load matches the files and the name, or is not measured."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import built, failed, records_below, settled, told
from stored_again import Tensors, stored_again
from test_hf import request_of, said
from test_stacks import written

from harness.analysis import agreement, verdicts
from harness.models import locate
from harness.theory.decoder import parameters
from harness.theory.hf_config import SHAPES
from runners.protocol import Done, Failed
from runners.weights.safetensors import ITEM_BYTES

SHAPE = SHAPES["tiny-qwen2"]
LINEARS = 7 * SHAPE.count

DOWN = "model.layers.1.mlp.down_proj"
# What computes on a CPU: stack, format and bits of the checkpoint, options, and the kernel by name.
ON_CPUS = [
    ("gptq", "gptq", 4, {"kernel": "torch"}, "QuantLinear[torch]"),
    ("gptq", "gptq", 8, {"kernel": "torch", "bits": 8}, "QuantLinear[torch]"),
    ("autoawq", "awq", 4, {"kernel": "torch"}, "WQLinear_GEMM[torch]"),
    ("gptqm", "gptq", 4, {"kernel": "torch"}, "TorchLinear"),
    ("gptqm", "gptq", 8, {"kernel": "torch", "bits": 8}, "TorchLinear"),
    ("gptqm", "awq", 4, {"kernel": "torch", "format": "awq"}, "AwqTorchLinear"),
    ("gptqm", "gptq", 4, {"kernel": "aten"}, "TorchAtenLinear"),
    ("gptqm", "awq", 4, {"kernel": "aten", "format": "awq"}, "TorchAtenAwqLinear"),
]


def logits(worker, request, interpreter, tmp_path: Path) -> np.ndarray:
    """After each of 40 given ids: 25 at once, as a prompt, and the rest one by one."""
    asked = {"ids": list(range(3, 43)), "prompt_tokens": 25, "windows": [[25, 40]], "seconds": None}
    request.workloads[:] = [asked]
    request.files["logits"] = str(tmp_path / "logits.npy")
    last = worker(request, interpreter)[-1]
    assert isinstance(last, Done), last
    return np.load(tmp_path / "logits.npy").astype(np.float64)


@pytest.mark.parametrize(("stack", "format", "bits", "options", "kernel"), ON_CPUS)
def test_each_kernel_decodes_and_is_named_and_its_bytes_are_those_of_the_headers(
    worker, packed, stack, format, bits, options, kernel
):
    path = packed("tiny-qwen2", format, bits)
    loaded, ids, end = said(worker(request_of(path, stack, **options), built(stack)))
    assert (len(ids), end["counters"]["evaluated_tokens"]) == (12, 25 + 11)
    assert (loaded["kernel_asked"], loaded["kernels"][kernel]) == (kernel, LINEARS)
    assert (loaded["leftovers"], loaded["quant"]) == ([], f"{format}-int{bits}")
    assert loaded["parameters"] == parameters(SHAPE)
    assert loaded["lm_head"]["dtype"] == "float16"
    stored = locate.local(path).sizes["bytes_by_type"]
    found = loaded["bytes_by_type"]
    assert all(found.get(kind) == stored.get(kind) for kind in ("qweight", "g_idx"))
    if options["kernel"] != "aten":  # which holds zeros and scales in another type
        assert (found["qzeros"], found["scales"]) == (stored["qzeros"], stored["scales"])
    # auto-gptq gives each layer a bias, zero where the checkpoint has none.
    biases = SHAPE.count * (2 * SHAPE.hidden_size + 2 * SHAPE.ffn) if stack == "gptq" else 0
    assert found["float16"] == stored["f16"] + 2 * biases
    assert bool(loaded["functional"]) == (options["kernel"] == "torch")


@pytest.fixture(scope="module")
def unpacked_logits(packed, tmp_path_factory):
    """Those of the unpacked checkpoint, by transformers in float32, once for each."""
    known = {}

    def of(worker, model: str, format: str, bits: int) -> np.ndarray:
        if (model, format, bits) not in known:
            path = packed(model, format, bits, unpack=True)
            request = request_of(path, "hf", "logits", dtype="fp32", attn="eager")
            folder = tmp_path_factory.mktemp("logits")
            known[model, format, bits] = logits(worker, request, built("hf"), folder)
        return known[model, format, bits]

    return of


@pytest.mark.parametrize(
    ("model", "stack", "format", "bits", "options"),
    [("tiny-qwen2", *row[:4]) for row in ON_CPUS]
    + [("tiny-llama", *row[:4]) for row in ON_CPUS if row[0] != "gptqm" and row[2] == 4],
)
def test_each_kernel_computes_what_the_checkpoint_unpacked_does(
    worker, packed, unpacked_logits, tmp_path, model, stack, format, bits, options
):
    path = packed(model, format, bits)
    ours = logits(worker, request_of(path, stack, "logits", **options), built(stack), tmp_path)
    theirs = unpacked_logits(worker, model, format, bits)
    error = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    # Arithmetic in 16 bits: fp16 0.002, aten's bf16 0.013. Weights of another model: 1.4.
    assert error.max() < (0.04 if options["kernel"] == "aten" else 0.008)


@pytest.mark.parametrize(
    ("stack", "format", "options", "asked", "ran"),
    [
        ("gptq", "gptq", {"kernel": "exllamav2"}, "QuantLinear[exllamav2]", "QuantLinear[torch]"),
        ("autoawq", "awq", {"kernel": "gemm"}, "WQLinear_GEMM[awq_ext]", "WQLinear_GEMM[torch]"),
    ],
)
def test_a_kernel_that_the_library_left_for_another_is_seen(
    worker, packed, stack, format, options, asked, ran
):
    loaded, _, end = said(worker(request_of(packed("tiny-qwen2", format), stack, **options), built(stack)))
    for facts in (loaded, end["facts_after"]):
        assert facts["kernel_asked"] == asked
        assert facts["kernels"][ran] == LINEARS
        assert asked not in facts["kernels"]


def test_layers_that_autoawq_did_not_fuse_are_seen(worker, packed, autoawq_interpreter):
    fused = {"kernel": "torch", "fuse_layers": True, "max_seq_len": 64}
    request = request_of(packed("tiny-qwen2", "awq"), "autoawq", **fused)
    loaded, _, _ = said(worker(request, autoawq_interpreter))
    assert (loaded["fused_layers"], loaded["options"]["fuse_layers"]) == (0, False)


@pytest.mark.parametrize(
    ("stack", "format", "options", "says"),
    [
        ("gptq", "gptq", {"kernel": "marlin"}, "CUDA"),
        ("autoawq", "awq", {"kernel": "exllamav2"}, 'assert self.qweight.device.type == "cuda"'),
        ("gptqm", "gptq", {"kernel": "marlin"}, "Marlin kernel requires CUDA"),
        ("gptqm", "gptq", {"kernel": "gemm"}, "gemm is not a kernel of gptq"),
    ],
)
def test_a_kernel_that_its_library_refuses_fails_in_its_words(worker, packed, stack, format, options, says):
    last = failed(worker(request_of(packed("tiny-qwen2", format), stack, **options), built(stack)))
    assert says in last.reason


def changed(whole: Path, target: Path, drop: str = "", **added: tuple[str, list[int]]) -> Path:
    """A copy of a checkpoint without the tensors whose name has `drop`, and with others, of zeros alone."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if drop and drop in name]:
            del tensors[name]
        for name, (dtype, dims) in added.items():
            tensors[name] = dtype, dims, bytes(ITEM_BYTES[dtype] * int(np.prod(dims)))

    return stored_again(whole, target, change)


@pytest.mark.parametrize(
    ("stack", "format", "drop", "added", "says"),
    [
        ("gptq", "gptq", "layers.1.mlp", {}, "has no model.layers.1.mlp.gate_proj.weight"),
        (
            "autoawq",
            "awq",
            DOWN,
            {f"{DOWN}.weight": ("F16", [256, 512])},
            f"has {DOWN}.weight unpacked besides",
        ),
        ("gptq", "gptq", "", {"lm_head.qweight": ("I32", [32, 512])}, "its lm_head is packed too"),
        ("gptqm", "gptq", "", {f"{DOWN}.scale": ("F32", [1])}, f"has {DOWN}.scale, which the model of its"),
    ],
)
def test_a_tensor_that_the_library_would_leave_as_it_came_is_an_error(
    worker, packed, tmp_path, stack, format, drop, added, says
):
    path = changed(packed("tiny-qwen2", format), tmp_path / "odd", drop, **added)
    assert says in failed(worker(request_of(path, stack, kernel="torch", format=format), built(stack))).reason


def test_biases_of_zero_that_auto_gptq_saves_are_none_of_the_models(
    worker, packed, gptq_interpreter, tmp_path
):
    zeros = {f"model.layers.{i}.self_attn.o_proj.bias": ("F16", [SHAPE.hidden_size]) for i in range(2)}
    path = changed(packed("tiny-qwen2", "gptq"), tmp_path / "saved", **zeros)
    (path / "quantize_config.json").unlink()  # then config.json tells
    loaded, ids, _ = said(worker(request_of(path, "gptq", kernel="torch"), gptq_interpreter))
    assert (loaded["parameters"], len(ids)) == (parameters(SHAPE), 12)
    assert locate.local(path).sizes["parameters"] == parameters(SHAPE)


def test_zero_points_that_auto_gptq_would_misread_are_refused(worker, packed, gptq_interpreter, tmp_path):
    path = changed(packed("tiny-qwen2", "gptq"), tmp_path / "v2")
    beside = path / "quantize_config.json"
    beside.write_text(json.dumps(json.loads(beside.read_text()) | {"checkpoint_format": "gptq_v2"}))
    assert "is gptq_v2" in failed(worker(request_of(path, "gptq", kernel="torch"), gptq_interpreter)).reason


@pytest.mark.parametrize("stack", ["gptq", "autoawq", "gptqm"])
def test_a_stack_says_of_each_kernel_why_it_does_not_run_here(harness, stack):
    built(stack)
    (line,) = harness("env", "check", stack, "--device", "cpu", "--json").json
    runs = {name for name, why in line["kernels"].items() if why is None}
    of_gptqm = {"gptq aten", "gptq torch", "awq aten", "awq torch"}
    assert runs == (of_gptqm if stack == "gptqm" else {"torch"})
    assert all(why for name, why in line["kernels"].items() if name not in runs)


def test_layers_that_call_another_kernel_than_the_rest_are_left_over(hf_interpreter):
    code = """
from types import SimpleNamespace
from torch import nn
from runners.hf.loading import kernel_facts

class Model(nn.Module):
    config = SimpleNamespace(tie_word_embeddings=False)
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.fast, self.slow, self.plain = (nn.Linear(4, 4) for _ in range(3))
        self.config.get_text_config = lambda **_: self.config
        self.get_input_embeddings = lambda: self.embed
        self.get_output_embeddings = lambda: self.head

model = Model()
kernels = {model.fast: "fast", model.slow: "slow"}
print(*kernel_facts(model, kernels.get, "fast")["leftovers"])
print(*kernel_facts(model, kernels.get, "none of these")["leftovers"])
"""
    assert told(hf_interpreter, code) == ["plain slow", ""]


def test_a_gpu_of_too_low_a_compute_capability_is_a_reason(gptqm_interpreter):
    code = """
import torch
torch.cuda.get_device_capability = lambda device: (7, 5)
from runners.hf.loading import lacks
print(lacks("json", torch.device("cuda", 0), (8, 0)))
print(lacks("json", torch.device("cuda", 0), (7, 5)))
"""
    assert told(gptqm_interpreter, code) == ["needs compute capability 8.0; this GPU has 7.5", "None"]


def test_one_campaign_has_each_kernel_as_it_ran_and_says_why_the_others_did_not(
    harness, tmp_path, hf_interpreter, gptq_interpreter, autoawq_interpreter, gptqm_interpreter
):
    variants = [
        {"stack": "gptq", "kernel": ["torch", "exllamav2"]},
        {"stack": "autoawq", "kernel": "torch"},
        {"stack": "autoawq", "name": "window", "kernel": "torch", "fuse_layers": True, "max_seq_len": 32},
        {"stack": "gptqm", "format": "awq", "kernel": ["aten", "marlin"]},
    ]
    path = written(tmp_path, [{"shape": "tiny-qwen2"}], variants, check_weights=True)
    ran = harness("run", path, "--json")
    rows = {f"{row['stack']} {row['variant']}": row for row in ran.json}
    expected = {
        "gptq torch-4": "functional",
        "gptq exllamav2-4": "invalid",
        "autoawq torch": "functional",
        "autoawq window": "refused",
        "gptqm awq-aten-4": "ok",
        "gptqm awq-marlin-4": "error",
    }
    assert {name: settled(row, expected[name]) for name, row in rows.items()} == expected
    whys = {name: " ".join(row["reasons"]) for name, row in rows.items()}
    assert "QuantLinear[exllamav2] was requested but" in whys["gptq exllamav2-4"]
    assert "max_seq_len 32 does not cover the 55 tokens" in whys["autoawq window"]
    assert "Marlin kernel requires CUDA" in whys["gptqm awq-marlin-4"]
    assert "QuantLinear[torch] ran" in whys["gptq exllamav2-4"]
    assert whys["gptq exllamav2-4"].endswith("known beforehand: needs a GPU (cuda)")
    assert whys["gptqm awq-marlin-4"].endswith("known beforehand: needs a GPU (cuda)")
    assert rows["gptq torch-4"]["nominal_bits"] == 4
    assert rows["gptq torch-4"]["bpw"] > 6
    page = (tmp_path / "reports" / "stacks.html").read_text()
    if "functional" in {row["status"] for row in rows.values()}:  # none is where the machine disturbed all
        assert "functional: every product unpacks the whole matrix first" in page
    checks = [each for each in records_below(tmp_path / "results") if each["kind"] == "checked"]
    checked = {f"{each['stack']} {each['variant']}": each for each in checks}
    fine = [name for name, status in expected.items() if status in verdicts.USABLE]
    assert {agreement.verdict(checked[name])[0] for name in fine} == {"agrees"}
    of_another_kernel = agreement.verdict(checked["gptq exllamav2-4"])
    assert of_another_kernel[0] == "unchecked"
    assert checked["autoawq torch"]["check"]["reference"]["unpacked"] is True
    assert max(d["relative_error"] for d in checked["autoawq torch"]["check"]["depths"]) < 0.01


# --- stored types against names


MATRIX = "model.layers.0.mlp.down_proj"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
TIED = {"tie_word_embeddings": True}
# By stack: the options of its types, each with other weights in memory.
STACKS = [("hf", {"dtype": "bf16"}), ("bnb", {"quant": "int8"}), ("bnb", {"quant": "nf4"})]


def coded(dtype: str, columns_in_a_byte: int = 1, *more: str):
    """Stores one matrix in bytes, and adds scales by these names."""

    def change(tensors: Tensors) -> None:
        rows, columns = tensors[f"{MATRIX}.weight"][1]
        shape = [rows, columns // columns_in_a_byte]
        tensors[f"{MATRIX}.weight"] = dtype, shape, bytes(shape[0] * shape[1])
        tensors.update({f"{MATRIX}.{name}": ("F32", [1], bytes(4)) for name in more})

    return change


def unchanged(tensors: Tensors) -> None:
    pass


def added(name: str):
    return lambda tensors: tensors.update({name: ("F32", [1], bytes(4))})


def with_head(of: str):
    """Adds an lm_head: the values of the embedding, or others."""

    def change(tensors: Tensors) -> None:
        dtype, shape, values = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = dtype, shape, values if of == "same" else bytes(len(values))

    return change


BLOCKS, SCALES = coded("F8_E4M3", 1, "weight_scale_inv"), coded("F8_E4M3", 1, "weight_scale", "input_scale")
NIBBLES = coded("U8", 2, "weight_scale", "weight_scale_2")
QUANTIZED = {
    "FP8 in blocks": (BLOCKS, FP8, "(fp8): {MATRIX}.weight is stored as F8_E4M3"),
    "ModelOpt's FP8": (SCALES, MODELOPT, "(modelopt FP8): {MATRIX}.weight is stored as F8_E4M3"),
    "ModelOpt's NVFP4": (NIBBLES, NVFP4, "(modelopt NVFP4): {MATRIX}.weight is stored as U8"),
    "FP8 that no config names": (
        coded("F8_E5M2"),
        None,
        "is quantized: {MATRIX}.weight is stored as F8_E5M2",
    ),
    "a method alone": (unchanged, {"quant_method": "hqq"}, "is quantized (hqq); "),
}


# hf dequantizes FP8 in blocks: see test_downloaded_formats_run.py.
REFUSED = [(kind, *STACKS[i]) for kind in QUANTIZED for i in (0, 2) if (kind, i) != ("FP8 in blocks", 0)]


@pytest.mark.parametrize(("kind", "stack", "options"), REFUSED)
def test_what_the_stack_does_not_hold_as_stored_is_refused(
    worker, checkpoint, tmp_path, stack, options, kind
):
    change, quantization, why = QUANTIZED[kind]
    path = stored_again(checkpoint("tiny-llama"), tmp_path / "m", change, quantization_config=quantization)
    last = failed(worker(request_of(path, stack, **options), built(stack)))
    assert (last.outcome, last.reason.startswith(f"{path}: is quantized")) == ("refused", True)
    assert why.format(MATRIX=MATRIX) in last.reason
    assert f"; {stack} loads only 16- and 32-bit checkpoints: name the one that" in last.reason


MISTAKEN = {
    "a tensor too many": (
        added(f"{MATRIX}.weight_scale"),
        {},
        f"has {MATRIX}.weight_scale, which the model of its config.json does not have: correct config.json",
    ),
    "a size": (unchanged, {"intermediate_size": 1024}, ".weight has another size than in its config.json"),
    "another lm_head than the tied one": (
        with_head("other"),
        TIED,
        "ties the lm_head to the embedding, but its lm_head.weight is another",
    ),
}


@pytest.mark.parametrize(("stack", "options"), STACKS)
@pytest.mark.parametrize("kind", MISTAKEN)
def test_a_checkpoint_that_is_not_the_model_of_its_config_is_an_error(
    worker, checkpoint, tmp_path, stack, options, kind
):
    change, config, why = MISTAKEN[kind]
    path = stored_again(checkpoint("tiny-llama"), tmp_path / "m", change, **config)
    last = failed(worker(request_of(path, stack, **options), built(stack)))
    assert (last.outcome, last.reason.startswith(f"{path}: ")) == ("error", True)
    assert why in last.reason


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (added("model.layers.0.self_attn.rotary_emb.inv_freq"), {}),  # transformers computes it
        (added("visual.patch_embed.proj.bias"), {}),  # of a tower that a text does not use
        (with_head("same"), TIED),
    ],
)
def test_tensors_without_an_effect_are_no_mistake(
    worker, checkpoint, hf_interpreter, tmp_path, change, config
):
    path = stored_again(checkpoint("tiny-llama"), tmp_path / "m", change, **config)
    loaded, ids, _ = said(worker(request_of(path), hf_interpreter))
    assert (len(ids), loaded["quant"], loaded["tied"]) == (12, "bf16", bool(config))


@pytest.fixture(scope="module")
def stored_nf4(checkpoint, bnb_interpreter, tmp_path_factory) -> Path:
    """A checkpoint as bitsandbytes saves it, with quantized scales."""
    target = tmp_path_factory.mktemp("nf4") / "m"
    code = f"""
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained(
    {str(checkpoint("tiny-qwen2"))!r}, quantization_config=how, dtype=torch.bfloat16, device_map={{"": "cpu"}}
)
model.save_pretrained({str(target)!r})
"""
    told(bnb_interpreter, code)
    return target


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"quant": "nf4", "double_quant": True}, None),
        ({"quant": "nf4"}, "nf4 was requested"),
        ({"quant": "fp4", "double_quant": True}, "fp4 with double_quant was requested"),
        ({"quant": "int8"}, "int8 was requested"),
    ],
)
def test_what_bitsandbytes_stored_is_measured_under_its_own_name_alone(
    worker, bnb_interpreter, stored_nf4, options, why
):
    events = worker(request_of(stored_nf4, "bnb", **options), bnb_interpreter)
    if why is None:
        loaded, ids, _ = said(events)
        assert (len(ids), loaded["quant"], loaded["leftovers"]) == (12, "nf4", [])
        return
    assert isinstance(events[-1], Failed)
    assert events[-1].outcome == "refused"
    assert events[-1].reason.startswith(f"{stored_nf4}: holds nf4 with double_quant, and {why}")


def test_what_bitsandbytes_stored_is_none_of_16_bits(worker, hf_interpreter, stored_nf4):
    last = failed(worker(request_of(stored_nf4), hf_interpreter))
    assert (last.outcome, "(bitsandbytes)" in last.reason) == ("refused", True)
