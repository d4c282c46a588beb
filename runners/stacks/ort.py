"""One model in ONNX Runtime GenAI: its builder makes an ONNX file of a checkpoint, a Generator decodes."""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "onnx==1.23.2", "onnx-ir==1.1.0", "torch==2.13.0", "transformers==5.23.0", "numpy==2.2.6",
# ]
#
# [tool.harness]
# summary = "ONNX Runtime GenAI: int4, int8 and fp32 files made of a checkpoint, on CPUs (CUDA: never run)"
# weights = "hf"
# named = ["quant"]
# made = ["quant", "activations"]
# cannot = { dequantize = "its weights are packed into an ONNX file" }
#
# [[tool.harness.limits]]
# when = { quant = "fp32", activations = "fp32" }
# never = true
# message = "activations is of int4 and int8; fp32 has no other"
#
# # Seen with these: rope scalings of the builder's own are not.
# [tool.harness.architectures]
# llama = []
# qwen2 = []
# qwen3 = []
#
# [[tool.harness.context]]
# option = "n_ctx"
# granule = 256  # finer than measured memory can resolve
# dry = false
#
# [tool.harness.options.quant]
# choices = ["int4", "int8", "fp32"]
# default = "int4"
# help = "type of the matrices, lm_head among them, in blocks of 32; an untied embedding stays float32"
#
# [tool.harness.options.activations]
# choices = ["int8", "fp32"]
# default = "int8"
# help = "what int4 and int8 matrices are multiplied with: activations rounded to int8, or as they are"
#
# [tool.harness.options.n_ctx]
# type = "int"
# minimum = 1
# default-from = "tokens"
# help = "tokens that the KV cache is allocated for; default: prompt + new tokens"
#
# [tool.harness.options.threads]
# type = "int"
# minimum = 1
# default-from = "threads"
# help = "CPU threads, for prompt and decode alike"
#
# # A CPU's torch for both: it only reads checkpoints for the builder.
# [tool.harness.env.cpu]
# device = "cpu"
# dependencies = ["onnxruntime-genai==0.18.0", "onnxruntime==1.32.0"]
# variables = { UV_TORCH_BACKEND = "cpu" }
#
# [tool.harness.env.cuda]
# device = "cuda"
# dependencies = ["onnxruntime-genai-cuda==0.18.0", "onnxruntime-gpu==1.31.1"]
# variables = { UV_TORCH_BACKEND = "cpu" }
# ///

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime_genai as genai

from runners.protocol import Request, Say, not_a_number
from runners.weights.safetensors import json_object, staged

__all__ = ["DOES_NOT_FIT", "convert", "load", "probe"]

DOES_NOT_FIT: tuple[type[BaseException], ...] = (MemoryError,)
_LACKS_MEMORY = ("Failed to allocate memory", "Could not allocate", "bad_alloc")

MODEL, CONFIG = "model.onnx", "genai_config.json"
ACCURACY = {"fp32": 1, "int8": 4}  # accuracy_level of MatMulNBits: the least that activations are rounded to
MATRICES = "MatMulNBits"
PACKAGES = ("onnxruntime-genai", "onnxruntime-genai-cuda", "onnxruntime", "onnxruntime-gpu", "onnx", "numpy")
# Of a fake tokenizer: the builder wants one, and a synthetic checkpoint has none.
TOKENIZER = {
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
    },
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "?"},
}


def convert(request: Request, say: Say) -> dict[str, Any]:
    """Make the folder files["target"] of the checkpoint files["source"]: a graph, its weights and settings.

    Raises the errors of the builder; ValueError: it would make another model of this checkpoint, or this CPU
    has no kernel for the activations.
    """
    began = time.monotonic()
    # Not at the top: a process that times tokens does not need them. The package puts `builder` on the path.
    torch = importlib.import_module("torch")
    importlib.import_module("onnxruntime_genai.models")
    builder = importlib.import_module("builder")
    torch.set_num_threads(request.options["threads"])
    source, target = Path(request.files["source"]), Path(request.files["target"])
    quant, level = request.options["quant"], ACCURACY[request.options["activations"]]
    provider = "cpu" if request.device == "cpu" else "cuda"
    if provider == "cpu" and quant != "fp32":
        _check_activations(quant, request.options["activations"])
    say(f"building {quant}")
    with staged(source) as folder, tempfile.TemporaryDirectory(prefix="harness-builder-") as cache:
        for name, content in TOKENIZER.items():
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
        given = ("", str(folder), str(target), quant, provider, cache)
        options = [f"accuracy_level={level}", "hf_token=false"]
        builder.create_model(*given, **builder.parse_extra_options(*given, options))
    for path in [*target.iterdir()]:
        if path.name not in (MODEL, f"{MODEL}.data", CONFIG):
            path.unlink()  # of the fake tokenizer
    _check_head(source, _Graph(target))
    return {"seconds": time.monotonic() - began, "versions": _versions()}


