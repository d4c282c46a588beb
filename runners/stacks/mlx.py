"""One model in MLX: mlx-lm loads a checkpoint and quantizes it; decoded by a loop of our own."""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["mlx==0.32.4", "mlx-lm==0.32.2", "numpy==2.2.6"]
#
# [tool.harness]
# summary = "MLX (mlx-lm): 16-bit checkpoints, or 4 and 8 bits made of them while they load; Metal untried"
# weights = "hf"
# accepts = ["python>=3.11", "mlx>=0.32", "mlx-lm>=0.32"]
# named = ["quant"]
# offers = [{ quant = ["bf16", "int8", "int4"] }]
#
# [tool.harness.architectures]
# llama = ["linear", "llama3", "yarn"]
# mistral = ["linear", "llama3", "yarn"]
# qwen2 = ["linear", "llama3", "yarn"]
# qwen3 = ["linear", "llama3", "yarn"]
#
# # quantize_model of mlx-lm leaves out what it cannot divide into groups.
# [[tool.harness.limits]]
# when = { quant = ["int4", "int8"], group_size = 32 }
# in_features_multiple_of = 32
# message = "mlx-lm leaves a layer that has no whole number of groups in 16 bits"
#
# [[tool.harness.limits]]
# when = { quant = ["int4", "int8"], group_size = 64 }
# in_features_multiple_of = 64
# message = "mlx-lm leaves a layer that has no whole number of groups in 16 bits"
#
# [[tool.harness.limits]]
# when = { quant = ["int4", "int8"], group_size = 128 }
# in_features_multiple_of = 128
# message = "mlx-lm leaves a layer that has no whole number of groups in 16 bits"
#
# [[tool.harness.limits]]
# when = { quant = ["bf16", "f16", "f32"], compute = ["bf16", "f16", "f32"] }
# never = true
# refuses = true
# message = "compute is of quantized weights; without quantization quant names the type of all"
#
# [tool.harness.options.quant]
# choices = ["int4", "int8", "bf16", "f16", "f32"]
# default = "int4"
# help = "type of the weights, embedding and lm_head too; int4 and int8: MLX's affine groups"
#
# [tool.harness.options.group_size]
# choices = [32, 64, 128]
# default = 64
# help = "weights that share a scale and a bias, of int4 and int8"
#
# # On a CPU a quantized product adds up in this type (mlx 0.32.4): a row of 2,816 in bf16 is 7% off.
# [tool.harness.options.compute]
# type = "string"
# choices = ["bf16", "f16", "f32"]
# help = "type of scales, norms and arithmetic of int4 and int8; default: f32 on a CPU, else bf16"
#
# [tool.harness.options.ahead]
# default = false
# help = "queue each step before the token of the one before it is read, as mlx_lm.generate does"
#
# # Linux alone; on macOS mlx brings mlx-metal.
# [tool.harness.env.cpu]
# device = "cpu"
# dependencies = ["mlx-cpu==0.32.4"]
#
# [tool.harness.env.metal]
# device = "metal"
# ///

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import (
    get_total_parameters,
    load_model,
    maybe_set_recommended_wired_limit,
    quantize_model,
)

from runners.protocol import Refused, Request, Say, not_a_number
from runners.weights.safetensors import (
    FLOATS,
    NOT_WEIGHTS,
    json_object,
    narrowed,
    staged,
    stored_in,
    write_in_float16,
)

DOES_NOT_FIT = (MemoryError,)
BITS = {"int4": 4, "int8": 8}
DTYPES = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}
TYPES = {dtype: name for name, dtype in DTYPES.items()}
PREFILL_STEP = 2048  # tokens of a prompt at once: prefill_step_size of mlx_lm's generate_step
CLEAR_EVERY = 256  # tokens after which generate_step gives back what MLX's allocator keeps
KV_STEP = KVCache.step


def load(request: Request) -> MlxSession:
    """Load a checkpoint and quantize it. Raises Refused for a quantized one, ValueError for one that is not
    whole, and the errors of mlx-lm."""
    model = _loaded(request)
    session = MlxSession(request, model, json_object(Path(request.model["path"]) / "config.json"))
    session.settle()
    return session


def _loaded(request: Request) -> nn.Module:
    """The model with all its weights in memory, evaluated one layer after the other: the 16-bit tensors are
    read when they are needed, so the largest alone counts towards the peak."""
    path, options = Path(request.model["path"]), request.options
    mx.set_default_device(mx.cpu if request.device == "cpu" else mx.gpu)
    if request.device != "cpu":
        maybe_set_recommended_wired_limit()  # as mlx_lm.generate does
    config, stored = json_object(path / "config.json"), stored_in(path)
    _check_unquantized(path, config, {tensor.dtype for tensor in stored.values()}, request.stack)
    quant = options["quant"]
    compute = options["compute"] or ("f32" if request.device == "cpu" else "bf16")
    dtype = DTYPES[compute if quant in BITS else quant]
    with staged(path) as folder:
        model, read = load_model(
            folder, lazy=True, model_config=_explicit(config, "lm_head.weight" in stored)
        )
        model.update(tree_map(lambda tensor: tensor.astype(dtype), model.parameters()))
        if quant in BITS:
            quantize_model(model, read, options["group_size"], BITS[quant])
        for _, layer in _layers(model):
            mx.eval(layer.parameters())
            mx.clear_cache()
    return model


