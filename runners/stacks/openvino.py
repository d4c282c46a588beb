"""One model in OpenVINO GenAI: a checkpoint made an IR by this file, decoded by LLMPipeline."""
# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = ["openvino-genai==2026.4.1", "openvino==2026.4.1", "nncf==3.4.0", "numpy==2.2.6"]
#
# [tool.harness]
# summary = "OpenVINO GenAI: int4, int8 and fp16 made of a 16-bit checkpoint, on CPUs"
# weights = "hf"
# named = ["quant"]
# made = ["quant", "group_size", "symmetric"]
#
# [tool.harness.cannot]
# dequantize = "an IR holds nncf's own constants, which no checkpoint takes back"
# context = "LLMPipeline takes a prompt whole and keeps none of it: its tokens alone can be timed"
# max_ctx = "LLMPipeline takes a prompt whole: its context cannot be filled step by step"
#
# # Those that GenAI's own GGUF reader builds a graph of. A sliding window is refused by `convert`.
# [tool.harness.architectures]
# llama = ["linear", "llama3"]
# qwen2 = ["linear"]
# qwen3 = ["linear"]
#
# [[tool.harness.limits]]
# when = { quant = "int4", group_size = 32 }
# in_features_multiple_of = 32
# message = "Failed to apply group-wise quantization"
#
# [[tool.harness.limits]]
# when = { quant = "int4", group_size = 64 }
# in_features_multiple_of = 64
# message = "Failed to apply group-wise quantization"
#
# [[tool.harness.limits]]
# when = { quant = "int4", group_size = 128 }
# in_features_multiple_of = 128
# message = "Failed to apply group-wise quantization"
#
# [tool.harness.options.quant]
# choices = ["int4", "int8", "fp16"]
# default = "int8"
# help = "type of the linear layers' weights; embedding and lm_head are int8 with int4 (nncf's recipe)"
#
# [tool.harness.options.group_size]
# choices = [-1, 32, 64, 128]
# default = 128
# help = "weights that share a scale in int4; -1: a whole row"
#
# [tool.harness.options.symmetric]
# default = false
# help = "quantize without a zero point"
#
# [tool.harness.options.attention]
# choices = ["pa", "sdpa"]
# default = "pa"
# help = "ATTENTION_BACKEND: paged attention with a scheduler (LLMPipeline's default), or the stateful graph"
#
# [tool.harness.options.kv]
# type = "string"
# choices = ["u8", "f16", "bf16", "f32"]
# help = "KV_CACHE_PRECISION; default: OpenVINO's own, u8 on most CPUs"
#
# [tool.harness.options.compute]
# type = "string"
# choices = ["f32", "bf16", "f16"]
# help = "INFERENCE_PRECISION_HINT; default: OpenVINO's own, bf16 where the CPU has it, else f32"
#
# [tool.harness.options.hyper_threading]
# type = "bool"
# help = "ENABLE_HYPER_THREADING: let its threads share a core; default: OpenVINO's own"
#
# [tool.harness.options.threads]
# type = "int"
# minimum = 1
# default-from = "threads"
# help = "CPU threads, for prompt and decode alike"
#
# [[tool.harness.tune]]
# settings = [{ attention = "sdpa" }]
#
# [tool.harness.env.cpu]
# device = "cpu"
# ///

from __future__ import annotations

import importlib.metadata
import os
import queue
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Without it openvino and nncf, once imported, write an identifier into ~/intel and report their use over the
# network, unasked; both do without.
# ruff: noqa: E402
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]

import numpy as np
import openvino as ov
import openvino_genai
from openvino import opset13 as op
from openvino._offline_transformations import compress_model_transformation, paged_attention_transformation

from runners.protocol import Refused, Request, Say, not_a_number
from runners.weights.safetensors import floats, json_object, narrowed, stored_in

DOES_NOT_FIT: tuple[type[BaseException], ...] = (MemoryError,)

