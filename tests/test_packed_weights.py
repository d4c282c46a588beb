"""GPTQ and AWQ checkpoints: their facts, refusals before loading, and those made here."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint import ENTRY, TINY, entries, write_config, write_safetensors
from test_weights import cell as cell_of
from test_weights import write_checkpoint, write_gguf

from harness import config
from harness.campaign.prepare import Preparation
from harness.campaign.repeat import NotReady
from harness.config import Model, Weights, plan
from harness.models import check, locate, make
from harness.models.config_json import PACKING_FILES, settings_in
from harness.models.locate import WeightsError
from harness.stacks.header import stacks
from harness.theory import decoder
from harness.theory.config_settings import ConfigJsonError
from harness.theory.decoder import dense_like
from harness.theory.hf_config import SHAPES
from harness.theory.known_models import Described
from harness.theory.packed_sizes import Packing, linears, packed_bytes
from harness.theory.packing_settings import packing_in, packing_of
from harness.theory.tensors import of_shape

CONFIGS = Path(__file__).parent.parent / "configs"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
LAYER = "model.layers.0.self_attn.q_proj"
SEED = 7  # of no other test's synthetic weights: the cache is shared


def cell(stack: str, path: Path | None = None, **options: Any) -> plan.Cell:
    """Like test_weights.cell, with another seed."""
    found = cell_of(stack, path, **options)
    if path is not None:
        return found
    return replace(found, model=found.model.model_copy(update={"weights": Weights(seed=SEED)}))


def packed_entries(shape: decoder.Decoder, packing: Packing) -> dict[str, ENTRY]:
    """A shape's tensors as the libraries store them, the rest in f16."""
    found: dict[str, ENTRY] = {}
    for name, (_, dims, _) in entries(shape).items():
        if not name.endswith("_proj.weight"):
            found[name] = ("F16", dims, 2)
            continue
        layer, (n_out, n_in) = name.removesuffix(".weight"), dims
        groups = 1 if packing.group_size == -1 else n_in // packing.group_size
        per = 32 // packing.bits
        rows, columns = (n_in // per, n_out) if packing.method == "gptq" else (n_in, n_out // per)
        found[f"{layer}.qweight"] = ("I32", [rows, columns], 4)
        found[f"{layer}.qzeros"] = ("I32", [groups, n_out // per], 4)
        found[f"{layer}.scales"] = ("F16", [groups, n_out], 2)
        if packing.method == "gptq":
            found[f"{layer}.g_idx"] = ("I32", [n_in], 4)
    return found


def write_packed(folder: Path, settings: dict[str, Any], beside: str = "", **changed: ENTRY | None) -> Path:
    """A checkpoint packed as `settings` say, in config.json or in a separate file; `changed`: tensors of
    LAYER that are others, or missing."""
    folder.mkdir(exist_ok=True)
    packing = packing_in(settings, method=PACKING_FILES.get(beside))
    stored = packed_entries(TINY, packing)
    for kind, entry in changed.items():
        stored.pop(f"{LAYER}.{kind}", None)
        if entry:
            stored[f"{LAYER}.{kind}"] = entry
    write_safetensors(folder / "model.safetensors", stored, {"format": "pt"})
    if beside:
        (folder / beside).write_text(json.dumps(settings))
        return write_config(folder)
    return write_config(folder, quantization_config=settings)


@pytest.fixture
def preparation() -> Preparation:
    return Preparation("cpu", None, 2, lambda line: None)


# --- what is asked ------------------------------------------------------------------------------------------


def test_ids_of_before_weights_had_formats_are_kept():
    first = plan.cells(config.load(CONFIGS / "cpu-qwen15-0.5b.yaml"))[0]
    assert first.id == "qwen1.5-0.5b.llamacpp.q8_0.decode.e53e9853"
    assert plan.content_key(first, {}, [], "f", "m", "d") == "c1281e4570382c8939b4"


def test_an_id_names_the_weights_of_its_own_format_alone():
    """Another path for one format does not measure the others again."""
    hub, here = Weights(kind="hub", repo="a/b", revision="main"), Weights(kind="path", path="/c")
    plain = Model(name="m", weights=hub)
    by_format = Model(name="m", weights=hub, of_format={"hf": hub, "awq": here})
    changed = Model(name="m", weights=hub, of_format={"hf": hub, "awq": hub})
    options, workload = {"kernel": "gemm"}, cell("hf").workload

    def id_of(stack: str, model: Model) -> str:
        variant = config.Variant(stack=stack, name="v", options=options if stack == "autoawq" else {})
        experiment = config.Experiment(name="e", models=(model,), variants=(variant,), workloads=(workload,))
        return plan.cells(experiment)[0].id

    assert id_of("hf", plain) == id_of("hf", by_format) == id_of("hf", changed)
    assert id_of("autoawq", plain) == id_of("autoawq", changed) != id_of("autoawq", by_format)


def test_a_cell_asks_for_the_format_and_the_bits_of_its_stack():
    assert cell("gptq", bits=8).packing == Packing("gptq", 8)
    assert cell("gptq").packing == Packing("gptq", 4)
    assert cell("autoawq").packing == Packing("awq", 4)
    assert (cell("bnb").packing, cell("llamacpp").packing, cell("fake").packing) == (None, None, None)
    formats = {stack: cell(stack).weights_format for stack in ("gptq", "autoawq", "hf", "llamacpp", "fake")}
    assert formats == {"gptq": "gptq", "autoawq": "awq", "hf": "hf", "llamacpp": "gguf", "fake": "none"}


def test_bits_and_quant_are_filled_into_the_source():
    model = Model(name="m", weights=Weights(kind="path", path="/m/{quant}/Int{bits}"))
    asked = replace(cell("gptq", bits=8), model=model)
    assert asked.source.path == "/m/{quant}/Int8"  # it has no quant
    asked = replace(cell("llamacpp", quant="q4_0"), model=model)
    assert asked.source.path == "/m/q4_0/Int{bits}"


# --- what is told -------------------------------------------------------------------------------------------


TOLD = {
    "of auto-gptq": (GPTQ | {"damp_percent": 0.01, "static_groups": False}, Packing("gptq", layout="gptq")),
    "act-order": (GPTQ | {"desc_act": True, "bits": 8}, Packing("gptq", 8, act_order=True, layout="gptq")),
    "of gptqmodel": (GPTQ | {"checkpoint_format": "gptq_v2"}, Packing("gptq", layout="gptq_v2")),
    "asymmetric": (GPTQ | {"sym": False, "group_size": -1}, Packing("gptq", 4, -1, False, layout="gptq")),
    "for Marlin": (GPTQ | {"is_marlin_format": True}, Packing("gptq", layout="marlin")),
    "of autoawq": (AWQ | {"version": "GEMM"}, Packing("awq", symmetric=False, layout="gemm")),
    "another layout": (AWQ | {"version": "fast"}, Packing("awq", symmetric=False, layout="fast")),
    "of bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_config_says_how_weights_are_packed(name):
    settings, packing = TOLD[name]
    assert packing_of({"quantization_config": settings}) == packing
    assert packing_of({"text_config": {"quantization_config": settings}}) == packing


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"bits": "four"}, "bits must be from 2 to 8, not 'four'"),
        ({"bits": True}, "bits must be from 2 to 8, not true"),
        ({"bits": 16}, "bits must be from 2 to 8, not 16"),
        ({"bits": None}, "bits is missing"),
        ({"group_size": 0}, "group_size must be a size, or -1 for a whole column, not 0"),
        ({"group_size": 1.5}, "group_size must be a size, or -1 for a whole column, not 1.5"),
        ({"desc_act": "no"}, "desc_act must be true or false, not 'no'"),
        ({"sym": 1}, "sym must be true or false, not 1"),
        ({"checkpoint_format": ["gptq"]}, "checkpoint_format must be a name, not a list"),
    ],
)
def test_settings_that_make_no_sense_are_a_sentence(changed, sentence):
    with pytest.raises(ConfigJsonError) as wrong:
        packing_of({"quantization_config": GPTQ | changed})
    assert str(wrong.value) == f"quantization_config.{sentence}"