def _check_activations(quant: str, requested: str) -> None:
    """Raises ValueError where a product of ONNX Runtime rounds its input otherwise than requested: without a
    kernel for this CPU it computes in float32, and nothing says so."""
    runtime = importlib.import_module("onnxruntime")
    make, numbers, kind = onnx.helper, onnx.numpy_helper, onnx.TensorProto.FLOAT
    bits = int(quant.removeprefix("int"))
    # A block of 32 weights for each of 16 outputs, all 0 (stored as 8 or 128) but the second, which is 1.
    packed = np.full((16, 1, 4 * bits), 0x88 if bits == 4 else 0x80, np.uint8)
    packed[:, 0, bits // 8] = 0x98 if bits == 4 else 0x81
    weights = [numbers.from_array(packed, "b"), numbers.from_array(np.ones((16, 1), np.float32), "s")]
    size = {"K": 32, "N": 16, "bits": bits, "block_size": 32, "accuracy_level": ACCURACY[requested]}
    node = make.make_node(MATRICES, ["a", "b", "s"], ["y"], domain="com.microsoft", **size)
    given, result = (make.make_tensor_value_info(name, kind, [1, n]) for name, n in (("a", 32), ("y", 16)))
    graph = make.make_graph([node], "product", [given], [result], weights)
    opsets = [make.make_opsetid("", 22), make.make_opsetid("com.microsoft", 1)]
    model = make.make_model(graph, ir_version=10, opset_imports=opsets).SerializeToString()
    activations = np.zeros((1, 32), np.float32)
    activations[0, :2] = 127, 0.4  # as int8 with one scale: 127 and 0
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    product = float(session.run(None, {"a": activations})[0][0, 0])
    if (ran := "int8" if abs(product) < 0.2 else "fp32") != requested:
        raise ValueError(
            f"on this CPU {quant} matrices are multiplied with activations: {ran}, not {requested}"
        )


def _check_head(source: Path, graph: _Graph) -> None:
    """Raises ValueError where another layer became lm_head: the builder knows it by its outputs alone."""
    head = next(node for node in graph.nodes if node.name.startswith("/lm_head/MatMul"))
    if "final_norm" not in head.input[0]:
        raise ValueError(
            f"{source}: a layer has as many outputs as the vocabulary, which the builder of ONNX Runtime"
            " GenAI takes for lm_head"
        )


def load(request: Request) -> OrtSession:
    """Load the files that `convert` made, and allocate the KV cache. Raises the errors of ONNX Runtime."""
    genai.disable_telemetry_events()  # else it sends usage data to Microsoft
    folder, options = Path(request.files["made"]), request.options
    config = genai.Config(str(folder))
    config.overlay(
        json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": options["threads"]}}}})
    )
    with _memory_errors():
        model = genai.Model(config)
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=options["n_ctx"], do_sample=False, num_beams=1, batch_size=1)
        session = OrtSession(folder, model, params)
        session.settle()
    return session


def probe(request: Request, say: Say) -> dict[str, Any]:
    """The versions and devices of this build."""
    gpu = bool(genai.is_cuda_available())
    return {"versions": _versions(), "devices": ["cuda"] if gpu else ["cpu"], "gpu": gpu}