DEVICE = "CPU"
PACKAGES = ("openvino-genai", "openvino", "openvino-tokenizers", "nncf", "numpy")
IR = "openvino_model.xml"
TYPES = {"int4": ("u4", "i4"), "int8": ("u8", "i8"), "fp16": ("f16",)}  # of constants, by quant
UNSET_EOS = 0  # GenAI refuses a generation without one, though it is told to ignore it
MASKED = -65504.0  # the least of float16: of a step in 16 bits too
# Layers of the compiled graph that compute; the others move or hold tensors.
COMPUTES = ("FullyConnected", "MatMul", "RMS", "RoPE", "ScaledDotProductAttention", "PagedAttention")
TITLES = {"Stateful LLM model": "sdpa", "LLM with Paged Attention": "pa"}
PROPERTIES = (
    *("INFERENCE_NUM_THREADS", "INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "ENABLE_HYPER_THREADING"),
    *("NUM_STREAMS", "ENABLE_CPU_PINNING", "DYNAMIC_QUANTIZATION_GROUP_SIZE", "EXECUTION_DEVICES"),
)
# Bytes of a key or value of one head; u8 has a scale and a zero point in float32 beside it.
KV_BYTES: dict[str, Callable[[int], int]] = {
    "u8": lambda size: size + 8,
    "f16": lambda size: 2 * size,
    "bf16": lambda size: 2 * size,
    "f32": lambda size: 4 * size,
}


# A checkpoint as an IR that LLMPipeline loads: the stateful graph that GenAI's GGUF reader builds too.


def convert(request: Request, say: Say) -> dict[str, Any]:
    """Make the folder files["target"]: an IR of the checkpoint files["source"], its weights in `quant`.

    Raises ValueError for a model of another kind, and for values that float16 does not hold.
    """
    options, target = request.options, Path(request.files["target"])
    source = Path(request.files["source"])
    quant, symmetric = options["quant"], options["symmetric"]
    say("reading the checkpoint")
    model = Graph(source).model()
    if quant != "fp16":
        import nncf  # here: it takes seconds, and no session needs it

        say("compressing weights")
        mode = nncf.CompressWeightsMode[f"{quant.upper()}_{'SYM' if symmetric else 'ASYM'}"]
        groups = {"group_size": options["group_size"]} if quant == "int4" else {}
        model = nncf.compress_weights(model, mode=mode, **groups)
    target.mkdir()
    say("writing")
    ov.save_model(model, target / IR, compress_to_fp16=False)  # positions times frequencies need float32
    shutil.copy(source / "config.json", target)
    return {}


class Graph:
    """Builds the graph of a dense decoder from the tensors of its checkpoint."""

    def __init__(self, source: Path) -> None:
        self._source, self._config = source, json_object(source / "config.json")
        self._stored = stored_in(source)
        config, kind = self._config, self._config.get("model_type")
        if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
            raise ValueError(f"{source}: has a sliding window, which its graph here lacks")
        if config.get("hidden_act", "silu") != "silu" or kind not in ("llama", "qwen2", "qwen3"):
            raise ValueError(f"{source}: is {kind} with {config.get('hidden_act')}: no graph is known")
        self._heads = config["num_attention_heads"]
        self._kv_heads = config.get("num_key_value_heads") or self._heads
        self._head_dim = config.get("head_dim") or config["hidden_size"] // self._heads

    def model(self) -> ov.Model:
        """The whole graph, stateful: inputs as LLMPipeline sets them, output `logits`."""
        self._ids = self._input("input_ids", [-1, -1], ov.Type.i64)
        self._seen = self._input("attention_mask", [-1, -1], ov.Type.i64)
        self._positions = self._input("position_ids", [-1, -1], ov.Type.i64)
        self._beam = self._input("beam_idx", [-1], ov.Type.i32)
        self._sinks: list[ov.Node] = []
        shape = op.shape_of(self._ids, output_type="i64")
        zero = op.constant(0, dtype=np.int64)
        self._batch = op.gather(shape, op.constant([0], dtype=np.int64), zero)
        self._mask = self._causal(op.gather(shape, op.constant([1], dtype=np.int64), zero))
        self._cos, self._sin = self._rotary()
        embedding = self._weight("model.embed_tokens.weight")
        hidden = op.gather(embedding, op.convert(self._ids, "i32"), op.constant(0, dtype=np.int32))
        for layer in range(self._config["num_hidden_layers"]):
            hidden = self._layer(f"model.layers.{layer}", layer, hidden)
        hidden = self._norm(hidden, "model.norm")
        head = "lm_head.weight"
        tied = self._config.get("tie_word_embeddings", False) or head not in self._stored
        logits = self._product(hidden, embedding if tied else self._weight(head), "lm_head")
        result = op.result(logits)
        logits.output(0).get_tensor().set_names({"logits"})
        inputs = [self._ids, self._seen, self._positions, self._beam]
        return ov.Model([result], self._sinks, inputs, "decoder")

    def _layer(self, name: str, number: int, hidden: ov.Node) -> ov.Node:
        normed = self._norm(hidden, f"{name}.input_layernorm")
        hidden = op.add(hidden, self._attention(f"{name}.self_attn", number, normed))
        normed = self._norm(hidden, f"{name}.post_attention_layernorm")
        gate = op.swish(self._linear(normed, f"{name}.mlp.gate_proj"))
        up = self._linear(normed, f"{name}.mlp.up_proj")
        return op.add(hidden, self._linear(op.multiply(gate, up), f"{name}.mlp.down_proj"))

    def _attention(self, name: str, number: int, hidden: ov.Node) -> ov.Node:
        query = self._rotated(self._split(hidden, f"{name}.q_proj", self._heads, f"{name}.q_norm"))
        key = self._rotated(self._split(hidden, f"{name}.k_proj", self._kv_heads, f"{name}.k_norm"))
        value = self._split(hidden, f"{name}.v_proj", self._kv_heads)
        keys = self._repeated(self._cached(key, f"past_key_values.{number}.key"))
        values = self._repeated(self._cached(value, f"past_key_values.{number}.value"))
        mixed = op.scaled_dot_product_attention(query, keys, values, self._mask)
        merged = op.reshape(op.transpose(mixed, [0, 2, 1, 3]), [0, 0, self._heads * self._head_dim], True)
        return self._linear(merged, f"{name}.o_proj")

    def _split(self, hidden: ov.Node, name: str, heads: int, norm: str = "") -> ov.Node:
        parts = op.reshape(self._linear(hidden, name), [0, 0, heads, self._head_dim], True)
        if norm and f"{norm}.weight" in self._stored:  # of qwen3
            parts = self._norm(parts, norm)
        return op.transpose(parts, [0, 2, 1, 3])

    def _cached(self, new: ov.Node, name: str) -> ov.Node:
        """With what the state of this name holds before them, which both become its next value."""
        heads, size = self._kv_heads, self._head_dim
        shape = op.concat([self._batch, op.constant([heads, 0, size], dtype=np.int64)], 0)
        empty = op.broadcast(op.constant(0.0, dtype=np.float32), shape)
        state = op.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, heads, -1, size]))
        held = op.gather(state, self._beam, op.constant(0, dtype=np.int64))
        both = op.concat([held, new], 2)
        self._sinks.append(op.assign(both, name))
        return both

    def _repeated(self, held: ov.Node) -> ov.Node:
        """Each KV head once for each of its query heads."""
        if self._heads == self._kv_heads:
            return held
        heads, groups, size = self._kv_heads, self._heads // self._kv_heads, self._head_dim
        shape = op.concat([self._batch, op.constant([heads, groups, 1, size], dtype=np.int64)], 0)
        spread = op.broadcast(op.unsqueeze(held, 2), shape, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(spread, [0, self._heads, -1, size], True)

    def _rotated(self, heads: ov.Node) -> ov.Node:
        half, last = self._head_dim // 2, 2**31 - 1
        first = op.slice(heads, [0], [half], [1], [3])
        second = op.slice(heads, [half], [last], [1], [3])
        turned = op.concat([op.multiply(second, np.float32(-1)), first], -1)
        return op.add(op.multiply(heads, self._cos), op.multiply(turned, self._sin))

    def _rotary(self) -> tuple[ov.Node, ov.Node]:
        """Cosines and sines of the positions: (batch, 1, tokens, size of a head)."""
        positions = op.convert(op.unsqueeze(self._positions, 2), "f32")
        angles = op.multiply(positions, self._frequencies().astype(np.float32).reshape(1, 1, -1))
        both = op.concat([angles, angles], -1)
        return op.unsqueeze(op.cos(both), 1), op.unsqueeze(op.sin(both), 1)

    def _frequencies(self) -> np.ndarray:
        """Of rotary positions, scaled as config.json has it (transformers' modeling_rope_utils)."""
        config = self._config
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        base = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
        kind = rope.get("rope_type", rope.get("type", "default"))
        found = 1.0 / base ** (np.arange(0, self._head_dim, 2, dtype=np.float64) / self._head_dim)
        if kind == "linear":
            return found / rope["factor"]
        if kind == "llama3":
            length, low, high = (
                rope[key]
                for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
            )
            smooth = np.clip((length * found / (2 * np.pi) - low) / (high - low), 0, 1)
            return (1 - smooth) * found / rope["factor"] + smooth * found
        if kind != "default":
            raise ValueError(f"{self._source}: has rope scaling {kind}, which its graph here lacks")
        return found

    def _causal(self, tokens: ov.Node) -> ov.Node:
        """Added to scores: 0 where a token sees another, else MASKED: (batch, 1, tokens, all tokens)."""
        zero, one = op.constant(0, dtype=np.int64), op.constant(1, dtype=np.int64)
        total = op.gather(op.shape_of(self._seen, output_type="i64"), one, zero)
        keys = op.range(zero, total, one, "i64")
        queries = op.range(op.subtract(total, op.squeeze(tokens, 0)), total, one, "i64")
        before = op.less_equal(op.unsqueeze(keys, 0), op.unsqueeze(queries, 1))
        given = op.unsqueeze(op.unsqueeze(op.convert(self._seen, "boolean"), 1), 1)
        sees = op.logical_and(op.unsqueeze(op.unsqueeze(before, 0), 0), given)
        return op.select(sees, np.float32(0), np.float32(MASKED))

    def _norm(self, hidden: ov.Node, name: str) -> ov.Node:
        epsilon = np.float32(self._config.get("rms_norm_eps", 1e-6))
        mean = op.reduce_mean(op.power(hidden, np.float32(2)), op.constant([-1], dtype=np.int64), True)
        scaled = op.multiply(hidden, op.divide(np.float32(1), op.sqrt(op.add(mean, epsilon))))
        return op.multiply(self._weight(f"{name}.weight"), scaled)

    def _linear(self, hidden: ov.Node, name: str) -> ov.Node:
        found = self._product(hidden, self._weight(f"{name}.weight"), name)
        bias = f"{name}.bias"
        return op.add(found, self._weight(bias)) if bias in self._stored else found

    def _product(self, hidden: ov.Node, weight: ov.Node, name: str) -> ov.Node:
        return op.matmul(hidden, weight, False, True, name=name)

    def _weight(self, name: str) -> ov.Node:
        """A tensor of the checkpoint, held in float16 and computed with in float32."""
        if (stored := self._stored.get(name)) is None:
            raise ValueError(f"{self._source}: lacks {name}")
        file = os.open(stored.path, os.O_RDONLY)
        try:
            values = narrowed(floats(stored, file, 0, stored.elements), f"{stored.path}: {name}")
        finally:
            os.close(file)
        whole = op.constant(values.astype(np.float32).reshape(stored.shape))
        alone = ov.Model([op.result(whole)], [], name)
        # Marks the conversion as decompression: without it the CPU's plugin holds all weights in float32.
        compress_model_transformation(alone)
        converted = alone.get_results()[0].input_value(0).get_node()
        converted.input_value(0).get_node().set_friendly_name(name)
        return converted

    def _input(self, name: str, shape: list[int], kind: ov.Type) -> ov.Node:
        node = op.parameter(shape, kind, name=name)
        node.output(0).get_tensor().set_names({name})
        return node


# What is in the files, and what the device makes of them.


def weights_in(model: ov.Model) -> dict[str, Any]:
    """Facts of the weights in an IR, by the names that its constants have from the checkpoint."""
    held = {c.get_friendly_name(): c for c in model.get_ops() if c.get_type_name() == "Constant"}
    held = {name: c for name, c in held.items() if name.partition("/")[0].endswith((".weight", ".bias"))}
    plain = {name: c for name, c in held.items() if "/" not in name}  # the others are scales and zero points
    types = {n: c.get_element_type().to_string() for n, c in plain.items() if n.endswith("_proj.weight")}
    (kind, _), *_ = Counter(types.values()).most_common(1)
    quantized = any(name.endswith("_proj.weight/scale") for name in held)
    zero_points = any(name.endswith("_proj.weight/zero_point") for name in held)
    rows = [c.get_output_shape(0) for name, c in plain.items() if name in types]
    return {
        "type": kind,
        "leftovers": sorted(name for name, found in types.items() if found != kind),
        "symmetric": not zero_points if quantized else None,
        # With groups a weight is (rows, groups, group).
        "group_size": next((shape[2] for shape in rows if len(shape) == 3), -1) if quantized else None,
        "parameters": sum(int(np.prod(c.get_output_shape(0))) for c in plain.values()),
        "model_bytes": sum(c.get_byte_size() for c in held.values()),
        "tied": "lm_head.weight" not in held,
        "input_embedding_bytes": sum(
            c.get_byte_size() for n, c in held.items() if n.startswith("model.embed_tokens.")
        ),
        "tensors": len(plain),
    }


class Compiled:
    """The IR, compiled with the properties that LLMPipeline is given: from it come the graph as it runs and,
    for given ids, the logits, neither of which LLMPipeline shows."""

    def __init__(self, request: Request, paged: bool) -> None:
        core = ov.Core()
        model = core.read_model(Path(request.files["made"]) / IR)
        self.weights = weights_in(model)
        if paged:
            paged_attention_transformation(model)
        self._compiled = core.compile_model(model, DEVICE, properties_of(request.options))

    def kernels(self) -> dict[str, int]:
        """Layers of the graph that compute, with the type of their weights or sums."""
        found: Counter[str] = Counter()
        for node in self._compiled.get_runtime_model().get_ops():
            layer, kind = (str(node.get_rt_info()[key].value) for key in ("layerType", "runtimePrecision"))
            if layer in COMPUTES:
                found[f"{layer}[{kind}]"] += 1
        return dict(found)

    def properties(self) -> dict[str, str]:
        """As LLMPipeline prints them."""
        found = {}
        for name in PROPERTIES:
            value = self._compiled.get_property(name)
            if isinstance(value, bool):
                value = "YES" if value else "NO"
            elif isinstance(value, ov.Type):
                value = value.to_string()
            found[name] = " ".join(value) if isinstance(value, list) else str(value)
        return found

    def infer_request(self) -> ov.InferRequest:
        return self._compiled.create_infer_request()


def properties_of(options: dict[str, Any]) -> dict[str, Any]:
    """Of the device's plugin: those of one user who waits, and what the options set."""
    given = {
        "INFERENCE_NUM_THREADS": options["threads"],
        "KV_CACHE_PRECISION": options["kv"],
        "INFERENCE_PRECISION_HINT": options["compute"],
        "ENABLE_HYPER_THREADING": options["hyper_threading"],
    }
    latency = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}  # GenAI's defaults, made explicit
    return latency | {name: value for name, value in given.items() if value is not None}


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raises MemoryError for OpenVINO's own errors of that kind, and others with their last line, which has
    the reason: the first ones are places in its source."""
    try:
        yield
    except RuntimeError as failure:
        reason = str(failure).strip().splitlines()[-1]
        if re.search(r"bad_alloc|[Cc]an(not|'t) allocate|out of memory", str(failure)):
            raise MemoryError(reason) from failure
        raise RuntimeError(reason) from failure


@contextmanager
def printed() -> Iterator[list[str]]:
    """The lines that OpenVINO prints meanwhile: the properties that its device settled on, and its scheduler.
    No other interface of LLMPipeline has them."""
    lines: list[str] = []
    sys.stdout.flush()
    before, level = os.dup(1), os.environ.get("OPENVINO_LOG_LEVEL")
    os.environ["OPENVINO_LOG_LEVEL"] = "3"
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            os.dup2(before, 1)
            os.close(before)
            if level is None:
                del os.environ["OPENVINO_LOG_LEVEL"]
            else:
                os.environ["OPENVINO_LOG_LEVEL"] = level
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def settled(lines: list[str]) -> dict[str, str]:
    """`name: value` by name, of what OpenVINO printed."""
    pairs = (re.fullmatch(r"\s*(\w+): (.*?)\s*", line) for line in lines)
    return {pair[1]: pair[2] for pair in pairs if pair}


def facts_of(
    request: Request, found: dict[str, str], weights: dict[str, Any], kernels: dict[str, int]
) -> dict[str, Any]:
    """What runs: by the properties that the device settled on, the files, and the compiled graph."""
    kind = weights["type"]
    quant = next((name for name, kinds in TYPES.items() if kind in kinds), kind)
    # A device that computes in bfloat16 holds 16-bit weights so.
    held = "bf16" if quant == "fp16" and found["INFERENCE_PRECISION_HINT"] == "bf16" else kind
    config = json_object(Path(request.files["made"]) / "config.json")
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv = found["KV_CACHE_PRECISION"]
    return {
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "quant": quant,
        "kernels": kernels,
        "kernel_asked": f"FullyConnected[{held}]",
        "leftovers": weights["leftovers"],
        "devices": {"weights": {found["EXECUTION_DEVICES"].lower(): weights["tensors"]}},
        "options": {
            "threads": int(found["INFERENCE_NUM_THREADS"]),
            "attention": TITLES.get(found.get("Model", "")),
            "kv": kv,
            "compute": found["INFERENCE_PRECISION_HINT"],
            "hyper_threading": found["ENABLE_HYPER_THREADING"] == "YES",
            "symmetric": weights["symmetric"],
            "group_size": weights["group_size"],
        },
        "settings": found,
        "kv_read": "grows",
        "kv_bytes_per_token": 2 * config["num_hidden_layers"] * kv_heads * KV_BYTES[kv](head_dim)
        if kv in KV_BYTES
        else None,
        "trained_context": config.get("max_position_embeddings"),
        "vocab_size": config.get("vocab_size"),
        **{key: weights[key] for key in ("model_bytes", "parameters", "tied", "input_embedding_bytes")},
    }


# Sessions: tokens of LLMPipeline, or logits of the same graph.


def load(request: Request) -> PipelineSession | LogitsSession:
    """LLMPipeline, or for logits the graph alone. Raises RuntimeError of OpenVINO, MemoryError, Refused."""
    with engine_errors():
        if request.job == "logits":
            return LogitsSession(request)
        return PipelineSession(request)


class PipelineSession:
    """One model in LLMPipeline; see runners.protocol.Session.

    generate() of LLMPipeline returns after the last token only, so it runs in a thread that hands each id
    over as its streamer gets it. With sdpa that is after the next step has begun. The delay since OpenVINO's
    own stamp of a token is in `handoff` of counters().
    """

    chunk = 64

    def __init__(self, request: Request) -> None:
        self._request = request
        paged = request.options["attention"] == "pa"
        compiled = Compiled(request, paged)
        self._weights, self._kernels = compiled.weights, compiled.kernels()
        del compiled  # before the pipeline compiles it again: one at a time is in memory
        given = properties_of(request.options) | {"ATTENTION_BACKEND": "PA" if paged else "SDPA"}
        if paged:
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            scheduler.max_num_batched_tokens = sys.maxsize  # a prompt is one pass, as GenAI has it by default
            given["scheduler_config"] = scheduler
        with printed() as lines:
            self._pipeline = openvino_genai.LLMPipeline(request.files["made"], DEVICE, **given)
        self._found = settled(lines)
        if self._found.get("enable_prefix_caching", "false") != "false":
            raise Refused("openvino: the scheduler kept prefix caching on")
        self._metrics: Any = None
        self._given_ns: list[int] = []

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Each call begins with an empty cache: LLMPipeline resets its state outside of a chat."""
        config = openvino_genai.GenerationConfig(
            max_new_tokens=new_tokens, ignore_eos=True, do_sample=False, eos_token_id=UNSET_EOS
        )
        ids: queue.SimpleQueue[Any] = queue.SimpleQueue()
        streamer = Streamer(ids)
        inputs = ov.Tensor(np.array([prompt], np.int64))

        def run() -> None:
            try:
                ids.put(self._pipeline.generate(inputs, config, streamer).perf_metrics)
            except BaseException as failure:
                ids.put(failure)

        return self._tokens(threading.Thread(target=run, daemon=True), ids, streamer)

    def _tokens(
        self, thread: threading.Thread, ids: queue.SimpleQueue[Any], streamer: Streamer
    ) -> Iterator[int]:
        self._metrics, self._given_ns = None, []
        thread.start()
        try:
            while isinstance(token := ids.get(), int):
                self._given_ns.append(time.perf_counter_ns())
                yield token
            if isinstance(token, BaseException):
                with engine_errors():
                    raise token
            self._metrics = token
        finally:
            streamer.stopped = True
            thread.join()

    def counters(self) -> dict[str, Any]:
        """OpenVINO's own stamps and counts of the last generate."""
        if self._metrics is None:
            return {}
        raw = self._metrics.raw_metrics
        stamps_ms = raw.m_new_token_times
        steps = len(raw.token_infer_durations)
        late_us = [given / 1e3 - own * 1e3 for given, own in zip(self._given_ns, stamps_ms, strict=False)]
        return {
            "evaluated_tokens": self._metrics.get_num_input_tokens() + steps - 1,
            "stack_decode_ms": stamps_ms[-1] - stamps_ms[0],
            # Both are CLOCK_MONOTONIC on Linux alone.
            "handoff": {"median_us": statistics.median(late_us), "max_us": max(late_us)}
            if sys.platform == "linux"
            else None,
        }

    def facts(self) -> dict[str, Any]:
        """See facts_of."""
        return facts_of(self._request, self._found, self._weights, self._kernels)

    def close(self) -> None:
        del self._pipeline


