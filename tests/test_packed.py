"""GPTQ and AWQ checkpoints hold, field by field, the nearest values to the weights, and come back so;
those of any maker are unpacked to what their fields say, or refused in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_checkpoints import config_of, configure, made, read, store

from harness.theory.decoder import dense, parameters
from runners.protocol import Request
from runners.weights.packed import pack, unpack

SMALL = dense("qwen2", 64, 64, 1, 96, 2, 1, 32, qkv_bias=True)
GROUP = 32
LINEARS = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
Q = "model.layers.0.self_attn.q_proj"
FORMATS = [("gptq", 4), ("gptq", 8), ("awq", 4)]


def run(job: Callable[..., dict[str, Any]], source: Path, target: Path, *more: int, **options: Any) -> Path:
    files = {"source": str(source), "target": str(target)}
    job(Request(job.__name__, "any", "cpu", {"name": "m"}, options, [], files), lambda phase: None, *more)
    return target


def packed(source: Path, form: str, bits: int, *more: int, **options: Any) -> Path:
    target = source.with_name(f"{form}{bits}")
    return run(pack, source, target, *more, **{"format": form, "bits": bits, "group_size": GROUP, **options})


def unpacked(source: Path, *more: int) -> dict[str, np.ndarray]:
    return read(run(unpack, source, source.with_name(f"{source.name}-unpacked"), *more))


def store_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def field(words: np.ndarray, bits: int, row: int, column: int, along: str) -> int:
    """One field, by the layouts' descriptions: of `along` rows, columns, or columns in AWQ's order."""
    per_word = 32 // bits
    if along == "rows":
        word, k = int(words[row // per_word, column]), row % per_word
    else:
        word, k = int(words[row, column // per_word]), column % per_word
    if along == "awq":
        k = [0, 4, 1, 5, 2, 6, 3, 7][k]  # even columns are in the low 16 bits, odd ones in the high
    return (word % 2**32) // 2 ** (bits * k) % 2**bits


def element(tensors: dict[str, np.ndarray], name: str, form: str, bits: int, o: int, i: int) -> float:
    """weight[o, i] of symmetric packing, decoded alone."""
    scales = tensors[f"{name}.scales"]
    if form == "gptq":
        group = int(tensors[f"{name}.g_idx"][i])
        q = field(tensors[f"{name}.qweight"], bits, i, o, "rows")
        zero = field(tensors[f"{name}.qzeros"], bits, group, o, "columns") + 1
    else:
        group = i // GROUP
        q = field(tensors[f"{name}.qweight"], bits, i, o, "awq")
        zero = field(tensors[f"{name}.qzeros"], bits, group, o, "awq")
    return (q - zero) * float(scales[group, o])


def nearest(weight: np.ndarray, bits: int, group_size: int = GROUP) -> np.ndarray:
    """A weight rounded to the nearest of 2**bits values symmetric to zero, as float16."""
    n_out, n_in = weight.shape
    groups = weight.reshape(n_out, n_in // group_size, group_size).astype(np.float64)
    largest = abs(groups).max(axis=2, keepdims=True)
    scale = np.maximum(2 * largest / (2**bits - 1), 2.0**-14).astype(np.float16).astype(np.float64)
    half = 2 ** (bits - 1)
    found = np.clip(np.round(groups / scale), -half, half - 1) * scale
    return found.reshape(n_out, n_in).astype(np.float16)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of one narrow layer: its folder may be changed."""
    return made(tmp_path / "source", SMALL)


@pytest.mark.parametrize(("form", "bits"), FORMATS)
def test_every_field_decodes_to_the_nearest_of_the_weight(source, form, bits):
    weights, tensors = read(source), read(packed(source, form, bits))
    for linear in LINEARS:
        name = f"model.layers.0.{linear}"
        expected = nearest(weights[f"{name}.weight"], bits)
        n_out, n_in = expected.shape
        decoded = [[element(tensors, name, form, bits, o, i) for i in range(n_in)] for o in range(n_out)]
        assert np.array_equal(np.array(decoded).astype(np.float16), expected), name


