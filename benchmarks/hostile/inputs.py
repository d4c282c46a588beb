"""Hostile inputs of each format: sound files, and what of them is damaged."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import math
import os
import struct
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from benchmarks.hostile import texts
from benchmarks.hostile.encoders import gguf, lines, parquet, rows, safetensors
from benchmarks.hostile.mutations import (
    Content,
    Format,
    Special,
    damaged,
    documents,
    dumped,
    json_files,
    one_of_them,
)
from harness import records
from harness.base import bounds
from harness.records.kinds import checked
from harness.share import make_bundle, read_bundle
from tests.damage import edited

TESTS = Path(__file__).parents[2] / "tests"
PUBLISHED = sorted((TESTS.parent / "results" / "published").rglob("record.json"))
RECORD = json.loads((TESTS / "golden" / "record-1.json").read_text())
BEGUN = {key: RECORD[key] for key in RECORD if key not in ("outcome", "loaded", "done", "timing", "memory")}
HIDDEN, INNER, VOCABULARY = 8, 16, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "intermediate_size": INNER,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_CT = {"num_bits": 4, "type": "int", "group_size": 128}
QUANTIZED = [
    CONFIG | {"quantization_config": settings}
    for settings in (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*": {"bits": 8}}},
        {**_BNB, "bnb_4bit_use_double_quant": True},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": _CT}}},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
        {"quant_method": "mxfp4"},
    )
]
OTHERS = [
    CONFIG | {"tie_word_embeddings": True},
    CONFIG | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"model_type": "llava", "text_config": CONFIG},
    {"model_type": "bert", "hidden_size": HIDDEN},
]
# What is saved in place of a model.
_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 4920739232\n"
NOT_MODELS = [_LFS, b"<!DOCTYPE html><html><head></head></html>", b"", b"\0" * 4096, b"PK\3\4" + b"x" * 64]
# Of a layer and around them, by the names in safetensors and in GGUF.
TENSORS = {
    "model.embed_tokens.weight": ("token_embd.weight", [VOCABULARY, HIDDEN]),
    "model.layers.0.self_attn.q_proj.weight": ("blk.0.attn_q.weight", [HIDDEN, HIDDEN]),
    "model.layers.0.self_attn.k_proj.weight": ("blk.0.attn_k.weight", [HIDDEN, HIDDEN]),
    "model.layers.0.self_attn.v_proj.weight": ("blk.0.attn_v.weight", [HIDDEN, HIDDEN]),
    "model.layers.0.self_attn.o_proj.weight": ("blk.0.attn_output.weight", [HIDDEN, HIDDEN]),
    "model.layers.0.mlp.gate_proj.weight": ("blk.0.ffn_gate.weight", [INNER, HIDDEN]),
    "model.layers.0.mlp.up_proj.weight": ("blk.0.ffn_up.weight", [INNER, HIDDEN]),
    "model.layers.0.mlp.down_proj.weight": ("blk.0.ffn_down.weight", [HIDDEN, INNER]),
    "model.layers.0.input_layernorm.weight": ("blk.0.attn_norm.weight", [HIDDEN]),
    "model.layers.0.post_attention_layernorm.weight": ("blk.0.ffn_norm.weight", [HIDDEN]),
    "model.norm.weight": ("output_norm.weight", [HIDDEN]),
    "lm_head.weight": ("output.weight", [VOCABULARY, HIDDEN]),
}
CSV = b"variant,n,latency_ms\n" + b"".join(b"a,%d,%d.5\n" % (n, 20 + n % 3) for n in range(1, 60))
YAML = b"""device: cpu
protocol: {new_tokens: 64, repeats: 3, measure_bandwidth: false, memory_budget: 2GB}
models:
  - shape: tiny-qwen2
  - {name: mine, weights: {path: model.gguf}}
  - {name: hub, weights: {repo: Qwen/Qwen1.5, file: "q-{quant}.gguf"}}
workloads:
  - {kind: decode, prompt_tokens: 10}
  - {kind: max_ctx, fill: false}
variants:
  - {stack: llamacpp, quant: [q8_0, q4_k_m], flash_attn: [false, true]}
  - {stack: fake, name: x, B_ms: 1.5, models: ["tiny*"]}
exclude:
  - {model: hub, flash_attn: true}