@cache
def _versions() -> dict[str, str]:
    found = {each.name: each.version for each in importlib.metadata.distributions()}
    return {name: found[name] for name in PACKAGES if name in found} | {"python": platform.python_version()}


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Raises MemoryError for those errors of ONNX Runtime that mean it."""
    try:
        yield
    except RuntimeError as failure:
        if any(words in str(failure) for words in _LACKS_MEMORY):
            raise MemoryError(str(failure)) from failure
        raise


class OrtSession:
    """One model and one Generator, whose KV cache is allocated once; see runners.protocol.Session."""

    chunk = 64  # logits of every token fed are computed and held: 600 KB each for 150,000 words

    def __init__(self, folder: Path, model: Any, params: Any) -> None:
        self._settings = json_object(folder / CONFIG)["model"]
        self._graph = _Graph(folder)
        self._model, self._params = model, params
        self._generator = genai.Generator(model, params)
        ends = self._settings["eos_token_id"]
        self._ends = frozenset(ends if isinstance(ends, list) else [ends])
        self._unfed = 0  # tokens at the end of its sequence that it has not evaluated: 0 or 1
        self._profile: list[dict[str, Any]] = []

    def settle(self) -> None:
        """Take a decode step with ONNX Runtime's profile on, which shows each node as it runs."""
        generator = self._generator
        self._append([0])
        with tempfile.TemporaryDirectory(prefix="harness-profile-") as folder:
            generator.set_runtime_option("enable_profiling", f"{folder}/step")
            self._append([0])
            generator.set_runtime_option("enable_profiling", "0")
            for path in Path(folder).iterdir():
                self._profile += [each for each in json.loads(path.read_bytes()) if each["cat"] == "Node"]
        self.empty(0)

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Empties the cache now, outside TTFT; the rest runs when iterated."""
        self.empty(len(prompt) + new_tokens)
        return self._decode(prompt, new_tokens)

    def _decode(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        self._append(prompt)
        yield from self.steps(new_tokens)

    def steps(self, new_tokens: int) -> Iterator[int]:
        """Greedy ids after those fed; see runners.protocol.Session.

        At an end of text the Generator stops, and would repeat that id for ever without computing: the id is
        then appended by us. Its own way around, min_length, would never choose it, which is another argmax.
        """
        step, chosen, ends = self._generator.generate_next_token, self._generator.get_next_tokens, self._ends
        with _memory_errors():
            for left in range(new_tokens - 1, -1, -1):
                step()  # evaluates the id before, and chooses
                token = int(chosen()[0])
                self._unfed = token not in ends
                yield token
                if left and not self._unfed:
                    self._append([token])

    def _append(self, ids: list[int]) -> None:
        with _memory_errors():
            self._generator.append_tokens(np.array(ids, np.int32))
        self._unfed = 0

    def empty(self, tokens: int) -> None:
        """Reset. Raises ValueError if the cache holds fewer than `tokens`."""
        if tokens > (n_ctx := self._n_ctx()):
            raise ValueError(f"the KV cache has n_ctx {n_ctx}, and {tokens} tokens were requested")
        self.truncate(0)

    def feed(self, ids: list[int], keep: int) -> np.ndarray:
        """Logits after the last `keep` of `ids`, evaluated after those before: float32 (keep, vocabulary)."""
        self.truncate(self.held())
        self._append(ids)
        if keep == 1:  # the other way copies those of all ids
            return np.asarray(self._generator.get_logits(), np.float32)[0]
        return np.asarray(self._generator.get_output("logits")[0, -keep:], np.float32)

    def held(self) -> int:
        """Tokens in the KV cache, by the Generator's count."""
        return int(self._generator.token_count()) - self._unfed

    def truncate(self, tokens: int) -> None:
        """Forget all but the first `tokens`."""
        if tokens < self._generator.token_count():
            self._generator.rewind_to(tokens)
        self._unfed = 0

    def context_bytes(self) -> int:
        """Nothing can be brought back, so a copy is too large for any purpose."""
        return 1 << 62

    def evaluated(self) -> None:
        """Return None: the Generator counts tokens, not what it evaluates."""

    def counters(self) -> dict[str, Any]:
        """Raises ValueError if the last logits are not numbers: a NaN stays in the KV cache."""
        if not np.isfinite(self._generator.get_output("logits")[0, -1]).all():
            raise ValueError(not_a_number(self.held() + 1))
        return {"evaluated_tokens": self.held()}

    def facts(self) -> dict[str, Any]:
        """The graph by its file, and its nodes as a profiled step ran them."""
        graph, settings = self._graph, self._settings
        nodes = [each["args"] | {"node": each["name"]} for each in self._profile]
        on = Counter(_device(node["provider"]) for node in nodes if "/attn_mask" not in node["node"])
        shared = bool(self._params.get_search_options()["past_present_share_buffer"])
        resolved = {"threads": _threads(nodes), "n_ctx": self._n_ctx()}
        if graph.activations:
            resolved["activations"] = "/".join(graph.activations)
        return {
            "versions": _versions(),
            "quant": graph.quant,
            "kernel_asked": "MatMul" if graph.quant == "fp32" else MATRICES,
            "kernels": dict(Counter(node["op_name"] for node in nodes)),
            "leftovers": graph.leftovers,
            "devices": {"nodes": dict(on), "model": {self._model.device_type.lower(): 1}},
            "options": resolved,
            "settings": {"block_size": graph.block_sizes, "search": self._params.get_search_options()},
            "model_bytes": graph.bytes,
            "parameters": graph.parameters,
            "tied": graph.tied,
            "input_embedding_bytes": graph.embedding_bytes,
            "vocab_size": settings["vocab_size"],
            "trained_context": settings["context_length"],
            "kv_read": ("window" if graph.window else "grows") if shared else "copied",
            "window": graph.window,
            "kv_bytes_per_token": graph.kv_bytes(settings["decoder"]["head_size"]),
        }

    def _n_ctx(self) -> int:
        return int(self._params.get_search_options()["max_length"])

    def close(self) -> None:
        del self._generator, self._params, self._model