def _check_unquantized(source: Path, config: dict[str, Any], types: set[str], stack: str) -> None:
    """Raises Refused for a checkpoint whose weights are not 16- or 32-bit floats."""
    named = [key for key in ("quantization", "quantization_config") if config.get(key)]  # MLX's own; others'
    if found := named or sorted(types - set(FLOATS)):
        raise Refused(
            f"{source}: is quantized ({found[0]}); {stack} loads only 16- and 32-bit checkpoints: name"
            " the one that this was made of"
        )


def _explicit(config: dict[str, Any], has_head: bool) -> dict[str, Any]:
    """What mlx-lm would take from defaults of its own, which are not those of transformers: rotary positions
    as transformers 5 stores them, and whether the lm_head is the embedding."""
    found: dict[str, Any] = {}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_theta") is not None:
        scaled = rope.get("rope_type", "default") != "default"
        found |= {"rope_theta": rope["rope_theta"], "rope_scaling": rope if scaled else None}
    if "tie_word_embeddings" not in config:
        found["tie_word_embeddings"] = not has_head
    return found


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)


class MlxSession:
    """One model and its KV cache; see runners.protocol.Session.

    MLX is lazy: a step only describes its work, and reading the token does it. With `ahead` the next step is
    described and queued first, so that the device is not idle meanwhile; no more steps are queued than are
    asked for. A stamp is the time at which a token is there in both cases.
    """

    chunk = 512  # tokens: a pass has scores of every head over the whole context

    def __init__(self, request: Request, model: nn.Module, config: dict[str, Any]) -> None:
        self.model = model
        self._options, self._config = request.options, config
        self._ahead = bool(request.options["ahead"])
        self._cache = make_prompt_cache(model)
        self._kv_bytes_per_token: int | None = None
        self._compute: str | None = None
        self._evaluated = 0
        self._logits = mx.zeros((0, 0))

    def settle(self) -> None:
        """Take a step: its cache shows the type of the arithmetic."""
        self.feed([0], 1)
        if {type(each) for each in self._cache} == {KVCache}:  # else some layers have a window
            states = self._states()
            self._kv_bytes_per_token = sum(state.nbytes // state.shape[2] for state in states)
            self._compute = TYPES.get(states[0].dtype)
        self.empty(0)

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Clears the cache now, outside TTFT; the rest runs when iterated."""
        self.empty(len(prompt) + new_tokens)
        return self._decode(prompt, new_tokens)

    def _decode(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        self._logits = self._forward(mx.array(prompt), 1)
        yield from self.steps(new_tokens)

    def steps(self, new_tokens: int) -> Iterator[int]:
        """Greedy ids after those fed; see runners.protocol.Session."""
        held, step = self.held(), _greedy(self._logits)
        for n in range(1, new_tokens + 1):
            token, highest = step
            more = n < new_tokens  # the last token is never fed back
            if more and self._ahead:
                step = _greedy(self._forward(token, 1))
            found = int(token.item())  # waits for this token
            if not math.isfinite(highest.item()):  # the highest is NaN if any is
                raise ValueError(not_a_number(held + n))
            yield found
            if n % CLEAR_EVERY == 0:
                mx.clear_cache()
            if more and not self._ahead:
                step = _greedy(self._forward(token, 1))

    def _forward(self, ids: mx.array, keep: int) -> mx.array:
        """Logits after the last `keep` of `ids`, not evaluated yet. Those before them fill the cache alone,
        without an lm_head, as in generate_step of mlx-lm."""
        before = self.held()
        filling = len(ids) - keep
        for begin in range(0, filling, PREFILL_STEP):
            self.model(ids[None, begin : min(begin + PREFILL_STEP, filling)], cache=self._cache)
            mx.eval([each.state for each in self._cache])
            mx.clear_cache()
        logits = self.model(ids[None, filling:], cache=self._cache)[0]
        self._evaluated += self.held() - before
        return logits

    def empty(self, tokens: int) -> None:
        """Reset. A cache grows by 256 tokens at a time, so there is no room to set aside."""
        self._cache = make_prompt_cache(self.model)
        self._evaluated = 0
        self._logits = mx.zeros((0, 0))
        mx.clear_cache()

    def feed(self, ids: list[int], keep: int) -> np.ndarray:
        """Logits after the last `keep` of `ids`, evaluated after those before: float32 (keep, vocabulary)."""
        self._logits = self._forward(mx.array(ids), keep)
        return np.array(self._logits.astype(mx.float32))

    def held(self) -> int:
        """Tokens in the cache, by its own count."""
        return int(self._cache[0].offset)

    def truncate(self, tokens: int) -> None:
        """Forget all but the first `tokens`. Raises ValueError for a window that has moved on."""
        if not tokens:
            self._cache = make_prompt_cache(self.model)
        elif (more := self.held() - tokens) > 0 and trim_prompt_cache(self._cache, more) != more:
            raise ValueError("a cache of a sliding window cannot be cut to fewer tokens")

    def keep(self) -> Sequence[mx.array]:
        """Keys and values of each layer, one after the other."""
        return self._copies(self._states(), self.held()) if self.held() else []

    def _states(self) -> list[mx.array]:
        return [state for each in self._cache for state in (each.keys, each.values)]

    def context_bytes(self) -> int:
        """Bytes of such a copy."""
        return self.held() * (self._kv_bytes_per_token or 0)

    def restore(self, kept: Sequence[mx.array], tokens: int) -> None:
        """Bring back the first `tokens` of a kept context."""
        self._cache = make_prompt_cache(self.model)
        if tokens:
            states = self._copies(kept, tokens)
            for each, keys, values in zip(self._cache, states[::2], states[1::2], strict=True):
                each.state = keys, values, tokens

    def _copies(self, states: Sequence[mx.array], tokens: int) -> list[mx.array]:
        """Copies of the first `tokens` of keys and values, with room for another: MLX would copy what two
        arrays share, or grow what is full, in the next step."""
        if self._kv_bytes_per_token is None:
            raise ValueError("a context with a sliding window cannot be kept or cut")
        room = KV_STEP - tokens % KV_STEP
        shape = (*states[0].shape[:2], room)
        spare = [mx.zeros((*shape, state.shape[3]), state.dtype) for state in states]
        copies = [mx.concatenate([s[..., :tokens, :], z], 2) for s, z in zip(states, spare, strict=True)]
        mx.eval(copies)
        return copies

    def write_kept(self, kept: Sequence[mx.array], path: Path) -> None:
        """Write a kept context to a file."""
        with path.open("wb") as file:
            mx.save_safetensors(file, {f"{number:06d}": state for number, state in enumerate(kept)})

    def read_kept(self, path: Path) -> Sequence[mx.array]:
        """A kept context of a file."""
        with path.open("rb") as file:
            found = mx.load(file, format="safetensors")
            states = [found[name] for name in sorted(found)]
            mx.eval(states)
        return states

    def evaluated(self) -> int:
        """Tokens by which the cache has grown since empty()."""
        return self._evaluated

    def memory_state(self) -> tuple[int, int]:
        """Bytes of arrays, and with them those that MLX's allocator keeps."""
        active = mx.get_active_memory()
        return active, active + mx.get_cache_memory()

    def counters(self) -> dict[str, Any]:
        """MLX has no clock of its own, so there is no second one."""
        return {"evaluated_tokens": self._evaluated}

    def facts(self) -> dict[str, Any]:
        """The model as it is in memory, counted from its layers."""
        device = mx.default_device().type.name
        found, quant = _model_facts(self.model), self._options["quant"]
        kv_bytes = sum(each.nbytes for each in self._cache if not each.empty())
        return {
            **found,
            "versions": _versions(),
            "kernel_asked": _kernel("QuantizedLinear" if quant in BITS else "Linear", quant),
            "leftovers": _leftovers(self.model) if quant in BITS else [],
            "options": self._options
            | {"quant": found["quant"], "compute": self._compute, "ahead": self._ahead},
            "devices": {
                "weights": {device: sum(found["kernels"].values())},
                "cache": {device: len(self._cache)},
            },
            "memory": {"model": {device: found["model_bytes"]}, "kv": {device: kv_bytes}},
            "kv_read": "grows" if self._kv_bytes_per_token else None,
            "kv_bytes_per_token": self._kv_bytes_per_token,
            "trained_context": self._config.get("max_position_embeddings"),
            "settings": {"prefill_step": PREFILL_STEP},
            "warnings": self._warnings(),
        }

    def _warnings(self) -> list[str]:
        window = self._config.get("use_sliding_window", True) and self._config.get("sliding_window")
        if not window or self._kv_bytes_per_token is None:
            return []
        return [f"mlx-lm leaves out the sliding window: beyond {window} tokens it computes another model"]

    def close(self) -> None:
        del self._cache, self._logits, self.model


def _greedy(logits: mx.array) -> tuple[mx.array, mx.array]:
    """The id with the highest of the last logits, and that logit, queued."""
    step = mx.argmax(logits[-1:], axis=-1), mx.max(logits[-1:])
    mx.async_eval(*step)
    return step


# The model as it is in memory.


def _model_facts(model: nn.Module) -> dict[str, Any]:
    layers = _layers(model)
    kernels = Counter(_kernel(type(layer).__name__, _type_of(layer)) for _, layer in layers)
    weights: Counter[str] = Counter()  # bytes of matrices by type
    by_type: Counter[str] = Counter()
    for _, layer in layers:
        for name, tensor in tree_flatten(layer.parameters()):
            by_type[_kind(layer, name, tensor)] += tensor.nbytes
            if name == "weight" and tensor.ndim > 1:
                weights[str(_type_of(layer))] += tensor.nbytes
    embedding = next(layer for _, layer in layers if "Embedding" in type(layer).__name__)
    packed = [layer for _, layer in layers if hasattr(layer, "bits")]
    return {
        "kernels": dict(kernels),
        "quant": weights.most_common(1)[0][0],
        "packing": {
            "bits": sorted({layer.bits for layer in packed}),
            "group_size": sorted({layer.group_size for layer in packed}),
        },
        "model_bytes": sum(by_type.values()),
        "bytes_by_type": dict(by_type),
        "parameters": get_total_parameters(model),
        "input_embedding_bytes": sum(tensor.nbytes for _, tensor in tree_flatten(embedding.parameters())),
        "tied": not any(name.endswith("lm_head") for name, _ in layers),
        "vocab_size": embedding.weight.shape[0],
    }


def _type_of(layer: nn.Module) -> str | None:
    """The type of a layer's weights by our name; None: it has none."""
    if hasattr(layer, "bits"):
        return f"int{layer.bits}" if layer.mode == "affine" else layer.mode
    return TYPES.get(layer.weight.dtype) if "weight" in layer else None


def _kernel(kind: str, named: str | None) -> str:
    """A layer's class and the type of its weights: what a kernel of MLX is chosen by."""
    return f"{kind}[{named}]" if named else kind


def _kind(layer: nn.Module, name: str, tensor: mx.array) -> str:
    packs = hasattr(layer, "bits") and name in ("weight", "scales", "biases")
    return {"weight": "packed"}.get(name, name) if packs else str(tensor.dtype).removeprefix("mlx.core.")


def _leftovers(model: nn.Module) -> list[str]:
    """Layers that mlx-lm could have quantized and did not."""
    return sorted(name for name, layer in _layers(model) if hasattr(layer, "to_quantized"))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("mlx", "mlx-cpu", "mlx-metal", "mlx-lm", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):  # of the other platform
            found[name] = importlib.metadata.version(name)
    return found


def probe(request: Request, say: Say) -> dict[str, Any]:
    """The device of this build, whose speed it does not measure."""
    return {
        "versions": _versions(),
        "devices": [mx.default_device().type.name],
        "device_info": mx.device_info(),
    }


def dequantize(request: Request, say: Say) -> dict[str, Any]:
    """Make the folder files["target"]: the checkpoint, its layers quantized as `load` does it and dequantized
    again, all of it in float16. Options: as for `load`."""
    began = time.monotonic()
    source, model = Path(request.model["path"]), _loaded(request)
    held = {
        f"{path}.{name}": (layer, tensor)
        for path, layer in _layers(model)
        for name, tensor in tree_flatten(layer.parameters())
        if not (hasattr(layer, "bits") and name in ("scales", "biases"))
    }
    left_out = (*NOT_WEIGHTS, *(() if "lm_head.weight" in held else ("lm_head.weight",)))
    if held.keys() != {name for name in stored_in(source) if not name.endswith(left_out)}:
        raise Refused(f"{source}: mlx-lm stores this model under other names")
    made = {name: (_size(*each), partial(_in_half, name, *each)) for name, each in held.items()}
    tensors = write_in_float16(request, made, say)
    return {"tensors": tensors, "seconds": time.monotonic() - began, "versions": _versions()}


def _size(layer: nn.Module, tensor: mx.array) -> tuple[int, ...]:
    packs = hasattr(layer, "bits") and tensor.dtype == mx.uint32
    return (tensor.shape[0], tensor.shape[1] * 32 // layer.bits) if packs else tuple(tensor.shape)


def _in_half(name: str, layer: nn.Module, tensor: mx.array) -> np.ndarray:
    """One tensor in float16, a packed one dequantized in float32."""
    if hasattr(layer, "bits") and tensor.dtype == mx.uint32:
        scales, biases = (layer[part].astype(mx.float32) for part in ("scales", "biases"))
        form = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        tensor = mx.dequantize(tensor, scales, biases, **form)
    return narrowed(np.array(tensor.astype(mx.float32)), name)