"""
YAML_PIECES = [
    b"!!python/object/apply:os.system ['touch outside']\n",
    b"!!python/name:os.system ",
    b"!!binary ////\n",
    b"!!timestamp 99999-99-99\n",
    b"&a [*a, *a]\n",
    b"<<: *a\n",
    b"? ",
    b"\t",
    b"{" * 3000,
    b"- " * 3000,
    b"'",
    b"\xc2\x85",
    b"---\n",
    b"%TAG ! tag:x,2000:\n",
    b"1_0:59:59.9e999",
    b"0o777",
]
# Nine lists of nine of the one before: 9**9 strings when followed.
LAUGHS = b"a0: &a0 [x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 10)
)


def _f32_bytes(dims: list[int]) -> int:
    """Of a tensor, with its padding."""
    return -(-math.prod(dims) * 4 // 32) * 32


def _gguf_spec() -> dict[str, Any]:
    whole = {"block_count": 1, "embedding_length": HIDDEN, "feed_forward_length": INNER, "context_length": 64}
    keys = {f"llama.{name}": {"type": 4, "value": value} for name, value in whole.items()}
    heads = {"type": 4, "value": 2}
    keys |= {"llama.attention.head_count": heads, "llama.attention.head_count_kv": heads}
    keys["llama.attention.layer_norm_rms_epsilon"] = {"type": 6, "value": 0x3727C5AC}
    words = {"type": 8, "count": None, "items": [f"w{i}" for i in range(VOCABULARY)]}
    keys["tokenizer.ggml.tokens"] = {"type": 9, "value": words}
    keys["general.alignment"] = {"type": 4, "value": 32}
    tensors, at = {}, 0
    for name, dims in TENSORS.values():
        tensors[name] = {"n": None, "dims": dims[::-1], "type": 0, "offset": at}
        at += _f32_bytes(dims)
    first = {"general.architecture": {"type": 8, "value": "llama"}}
    head = {"version": 3, "n_tensors": None, "n_keys": None}
    return {**head, "keys": first | keys, "tensors": tensors, "data": at}


def _gguf_kinds(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The model, and files that are none: a projector, a LoRA, an importance matrix, an encoder; one with a
    draft head, one that names another type, and one part of two."""

    def with_keys(**given: Any) -> dict[str, Any]:
        kinds = {str: 8, bool: 7, int: 4}
        new = {
            key.replace("__", "."): {"type": kinds[type(value)], "value": value}
            for key, value in given.items()
        }
        return {**spec, "keys": spec["keys"] | new}

    head, at = {}, spec["data"]
    for name, tensor in spec["tensors"].items():
        if "blk.0" in name:
            head[name.replace("blk.0", "blk.1")] = {**tensor, "offset": at}
            at += _f32_bytes(tensor["dims"])
    drafting = with_keys(llama__block_count=2, llama__nextn_predict_layers=1)
    return [
        spec,
        {**drafting, "tensors": spec["tensors"] | head, "data": at},
        with_keys(general__file_type=15),
        with_keys(general__architecture="clip", general__type="mmproj"),
        with_keys(general__type="adapter", adapter__type="lora"),
        with_keys(general__type="imatrix"),
        with_keys(general__architecture="bert", bert__attention__causal=False),
        with_keys(split__count=2, split__no=0, split__tensors__count=24),
    ]