def _device(provider: str) -> str:
    """`cpu` of CPUExecutionProvider."""
    return provider.removesuffix("ExecutionProvider").lower()


def _threads(nodes: list[dict[str, Any]]) -> int:
    """Threads that a node may use, idle ones included. A session of one thread has no pool to report."""
    pools = [each["sub_threads"] for node in nodes if (each := node.get("thread_scheduling_stats"))]
    return max((len(pool) for pool in pools), default=0) + 1


class _Graph:
    """What the file says of the weights: `bytes` and `parameters`, without the tables of rotary positions."""

    def __init__(self, folder: Path) -> None:
        model = onnx.load(str(folder / MODEL), load_external_data=False)
        self.nodes = [*model.graph.node]
        self._inputs = {each.name: each.type.tensor_type for each in model.graph.input}
        attributes = {
            node.name: {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            for node in self.nodes
        }
        held = {
            each.name: each
            for each in model.graph.initializer
            if each.data_type not in (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
            and each.name not in ("cos_cache", "sin_cache")
        }
        sizes = {name: _bytes(each) for name, each in held.items()}
        elements = {name: math.prod(each.dims) for name, each in held.items()}
        packed = [node for node in self.nodes if node.op_type == MATRICES]
        for node in packed:
            weight, *scales = (name for name in node.input[1:] if name in held)
            elements[weight] = attributes[node.name]["K"] * attributes[node.name]["N"]
            elements.update(dict.fromkeys(scales, 0))
        self.bytes, self.parameters = sum(sizes.values()), sum(elements.values())
        self.block_sizes = sorted({attributes[node.name]["block_size"] for node in packed})
        bits = sorted({attributes[node.name]["bits"] for node in packed})
        self.quant = "/".join(f"int{each}" for each in bits) or "fp32"
        levels = {attributes[node.name].get("accuracy_level", 0) for node in packed}
        self.activations = sorted(name for name, level in ACCURACY.items() if level in levels)
        plain = [node for node in self.nodes if node.op_type == "MatMul" and node.input[1] in held]
        self.leftovers = [node.name for node in plain] if packed else []
        windows = [each.get("local_window_size", -1) for each in attributes.values()]
        self.window = max(windows) if max(windows) > 0 else None
        # An embedding that shares the matrix of lm_head has nodes that transpose or reshape it.
        made_of = {name: node.input[0] for node in self.nodes for name in node.output if len(node.input) > 0}
        embedding = next(node for node in self.nodes if "input_ids" in node.input)
        tables = {made_of.get(name, name) for name in embedding.input} & held.keys()
        head = next(node for node in self.nodes if node.name.startswith("/lm_head/MatMul"))
        self.tied = bool(tables & set(head.input))
        self.embedding_bytes = sum(sizes[name] for name in tables)

    def kv_bytes(self, head_size: int) -> int:
        """Bytes of keys and values of a token."""
        caches = [kind for name, kind in self._inputs.items() if name.startswith("past_key_values")]
        width = {onnx.TensorProto.FLOAT: 4, onnx.TensorProto.FLOAT16: 2, onnx.TensorProto.BFLOAT16: 2}
        return sum(kind.shape.dim[1].dim_value * head_size * width[kind.elem_type] for kind in caches)


def _bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of a tensor: those in the file of weights, else by its type."""
    external = {each.key: each.value for each in tensor.external_data}
    if "length" in external:
        return int(external["length"])
    return math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