@pytest.mark.parametrize("settings", [GPTQ, GPTQ | {"bits": 8}, AWQ, GPTQ | {"group_size": -1}])
def test_bytes_of_a_packed_checkpoint_are_told_by_what_they_hold(tmp_path, settings):
    ready = locate.local(write_packed(tmp_path, settings))
    packing = packing_of({"quantization_config": settings})
    assert (ready.packing, ready.quant, ready.shards) == (packing, packing.words, 1)
    expected = packed_bytes(of_shape(TINY), packing)
    assert ready.sizes["bytes_by_type"] == expected
    assert ready.sizes["model_bytes"] == sum(expected.values())
    assert ready.sizes["parameters"] == decoder.parameters(TINY)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_settings_may_stand_in_a_file_of_their_own(tmp_path, name, settings):
    folder = write_packed(tmp_path, settings, beside=name)
    ready = locate.local(folder)
    stack = "gptq" if name.startswith("quantize") else "autoawq"
    asked = cell(stack).packing
    assert (ready.packing.method, ready.quant) == (asked.method, f"{asked.method}-int4")
    check.check_packing(ready, settings_in(folder / "config.json"), asked, stacks()[stack])
    (folder / name).write_text(json.dumps(settings | {"damp_percent": 0.1}))
    assert locate.local(folder).fingerprint != ready.fingerprint  # libraries load by it
    (folder / name).write_text("{")
    with pytest.raises(WeightsError, match=f"{name}: is not JSON"):
        locate.local(folder)