def _safetensors_spec(names: list[str]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        dims = TENSORS[name][1]
        end = at + 2 * dims[0] * (dims[1] if len(dims) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [at, end]}
        at = end
    return {"length": None, "header": header, "data": at}


@cache
def _parquets() -> tuple[bytes, ...]:
    """Sound ones, ones of other types, and small files of many rows, columns or bytes."""
    import pyarrow as pa

    series = _series(10**6)
    zeros = pa.chunked_array([pa.nulls(1 << 20, pa.int64()).fill_null(0)] * 50)
    return (
        _tokens(10**6),
        parquet(series),
        parquet(series | {"n": pa.array(["x"] * 40)}),
        parquet(series | {"n": pa.array([None] * 40, pa.int64())}),
        parquet(series | {"latency_ns": pa.array([2**63 - 1] * 40)}),
        parquet(series | {"latency_ns": pa.array([{"a": [1]}] * 40)}),
        parquet(series | {f"c{i}": pa.array(range(40)) for i in range(2000)}),
        parquet(dict.fromkeys(series, zeros), compression="zstd"),
        parquet({name: pa.array(["x" * (1 << 20)] * 40) for name in series}, compression="zstd"),
        parquet({name: pa.array([], pa.int64()) for name in series}),
    )


def _series(latency_ns: int) -> dict[str, Any]:
    import pyarrow as pa

    latencies = pa.array([latency_ns] * 40)
    return {"n": pa.array(range(26, 66)), "latency_ns": latencies, "t_ns": pa.array(range(40))}


@cache
def _tokens(latency_ns: int) -> bytes:
    """As the harness writes it."""
    series = _series(latency_ns)
    delta = dict.fromkeys(series, "DELTA_BINARY_PACKED")
    return parquet(series, use_dictionary=False, column_encoding=delta, compression="zstd")


@cache
def _gzips() -> tuple[bytes, ...]:
    bomb = gzip.compress(CSV + b"a,1,2\n" * 60_000_000, 1)
    return gzip.compress(CSV), gzip.compress(CSV) * 2, gzip.compress(gzip.compress(CSV)), bomb


def _csv() -> st.SearchStrategy[bytes]:
    table = {"head": ["variant", "n", "latency_ms"]} | {str(n): ["a", n, 20.5] for n in range(1, 9)}
    odd = [b"\0", b'"', b",,,,", b"nan,inf,-inf\n", b"1e999", b"2026-01-01T00:00:00Z", b"\r", b"9" * 400]
    wide = b",".join(b"c%d" % i for i in range(20_000)) + b"\nlatency_ms\n1\n"
    return documents([{"rows": table}], rows) | damaged([CSV, wide], odd)


def _logs() -> st.SearchStrategy[bytes]:
    """Logs of the tools that `harness fit` reads."""
    kept = [path.read_bytes() for path in sorted((TESTS / "logs").iterdir()) if path.suffix != ".md"]
    tokens = {str(n): {"n": n, "latency_ms": 20.5 + n % 3} for n in range(1, 9)}
    aiperf = {str(i): json.loads(line) for i, line in enumerate(kept[0].splitlines())}
    trees = [json.loads(text) for text in kept if text.lstrip().startswith(b"{") and text.count(b"\n{") == 0]
    return documents([tokens, aiperf], lines) | json_files(trees) | damaged(kept)


def _results(name: str, damage: st.SearchStrategy[bytes]) -> Format:
    """A results folder of two campaigns of one record, with one file of the second damaged."""
    files = {}
    # Not of one latency: of series that are equal to the last digit one is a copy, and has no figure.
    for folder, day, latency_ns in (("a", "2026-11-19", 10**6 + 1), ("b", "2026-11-20", 10**6)):
        began = f"{day}T08:08:39.619499+00:00"
        record = RECORD | {"campaign": RECORD["campaign"] | {"id": began}, "started_utc": began}
        files[f"results/{folder}/r/record.json"] = dumped(record)
        files[f"results/{folder}/r/tokens.parquet"] = _tokens(latency_ns)
    return one_of_them(files, {f"results/b/r/{name}": damage})


def _begun() -> Format:
    """What a controller that was killed leaves: every file of it may be damaged."""
    events = b'{"event":"phase","name":"load","t_ns":1}\n' * 3
    folder = "results/a/r2/"
    with tempfile.TemporaryDirectory() as made:  # it names the machine and the user
        running = records.begin(Path(made) / "cell", BEGUN)
        begun = json.loads((running.folder / "begun.json").read_bytes())
        running.events.close()
    left = {"begun.json": dumped(begun), "events.jsonl": events, "worker.log": b"log\n" * 30}
    left["probes.jsonl"] = b'{"n_ctx": 256, "fits": true}\n'
    damage = {name: damaged([content]) for name, content in left.items()}
    damage["begun.json"] = json_files([begun, begun | {"search": {"probes": []}}])
    for link in ("record.json.partial", "tokens.parquet.partial"):
        damage[link] = st.just(b"left over")
    files = {folder + name: content for name, content in left.items()}
    return one_of_them(files, {folder + name: how for name, how in damage.items()})


def _checkpoint(name: str, damage: st.SearchStrategy[bytes]) -> Format:
    names = list(TENSORS)
    shards = {f"model-{i + 1:05d}-of-00002.safetensors": names[i::2] for i in range(2)}
    parted = {shard: safetensors(_safetensors_spec(held)) for shard, held in shards.items()}
    where = {tensor: shard for shard, held in shards.items() for tensor in held}
    whole = {"model.safetensors": safetensors(_safetensors_spec(names))}
    of = parted | {"model.safetensors.index.json": dumped({"weight_map": where})}
    files = {"config.json": dumped(CONFIG)} | (of if "index" in name else whole)
    return one_of_them(
        {f"model/{file}": content for file, content in files.items()}, {f"model/{name}": damage}
    )


def _tokenizer() -> dict[str, Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(letters))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found: dict[str, Any] = json.loads(made.to_str())
    padding = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    found["padding"] = padding
    return found


def _slow_tokenizer() -> dict[str, Any]:
    """With an expression whose search takes exponential time."""
    return _tokenizer() | {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}}