@pytest.mark.parametrize(("form", "bits"), FORMATS)
def test_tensors_have_the_types_shapes_and_zeros_of_the_format(source, form, bits):
    weights, tensors = read(source), read(packed(source, form, bits))
    per_word = 32 // bits
    for linear, (n_out, n_in) in {"self_attn.k_proj": (32, 64), "mlp.down_proj": (64, 96)}.items():
        parts = {name.rsplit(".", 1)[1]: values for name, values in tensors.items() if linear in name}
        qweight = (n_in // per_word, n_out) if form == "gptq" else (n_in, n_out // per_word)
        assert parts["qweight"].shape == qweight
        assert parts["qweight"].dtype == parts["qzeros"].dtype == np.int32
        assert parts["qzeros"].shape == (n_in // GROUP, n_out // per_word)
        zeros = {"gptq4": 0x77777777, "gptq8": 0x7F7F7F7F, "awq4": 0x88888888}[f"{form}{bits}"]
        assert set(parts["qzeros"].view(np.uint32).ravel().tolist()) == {zeros}
        assert (parts["scales"].shape, parts["scales"].dtype) == ((n_in // GROUP, n_out), np.float16)
        if form == "gptq":
            assert parts["g_idx"].dtype == np.int32
            assert parts["g_idx"].tolist() == [i // GROUP for i in range(n_in)]
        bias = {"bias"} if linear == "self_attn.k_proj" else set()
        order = {"g_idx"} if form == "gptq" else set()
        assert parts.keys() == {"qweight", "qzeros", "scales"} | bias | order
    for name in weights.keys() & tensors.keys():
        assert tensors[name].dtype == np.float16
        assert np.array_equal(tensors[name], weights[name]), name
    assert weights.keys() - tensors.keys() == {f"model.layers.0.{linear}.weight" for linear in LINEARS}


@pytest.mark.parametrize(("form", "bits"), FORMATS)
def test_what_is_packed_in_several_pieces_unpacks_to_the_nearest_of_what_it_was(tmp_path, form, bits):
    source = made(tmp_path / "source", dense("llama", 1000, 1280, 1, 2304, 20, 10, 64))
    folder = packed(source, form, bits, group_size=128, threads=2)
    weights, back = read(source), unpacked(folder)
    assert back.keys() == weights.keys()
    for name, weight in weights.items():
        assert back[name].dtype == np.float16
        expected = nearest(weight, bits, 128) if "_proj" in name else weight
        assert np.array_equal(back[name], expected), name
    assert config_of(tmp_path / f"{form}{bits}-unpacked") == config_of(source) | {"torch_dtype": "float16"}


def test_the_bytes_do_not_depend_on_the_threads(tmp_path, source):
    for threads in (1, 3):
        run(pack, source, tmp_path / str(threads), format="awq", bits=4, group_size=GROUP, threads=threads)
    one, three = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "13")
    assert one == three


def test_the_config_is_the_sources_and_says_how_it_is_packed(source):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text(f'{{"of": "{name}"}}')
    config = config_of(source)
    config.pop("torch_dtype")
    store_config(source, config | {"dtype": "bfloat16"})
    assert config["harness_synthetic"] is True
    common = {"bits": 4, "group_size": GROUP}
    gptq = common | {"desc_act": False, "sym": True, "static_groups": False, "true_sequential": True}
    awq = common | {"zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    for form, said in {
        "gptq": {"quant_method": "gptq", "checkpoint_format": "gptq", **gptq},
        "awq": {"quant_method": "awq", **awq},
    }.items():
        folder = packed(source, form, 4)
        assert config_of(folder) == config | {"torch_dtype": "float16", "quantization_config": said}
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert not (folder / "quantize_config.json").exists()
    beside = {"damp_percent": 0.01, "model_name_or_path": None, "model_file_base_name": "model"}
    assert json.loads((source.parent / "gptq4" / "quantize_config.json").read_text()) == gptq | beside


@pytest.mark.parametrize(("form", "bits"), FORMATS)
def test_groups_of_zeros_and_of_the_smallest_values_have_a_normal_scale_and_come_back(source, form, bits):
    weights = {name: values.astype(np.float16) for name, values in read(source).items()}
    q_proj = weights[f"{Q}.weight"].copy()
    q_proj[0, :GROUP] = 0.0
    q_proj[1, :GROUP] = 2.0**-24
    weights[f"{Q}.weight"] = q_proj
    store(source, weights)
    folder = packed(source, form, bits)
    assert read(folder)[f"{Q}.scales"].min() == np.float16(2.0**-14)
    back = unpacked(folder)[f"{Q}.weight"]
    assert not back[:2, :GROUP].any()
    assert np.array_equal(back, nearest(q_proj, bits))


def test_a_sharded_checkpoint_is_packed_and_unpacked_as_one_file_is(tmp_path, source):
    whole = packed(source, "gptq", 4)
    sharded = run(pack, source, tmp_path / "sharded", 10_000, format="gptq", bits=4, group_size=GROUP)
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) > 2
    one, many = read(whole), read(sharded)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == one.keys() == many.keys()
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in one.values())
    assert all(np.array_equal(one[name], many[name]) for name in one)
    back, again = unpacked(whole), unpacked(sharded, 10_000)
    assert len(list(tmp_path.glob("sharded-unpacked/*.safetensors"))) > 2
    assert all(np.array_equal(back[name], again[name]) for name in back.keys() | again.keys())


def test_pack_and_unpack_tell_what_they_made(tmp_path, source):
    said: list[str] = []
    files = {"source": str(source), "target": str(tmp_path / "packed")}
    options = {"format": "awq", "bits": 4, "group_size": GROUP}
    told = pack(Request("pack", "any", "cpu", {"name": "m"}, options, [], files), said.append)
    assert said[-1] == "flushing to disk"
    assert told["bytes"] == sum(path.stat().st_size for path in (tmp_path / "packed").iterdir())
    assert told["tensors"] == len(read(tmp_path / "packed"))
    assert told["parameters"] == parameters(SMALL)
    files = {"source": str(tmp_path / "packed"), "target": str(tmp_path / "back")}
    told = unpack(Request("unpack", "any", "cpu", {"name": "m"}, {}, [], files), said.append)
    assert (told["tensors"], told["parameters"]) == (len(read(source)), parameters(SMALL))


def without(name: str) -> Callable[[dict[str, np.ndarray], dict[str, Any]], None]:
    return lambda tensors, config: tensors.__delitem__(name)


def holding(name: str, value: Any, dtype: type = np.float32) -> Callable[..., None]:
    """Has the first element of a tensor be `value`."""

    def change(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        tensors[name] = tensors[name].astype(dtype)
        tensors[name].flat[0] = value

    return change


def becoming(name: str, values: np.ndarray) -> Callable[..., None]:
    return lambda tensors, config: tensors.update({name: values})


def being(*dims: int, kind: type = np.float16) -> Callable[..., None]:
    """Has one matrix be of another size or type."""
    return becoming(f"{Q}.weight", np.ones(dims, kind))


def configured(**changes: Any) -> Callable[..., None]:
    return lambda tensors, config: config.update(changes)


BEYOND = "which rounded to 4 bits is beyond"


def nothing(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (nothing, {"bits": 3}, "cannot pack 3 bits as 'gptq'; known: gptq of 4 or 8 bits, awq of 4"),
        (nothing, {"form": "awq", "bits": 8}, "cannot pack 8 bits as 'awq'; known: gptq of 4 or 8"),
        (nothing, {"group_size": -1}, "cannot pack with group_size -1; expected a positive number"),
        (nothing, {"group_size": 40}, f"{Q}.weight has 64 input rows, which group_size 40 does not divide"),
        (being(12, 64), {}, f"{Q}.weight has 12 output columns; gptq of 4 bits packs 8 in a word"),
        (being(8, 12), {"group_size": 4}, f"{Q}.weight has 12 input rows; gptq of 4 bits packs 8 in a word"),
        (being(64), {}, f"{Q}.weight has the shape (64,); expected a matrix"),
        (without(f"{Q}.weight"), {}, f"source: lacks {Q}.weight"),
        (without("lm_head.weight"), {}, "source: lacks lm_head.weight"),
        (configured(num_hidden_layers=2), {}, "source: lacks model.layers.1.self_attn.q_proj.weight"),
        (configured(num_hidden_layers=None), {}, "json: has num_hidden_layers None; expected a number"),
        (configured(quantization_config={"quant_method": "awq"}), {}, "source: its weights are quantized;"),
        (becoming(f"{Q}.qweight", np.ones(1, np.int32)), {}, "source: its weights are quantized;"),
        (being(64, 64, kind=np.int64), {}, f"{Q}.weight is of type I64; expected BF16 or F16 or F32"),
        (holding(f"{Q}.weight", 65000), {}, f"{Q}.weight holds 65000, {BEYOND} float16"),
        (holding(f"{Q}.weight", -np.inf), {}, f"{Q}.weight holds inf, {BEYOND}"),
        (holding(f"{Q}.weight", np.nan), {}, f"{Q}.weight holds nan, {BEYOND}"),
        (
            holding("model.norm.weight", 70_000),
            {},
            "model.norm.weight holds 70000; expected finite values in",
        ),
    ],
)
def test_what_cannot_be_packed_is_said_in_a_sentence(source, change, options, said):
    tensors = {name: values.astype(np.float32) for name, values in read(source).items()}
    config = config_of(source)
    change(tensors, config)
    store_config(store(source, tensors), config)
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        packed(source, **{"form": "gptq", "bits": 4, **options})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_there_is_not_written_over(source):
    packed(source, "awq", 4)
    with pytest.raises(FileExistsError):
        packed(source, "awq", 4)


def in_words(fields: np.ndarray, bits: int, along: str) -> np.ndarray:
    """The inverse of field(), as slow."""
    n, m, per_word = *fields.shape, 32 // bits
    words = np.zeros((n // per_word, m) if along == "rows" else (n, m // per_word), np.uint32)
    for row in range(n):
        for column in range(m):
            k = row % per_word if along == "rows" else column % per_word
            if along == "awq":
                k = [0, 4, 1, 5, 2, 6, 3, 7][k]
            at = (row // per_word, column) if along == "rows" else (row, column // per_word)
            words[at] |= np.uint32(int(fields[row, column]) << bits * k)
    return words.view(np.int32)


@pytest.mark.parametrize(
    ("form", "version", "bits"),
    [*((f"gptq{v}", f"gptq{v}", bits) for v in ("", "_v2") for bits in (2, 4, 8)), ("awq", "GEMM", 4)],
)
def test_groups_in_any_order_and_zeros_of_any_height_are_unpacked(tmp_path, form, version, bits):
    random = np.random.default_rng(bits)
    n_out, n_in, size = 32, 64, 16
    fields = random.integers(0, 2**bits, (n_in, n_out))
    zeros = random.integers(0, 2**bits, (n_in // size, n_out))
    zeros[0, 0] = 0  # which version gptq stores as -1
    scales = random.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    group = np.arange(n_in, dtype=np.int32) // size
    said: dict[str, Any] = {"quant_method": form.removesuffix("_v2"), "bits": bits, "group_size": size}
    if form == "awq":
        packed_as = {"qweight": in_words(fields, bits, "awq"), "qzeros": in_words(zeros, bits, "awq")}
        said["version"] = version
    else:
        group = random.permutation(group)
        stored = (zeros - (version == "gptq")) % 2**bits
        packed_as = {"qweight": in_words(fields, bits, "rows"), "qzeros": in_words(stored, bits, "columns")}
        packed_as["g_idx"] = group
        said |= {"desc_act": True, "checkpoint_format": version}
    tensors = {f"lm_head.{name}": values for name, values in (packed_as | {"scales": scales}).items()}
    tensors["model.norm.weight"] = np.ones(n_in, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    back = unpacked(configure(store(tmp_path / "source", tensors), quantization_config=said))
    assert back.keys() == {"lm_head.weight", "model.norm.weight"}
    exact = (fields - zeros[group]) * scales[group].astype(np.float64)
    assert np.array_equal(back["lm_head.weight"], exact.T.astype(np.float16))


def test_one_group_a_column_and_a_config_in_auto_gptqs_own_file_are_read(tmp_path):
    random = np.random.default_rng(2)
    n_out, n_in = 8, 24
    fields = random.integers(0, 16, (n_in, n_out))
    scales = random.uniform(0.01, 0.1, (1, n_out)).astype(np.float16)
    tensors = {
        f"{Q}.qweight": in_words(fields, 4, "rows"),
        f"{Q}.qzeros": np.full((1, 1), 0x77777777, np.int32),
        f"{Q}.scales": scales,
        f"{Q}.g_idx": np.zeros(n_in, np.int32),
    }
    source = configure(store(tmp_path / "source", tensors), model_type="llama")
    (source / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": -1}))
    back = unpacked(source)[f"{Q}.weight"]
    assert np.array_equal(back, ((fields - 8) * scales.astype(np.float64)).T.astype(np.float16))


MARLIN = "is gptq of format 'marlin'; expected gptq or gptq_v2"
ZEROS = f"{Q}.qzeros is 2 x 8; by qweight, in"


def quantized(**changes: Any) -> Callable[..., None]:
    return lambda tensors, config: config["quantization_config"].update(changes)


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("gptq", without(f"{Q}.g_idx"), f"gptq4: lacks {Q}.g_idx"),
        ("awq", without(f"{Q}.scales"), f"awq4: lacks {Q}.scales"),
        ("awq", quantized(version="gemv"), "config.json: is awq of format 'gemv'; expected gemm"),
        ("awq", quantized(bits=8), "config.json: is awq of 8 bits; expected 4"),
        ("gptq", quantized(bits=3), "config.json: is gptq of 3 bits; expected 2 or 4 or 8"),
        ("gptq", quantized(checkpoint_format="marlin"), MARLIN),
        ("gptq", quantized(is_marlin_format=True), MARLIN),
        ("gptq", quantized(quant_method="bnb"), "has quant_method 'bnb'; expected gptq or awq"),
        ("gptq", quantized(group_size=0), "config.json: has group_size 0; expected a positive number, or -1"),
        ("gptq", quantized(group_size=64), f"{ZEROS} gptq of 4 bits with group_size 64, it is 1 x 8"),
        ("awq", quantized(quant_method="gptq", checkpoint_format="gptq"), f"awq4: lacks {Q}.g_idx"),
        ("gptq", quantized(quant_method="awq"), f"{ZEROS} awq of 4 bits with group_size 32, it is 1 x 64"),
        ("awq", configured(quantization_config=None), "json: has no quantization_config; expected a GPTQ"),
        ("gptq", holding(f"{Q}.g_idx", 2, np.int32), f"{Q}.g_idx is beyond the 2 groups of scales"),
        ("gptq", holding(f"{Q}.g_idx", -1, np.int32), f"{Q}.g_idx is beyond the 2 groups of scales"),
        ("gptq", holding(f"{Q}.qzeros", 1, np.int64), f"{Q}.qzeros is of type I64; expected I32"),
        ("gptq", holding(f"{Q}.scales", np.inf, np.float16), f"{Q}.scales holds values that are not finite"),
        ("gptq", becoming(f"{Q}.qweight", np.ones(8, np.int32)), f"{Q}.qweight is not a matrix"),
        ("gptq", becoming("model.norm.weight", np.ones(8, np.int32)), "model.norm.weight is of type I32"),
    ],
)
def test_what_cannot_be_unpacked_is_said_in_a_sentence(source, form, change, said):
    folder = packed(source, form, 4)
    tensors, config = read(folder), config_of(folder)
    change(tensors, config)
    store_config(store(folder, tensors), config)
    (folder / "quantize_config.json").unlink(missing_ok=True)
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        unpacked(folder)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_checkpoint_that_says_it_is_packed_and_is_not_is_refused(source):
    said = {"quant_method": "awq", "bits": 4, "group_size": GROUP}
    configure(source, quantization_config=said)
    with pytest.raises(ValueError, match="source: has no qweight; by its config it is packed as awq"):
        unpacked(source)