def test_shards_are_counted(tmp_path):
    stored = list(packed_entries(TINY, Packing("awq")).items())
    write_config(tmp_path, quantization_config=AWQ)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, name in enumerate(names):
        write_safetensors(tmp_path / name, dict(stored[i::2]), {"format": "pt"})
    weight_map = {tensor: names[i % 2] for i, (tensor, _) in enumerate(stored)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert locate.local(tmp_path).shards == 2


# --- what is refused ----------------------------------------------------------------------------------------


def _packed(settings: dict[str, Any], **changed: ENTRY | None) -> Callable[[Path], Path]:
    return lambda folder: write_packed(folder, settings, **changed)


def _beside(**changed: Any) -> Callable[[Path], Path]:
    """With a quantize_config.json that has other settings than the config.json."""

    def make(folder: Path) -> Path:
        (folder / "quantize_config.json").write_text(json.dumps(GPTQ | changed))
        return write_packed(folder, GPTQ)

    return make


def _saying(settings: dict[str, Any], **changed: Any) -> Callable[[Path], Path]:
    """Packed by these settings, and a config.json that says otherwise."""

    def make(folder: Path) -> Path:
        write_packed(folder, settings)
        return write_config(folder, quantization_config=settings | changed)

    return make


def _whole(**settings: Any) -> Callable[[Path], Path]:
    """In 16 bits, with these settings if any."""
    changed = {"quantization_config": settings} if settings else {}
    return lambda folder: write_checkpoint(folder, **changed)


def _unsaid(folder: Path) -> Path:
    write_packed(folder, GPTQ)
    return write_config(folder)


def _gguf(folder: Path) -> Path:
    return write_gguf(folder / "m.gguf")


CALIBRATION = "needs calibration data, which the harness lacks: name a quantized checkpoint"
OF_128 = f"but {LAYER}.scales has groups of 128"
ZEROS, MARLIN = ("I32", [2, 16], 4), "is GPTQ in the layout marlin; stack gptq loads only gptq"
# By stack, and the bits asked for: what is given to it, and the sentence about it.
GIVEN: dict[str, list[tuple[Callable[[Path], Path], str]]] = {
    "gptq": [
        (_packed(AWQ), "stack gptq needs GPTQ weights, but PATH is AWQ (4 bits)"),
        (write_checkpoint, f"PATH: is bf16; quantizing to GPTQ {CALIBRATION}"),
        (_gguf, "stack gptq needs a Hugging Face checkpoint, but PATH is a GGUF"),
        (_unsaid, "stack gptq needs GPTQ weights, but PATH is i32, and no quantization_config says how"),
        (_packed(GPTQ | {"bits": 8}), "PATH: has 8 bits, and 4 were requested of gptq"),
        *(
            (_packed(GPTQ, **{kind: None}), f"PATH: {LAYER} lacks its {kind}")
            for kind in ("qweight", "qzeros", "scales", "g_idx")
        ),
        (_saying(GPTQ, group_size=64), f"PATH: its config.json has group_size 64, {OF_128}"),
        (_saying(GPTQ, group_size=-1), f"PATH: its config.json has group_size -1, {OF_128}"),
        (
            _packed(GPTQ, qzeros=ZEROS),
            f"PATH: its config.json has gptq-int4: {LAYER}.qzeros should be 2 x 32, but is 2 x 16",
        ),
        (
            _packed(GPTQ, scales=("F16", [], 2)),
            f"PATH: its config.json has gptq-int4, but {LAYER}.scales is a number",
        ),
        (_whole(**GPTQ), "PATH: its config.json has gptq-int4, but no tensor is packed"),
        (_saying(GPTQ, checkpoint_format="marlin"), f"PATH: {MARLIN}"),
        (_beside(is_marlin_format=True), f"PATH: {MARLIN}"),
        (_beside(group_size=64), "PATH: config.json has group_size 128, but quantize_config.json has 64"),
    ],
    "gptq 8": [
        (_packed(GPTQ), "PATH: has 4 bits, and 8 were requested of gptq"),
        (_saying(GPTQ, bits=8), f"PATH: its config.json has 8 bits, but {LAYER}.qweight holds 4"),
    ],
    "autoawq": [
        (_packed(GPTQ), "stack autoawq needs AWQ weights, but PATH is GPTQ (4 bits)"),
        (write_checkpoint, f"PATH: is bf16; quantizing to AWQ {CALIBRATION}"),
        (_whole(quant_method="fp8"), "stack autoawq needs AWQ weights, but PATH is fp8"),
        (_packed(AWQ, scales=None), f"PATH: {LAYER} lacks its scales"),
        (_saying(AWQ, group_size=32), f"PATH: its config.json has group_size 32, {OF_128}"),
        (_saying(AWQ, version="gemv"), "PATH: is AWQ in the layout gemv; stack autoawq loads only gemm"),
    ],
}
REFUSED = ("PATH is fp8", "PATH is i32, and no quantization_config says how")


@pytest.mark.parametrize(
    ("asked", "make", "sentence"), [(asked, *each) for asked, rows in GIVEN.items() for each in rows]
)
def test_weights_that_a_stack_cannot_take_are_refused_in_a_sentence(
    tmp_path, preparation, asked, make, sentence
):
    stack, _, bits = asked.partition(" ")
    path = make(tmp_path)
    given = cell(stack, path, **({"bits": int(bits)} if bits else {}))
    with pytest.raises(NotReady) as refused:
        preparation.weights(given)
    outcome = "refused" if sentence.endswith(REFUSED) else "error"
    assert (refused.value.outcome, str(refused.value)) == (outcome, sentence.replace("PATH", str(path)))
    assert preparation.fingerprint(given) is None


@pytest.mark.parametrize(
    ("stack", "settings", "options"),
    [
        ("gptq", GPTQ, {}),
        ("gptq", GPTQ | {"bits": 8}, {"bits": 8}),
        ("gptq", GPTQ | {"desc_act": True, "sym": False}, {}),
        ("gptq", GPTQ | {"group_size": 64}, {}),
        ("gptq", GPTQ | {"group_size": -1}, {}),
        ("autoawq", AWQ, {}),
    ],
)
def test_weights_that_are_as_they_say_are_taken_as_they_are(tmp_path, preparation, stack, settings, options):
    folder = write_packed(tmp_path, settings)
    ready = preparation.weights(cell(stack, folder, **options))
    assert (ready.path, ready.format) == (folder, "hf")
    assert preparation.fingerprint(cell(stack, folder, **options)) == f"{ready.fingerprint}-None"


def test_a_quantized_checkpoint_is_not_converted_to_gguf(tmp_path, preparation):
    with pytest.raises(NotReady, match="is awq-int4; only 16- and 32-bit weights are converted to GGUF"):
        preparation.weights(cell("llamacpp", write_packed(tmp_path, AWQ)))


def test_a_format_that_is_not_named_fails_its_cells_and_the_campaign_goes_on(
    tmp_path, harness, real_config, hf_interpreter
):
    write_packed(tmp_path / "m", GPTQ)
    model = {"name": "m", "weights": {"gptq": "m"}}
    path = real_config({"stack": "hf"}, {"stack": "fake", "name": "f"}, model=model, new_tokens=8)
    failed, fine = harness("run", path, "--json").json
    assert (failed["stack"], failed["status"]) == ("hf", "error")
    assert failed["reasons"] == ["model m has no hf weights: name them in the config, as weights.hf"]
    assert (fine["stack"], fine["status"]) == ("fake", "ok")


# --- what is made -------------------------------------------------------------------------------------------


def test_synthetic_weights_are_packed_once_for_all_stacks_and_unpacked_for_a_reference(hf_interpreter, cache):
    said: list[str] = []
    preparation = Preparation("cpu", None, 2, said.append)
    shape = SHAPES["tiny-qwen2"]
    for asked, stack in ((Packing("gptq"), "gptq"), (Packing("awq"), "autoawq")):
        made = preparation.packed(cell("hf"), asked)
        assert (made.quant, made.synthetic, made.packing.group_size) == (asked.words, True, 128)
        assert made.sizes["bytes_by_type"] == packed_bytes(of_shape(shape), made.packing)
        assert f"pack tiny-qwen2 {asked.words}: flushing to disk" in said
        said.clear()
        assert preparation.weights(cell(stack)) == made  # no environment of that stack is there, nor needed
        parent = made.path.parent.name
        assert preparation.fingerprint(cell(stack)) == f"{_name()}-{parent}-{asked.words}"
        assert not said
    reference = preparation._producer.unpacked(cell("hf"), made)
    assert (reference.quant, reference.packing, reference.format) == ("f16", None, "hf")
    assert reference.sizes["bytes_by_type"] == {"f16": 2 * decoder.parameters(shape)}
    assert preparation.unpacked(cell(stack)) == reference
    assert said.count("unpack tiny-qwen2 f16: import") == 1


def _name() -> str:
    return make.synthetic_name(Described(SHAPES["tiny-qwen2"]), SEED)


def test_a_synthetic_checkpoint_at_a_path_is_packed_too(tmp_path, hf_interpreter, preparation):
    """Its stack would do it by itself; another's environment is at hand here."""
    folder = preparation.checkpoint(cell("hf")).path
    given = locate.local(folder)
    check.check_packing(given, settings_in(folder / "config.json"), Packing("gptq"), stacks()["gptq"])
    made = preparation._producer.packed(cell("hf", folder), Packing("gptq"), given)
    asked = cell("gptq", folder)
    assert preparation.weights(asked) == made
    assert preparation.fingerprint(asked) == f"{given.fingerprint}-{made.path.parent.name}-gptq-int4"
    assert locate.read(made.path).decoder == SHAPES["tiny-qwen2"]


@pytest.mark.parametrize(("hidden", "ffn", "group_size"), [(256, 512, 128), (320, 512, 64), (256, 480, 32)])
def test_groups_are_as_large_as_divides_every_input(hidden, ffn, group_size):
    shape = dense_like(SHAPES["tiny-qwen2"], hidden_size=hidden, intermediate_size=ffn)
    assert make.grouped_layers(Packing("gptq"), shape).group_size == group_size
    assert {tensor.dims[1] for tensor in linears(shape)} == {256, hidden, ffn}


def test_inputs_that_no_group_divides_are_a_sentence():
    shape = dense_like(SHAPES["tiny-qwen2"], intermediate_size=500)
    with pytest.raises(WeightsError) as odd:
        make.grouped_layers(Packing("awq"), shape)
    assert str(odd.value) == "cannot be packed: 500 inputs of a matrix are not a multiple of 32"


def test_synth_packs_and_says_the_exact_sizes(harness, hf_interpreter):
    asked = ("env", "synth", "tiny-llama", "--format", "gptq", "--bits", "8")
    (row,) = harness(*asked, "--json").json
    expected = packed_bytes(of_shape(TINY), Packing("gptq", 8))
    assert (row["format"], row["quant"], row["bytes_by_type"]) == ("hf", "gptq-int8", expected)
    assert row["bpw"] == 8 * sum(expected.values()) / decoder.parameters(TINY)
    stored = locate.read(Path(row["path"]))
    assert sum(tensor.bytes for tensor in stored.tensors) == row["model_bytes"]
    assert harness(*asked).out.strip() == row["path"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--format gptq --quant q4_0", "--quant needs --format gguf; a checkpoint is packed in 4 bits"),
        ("--format awq --bits 8", "--bits needs --format gptq; AWQ always has 4"),
        ("--bits 4", "--bits needs --format gptq"),
    ],
)
def test_what_synth_cannot_make_is_a_sentence(harness, options, sentence):
    ran = harness("env", "synth", "tiny-llama", *options.split())
    assert (ran.code, ran.out, ran.err) == (2, "", f"harness: {sentence}\n")