def _bundle() -> Format:
    """A bundle: damaged as a file, as a tar, and in its documents, with hashes that fit."""
    import pyarrow as pa

    whole = TESTS / "golden" / "bundle-1.tar.zst"
    members = read_bundle.unpacked(whole)
    with pa.CompressedInputStream(pa.BufferReader(whole.read_bytes()), "zstd") as stream:
        tar = bytes(stream.read())
    codec = pa.Codec("zstd", compression_level=1)
    bombs = [codec.compress(head + bytes(1 << 28), asbytes=True) for head in (b"", tar)]
    manifest, name = json.loads(members["manifest.json"]), "records/00001/record.json"

    def with_record(content: bytes) -> bytes:
        files = manifest["files"] | {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        }
        return make_bundle.packed(
            members | {"manifest.json": dumped(manifest | {"files": files}), name: content}
        )

    others = _other_tars(members)
    damage = damaged([whole.read_bytes()]) | st.sampled_from(
        [*bombs, *(codec.compress(other, asbytes=True) for other in others)]
    )
    damage |= damaged([tar, *others], [b"../", b"/etc", b"ustar", b"2", b"x", b"L"]).map(
        lambda data: bytes(codec.compress(data, asbytes=True))
    )
    damage |= json_files([manifest]).map(
        lambda content: make_bundle.packed(members | {"manifest.json": content})
    )
    damage |= json_files([json.loads(members[name])]).map(with_record)
    return one_of_them({"b.tar.zst": whole.read_bytes()}, {"b.tar.zst": damage})


def _other_tars(members: dict[str, bytes]) -> list[bytes]:
    """The members in tars with what a bundle has not: headers of pax, and files with holes."""
    made = []
    name = "records/00001/record.json"
    hole = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": name,
        "GNU.sparse.realsize": "1" * 15,
    }
    for form, global_, own in (
        (tarfile.GNU_FORMAT, {}, {}),
        (tarfile.PAX_FORMAT, {"path": "../outside"}, {}),
        (tarfile.PAX_FORMAT, {}, {"path": "/outside", "size": "99999999999999"}),
        (tarfile.PAX_FORMAT, {}, {"linkpath": "/etc/passwd", "comment": "x" * 70_000}),
        (tarfile.PAX_FORMAT, {"GNU.sparse.map": "0,9" * 9000}, {"GNU.sparse.size": "9" * 30}),
        (tarfile.PAX_FORMAT, {}, hole),
    ):
        with tarfile.open(
            fileobj=(file := io.BytesIO()), mode="w", format=form, pax_headers=global_
        ) as archive:
            for member, content in members.items():
                (info := tarfile.TarInfo(member)).size = len(content)
                info.pax_headers = own if member == name else {}
                archive.addfile(info, io.BytesIO(content))
        made.append(file.getvalue())
    return made