class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]
    """Hands ids over to the thread that stamps them."""

    def __init__(self, ids: queue.SimpleQueue[Any]) -> None:
        super().__init__()
        self._ids, self.stopped = ids, False

    def write(self, token: int | list[int]) -> openvino_genai.StreamingStatus:
        for each in [token] if isinstance(token, int) else token:
            self._ids.put(each)
        status = openvino_genai.StreamingStatus
        return status.CANCEL if self.stopped else status.RUNNING

    def end(self) -> None:
        """Nothing is kept back."""


class LogitsSession:
    """The same files, compiled with the same properties, for logits after given ids: with the attention of
    the stateful graph in either case, as paged attention takes its cache from GenAI's scheduler alone."""

    chunk = 512

    def __init__(self, request: Request) -> None:
        self._request = request
        self._compiled = Compiled(request, paged=False)
        self._infer = self._compiled.infer_request()
        self._held = 0

    def empty(self, tokens: int) -> None:
        """Reset; it grows as it is filled."""
        self._infer.reset_state()
        self._held = 0

    def feed(self, ids: list[int], keep: int) -> np.ndarray:
        """Logits after the last `keep` of `ids`: float32 (keep, vocabulary)."""
        begin, end = self._held, self._held + len(ids)
        inputs = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(begin, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        with engine_errors():
            rows = self._infer.infer(inputs)["logits"][0, -keep:]
        self._held = end
        if not np.isfinite(rows).all():
            raise ValueError(not_a_number(end))
        return np.ascontiguousarray(rows, np.float32)

    def facts(self) -> dict[str, Any]:
        """See facts_of."""
        compiled = self._compiled
        return facts_of(self._request, compiled.properties(), compiled.weights, compiled.kernels())

    def close(self) -> None:
        del self._infer, self._compiled