@pytest.mark.parametrize(
    ("size", "method", "gigabytes"),
    [
        # memory_transformers_4090.csv of the published study. Left out: its 0.5B GPTQ file has one of the two
        # tied matrices, its 14B and 32B ones are 1 to 2% larger, and its 32B AWQ file is 9% larger.
        *((size, "gptq", gb) for size, gb in (("1.8b", 1.88), ("4b", 3.21), ("7b", 5.86), ("72b", 41.28))),
        *((size, "awq", gb) for size, gb in (("0.5b", 0.783), ("1.8b", 1.88), ("4b", 3.20), ("7b", 5.86))),
        *((size, "awq", gb) for size, gb in (("14b", 9.67), ("72b", 41.27), ("110b", 61.49))),
        ("110b", "gptq", 61.49),
    ],
)
def test_the_bytes_of_a_shape_packed_are_those_of_the_published_files(size, method, gigabytes):
    stored = sum(packed_bytes(of_shape(SHAPES[f"qwen1.5-{size}"]), Packing(method)).values())
    assert stored / 1e9 == pytest.approx(gigabytes, rel=0.003)


@pytest.mark.parametrize(
    ("settings", "stack", "others"),
    [(GPTQ, "hf", "gptq, gptqm, vllm"), (AWQ, "bnb", "autoawq, gptqm, vllm")],
)
def test_packed_weights_given_to_a_stack_of_others_name_the_stacks_that_load_them(
    preparation, tmp_path, settings, stack, others
):
    folder = write_packed(tmp_path, settings)
    with pytest.raises(NotReady, match=f"stacks {others} load that, {stack} does not"):
        preparation.weights(cell(stack, folder))