def formats() -> dict[str, Callable[[], Format]]:
    """Every format, made when it is called."""
    spec, whole = _gguf_spec(), _safetensors_spec(list(TENSORS))
    index = {"metadata": {"total_size": 0}}
    index["weight_map"] = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(TENSORS)
    }  # type: ignore[dict-item]
    tree = yaml.safe_load(YAML)
    numbers = [struct.pack("<I", kind) for kind in range(14)]
    return {
        "gguf": lambda: one_of_them(
            {"model.gguf": gguf(spec)},
            {
                "model.gguf": documents(_gguf_kinds(spec), gguf)
                | damaged([gguf(each) for each in _gguf_kinds(spec)], numbers)
                | damaged([gguf(spec) * 2, *NOT_MODELS], [b"GGUF"])
                | st.sampled_from([gguf(spec) * 2, *NOT_MODELS])
            },
        ),
        "safetensors": lambda: _checkpoint(
            "model.safetensors",
            documents([whole], safetensors)
            | damaged([safetensors(whole), *NOT_MODELS], [b'"F64"', b'"F8_E4M3"', b"[0,", b"999999"]),
        ),
        "index.json": lambda: _checkpoint("model.safetensors.index.json", json_files([index])),
        "config.json": lambda: _checkpoint("config.json", json_files([CONFIG, *QUANTIZED, *OTHERS])),
        "tokenizer.json": lambda: one_of_them(
            {"tokenizer.json": dumped(_tokenizer())},
            {"tokenizer.json": json_files([_tokenizer(), _slow_tokenizer()])},
        ),
        "yaml": lambda: one_of_them(
            {"config.yaml": YAML, "model.gguf": gguf(spec)},
            {"config.yaml": documents([tree]) | damaged([YAML, LAUGHS, LAUGHS + YAML], YAML_PIECES)},
        ),
        "record.json": lambda: _results(
            "record.json", json_files([RECORD, json.loads(PUBLISHED[0].read_text())])
        ),
        "begun.json": _begun,
        "parquet": lambda: _results(
            "tokens.parquet", st.sampled_from(_parquets()) | damaged(_parquets()[:6])
        ),
        "csv": lambda: one_of_them({"log.csv": CSV}, {"log.csv": _csv()}),
        "csv.gz": lambda: one_of_them(
            {"log.csv.gz": _gzips()[0]},
            {"log.csv.gz": st.sampled_from(_gzips()) | damaged(_gzips()[:3]) | _csv().map(gzip.compress)},
        ),
        "jsonl": lambda: one_of_them({"log.jsonl": CSV}, {"log.jsonl": _logs()}),
        "bundle": _bundle,
        "names": _names,
        "grown": lambda: _results("record.json", _grown()),
        "words": lambda: _results("record.json", _with_words()),
        "persons": _persons,
        "twice": _twice,
        "keys": texts.keys,
        "paths": _paths,
        "power log": _power_log,
        "servers": texts.servers,
        "sql": lambda: Format({"query": b"select 1"}, texts.queries().map(lambda text: {"query": text})),
    }


def _with_words() -> st.SearchStrategy[bytes]:
    """Records with up to six odd words in place of texts that may be any."""

    def takes(way: tuple[Any, ...]) -> bool:
        with contextlib.suppress(ValueError):
            return bool(checked(edited(RECORD, [(way, "any words")])))
        return False

    free = [way for way in _ways(RECORD) if isinstance(_at(RECORD, way), str) and takes(way)]
    failed = RECORD | {"outcome": "error", "reason": "x"}
    changes = st.lists(
        st.tuples(st.sampled_from([*free, ("reason",)]), texts.words()), min_size=1, max_size=6
    )
    return st.builds(
        lambda record, edits: dumped(edited(record, edits)), st.sampled_from([RECORD, failed]), changes
    )


def _persons() -> Format:
    """Records with texts that name persons."""
    texts_in = st.lists(texts.persons(), min_size=1, max_size=3)
    record = st.builds(
        lambda log, key: dumped({"log": log, key: log[0], "host_name": "x"}), texts_in, texts.persons()
    )
    return Format({"record.json": dumped({"log": "x"})}, record.map(lambda content: {"record.json": content}))


def _twice() -> Format:
    """A record, or a bundle's record or manifest, in which a key is there twice: none may be taken."""
    sound = _results("record.json", st.nothing()).sound
    packed = {"b.tar.zst": (TESTS / "golden" / "bundle-1.tar.zst").read_bytes()}
    members = read_bundle.unpacked(TESTS / "golden" / "bundle-1.tar.zst")
    manifest, name = json.loads(members["manifest.json"]), "records/00001/record.json"

    def with_key(document: Any) -> st.SearchStrategy[bytes]:
        def put(way: tuple[Any, ...], value: Any, first: bool) -> bytes:
            *parents, key = way
            within = _at(changed := json.loads(json.dumps(document)), tuple(parents))
            both = {key: within.pop(key), f"{key}\0": value}
            new = dict(reversed(both.items())) if first else both
            before = dict(within)
            within.clear()
            within.update(new | before)
            return dumped(changed).replace(b"\\u0000", b"")

        ways = [way for way in _ways(document) if isinstance(way[-1], str)]
        return st.builds(
            put, st.sampled_from(ways), st.sampled_from([1, "/home/jane", None, {}, []]), st.booleans()
        )

    def in_bundle(content: bytes, member: str) -> dict[str, Content]:
        own = {member: content}
        if member == name:
            files = manifest["files"] | {
                name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            }
            own["manifest.json"] = dumped(manifest | {"files": files})
        return {"b.tar.zst": make_bundle.packed(members | own)}

    def in_folder(content: bytes) -> dict[str, Content]:
        return {"results/b/r/record.json": content}

    of_record = with_key(RECORD).map(in_folder)
    of_bundle = with_key(json.loads(members[name])).map(lambda content: in_bundle(content, name))
    of_bundle |= with_key(manifest).map(lambda content: in_bundle(content, "manifest.json"))
    both = st.builds(lambda one, other: {**sound, **one, **other}, of_record, of_bundle)
    return Format(sound | packed, both, is_refused=True)


def _paths() -> Format:
    """Files whose names are of any bytes."""
    of = {".gguf": gguf(_gguf_spec()), ".csv": CSV, ".yaml": YAML, ".zst": b"\x28\xb5\x2f\xfd"}
    sound = Special("folder")
    raw = st.binary(min_size=1, max_size=200) | texts.words().map(
        lambda word: word.encode(errors="surrogatepass")[:200]
    )
    name = raw.map(lambda raw: os.fsdecode(b"o" + raw.translate(None, b"/\0.")))

    def file(name: str, end: str) -> dict[str, Content]:
        return {name + end: of.get(end, sound)}

    named = {f"m{end}": content for end, content in of.items()} | {"folder": sound}
    return Format(named, st.builds(file, name, st.sampled_from(["", *of])))


def _power_log() -> Format:
    lines = b"time,watts\n" + b"".join(b"2026-11-20T08:%02d:00Z,%d.5\n" % (n, 100 + n) for n in range(60))
    table = {"head": ["time", "watts"]} | {
        str(n): [f"2026-11-20T08:{n:02}:00+00:00", 99.5] for n in range(30)
    }
    pieces = [
        b"nan",
        b"inf",
        b"-1",
        b"1e400",
        b"9999-12-31T23:59:59-23:59",
        b"0001-01-01T00:00:00+23:59",
        b"\0",
        b'"',
    ]
    damage = documents([{"rows": table}], rows) | damaged([lines, lines * 2000], pieces)
    began = "2026-11-20T08:08:39.619499+00:00"
    record = RECORD | {"started_utc": began, "timing": RECORD["timing"] | {"generate_utc": began}}
    files = {"results/r/record.json": dumped(record), "results/r/tokens.parquet": _tokens(10**6)}
    return one_of_them(files | {"power.csv": lines}, {"power.csv": damage})


def _at(value: Any, way: tuple[Any, ...]) -> Any:
    for key in way:
        value = value[key]
    return value


def _names() -> Format:
    """Folders of records and of cells with names of any bytes."""
    sound = _results("record.json", st.nothing()).sound
    name = st.binary(min_size=1, max_size=255).map(lambda raw: os.fsdecode(raw.translate(None, b"/\0")))
    odd = name.filter(lambda name: name not in ("", ".", ".."))
    placed = st.sampled_from(["results/{}/1", "results/a/{}", "results/a/{}/1", "results/{0}/{0}"])
    folder = st.builds(str.format, placed, odd)

    def also_in(folder: str) -> dict[str, Content]:
        own = {f"{folder}/{name}": sound[f"results/a/r/{name}"] for name in ("record.json", "tokens.parquet")}
        return {**sound, **own}

    return Format(sound, folder.map(also_in))


def _grown() -> st.SearchStrategy[bytes]:
    """Records in which one part is long: up to the bytes that a record may have."""

    def with_long(way: tuple[Any, ...], times: int) -> bytes:
        record = json.loads(json.dumps(RECORD))
        within = record
        for key in way[:-1]:
            within = within[key]
        part = within[way[-1]]
        times = max(1, min(times, bounds.RECORD_BYTES // (len(json.dumps(part)) + 16)))
        if isinstance(part, dict):
            within[way[-1]] = {**part, **{f"{key}{n}": part[key] for key in part for n in range(times)}}
        else:
            within[way[-1]] = part * times if isinstance(part, list | str) else [part] * times
        return dumped(record)

    return st.builds(
        with_long, st.sampled_from([*_ways(RECORD)]), st.sampled_from([10, 1000, 100_000, 10_000_000])
    )


def _ways(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each part of a document."""
    if way:
        yield way
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from _ways(value[key], (*way, key))
