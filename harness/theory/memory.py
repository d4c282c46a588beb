"""The memory that a model takes, and whether it fits. Pure."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from typing_extensions import TypedDict

from harness.theory import decoder, floors
from harness.theory.decoder import Decoder
from harness.theory.floors import Ceiling, Demand
from harness.theory.machines import DRIVER_RESERVE_BYTES, Machine
from harness.theory.tensors import (
    ALL_QUANTS,
    UNQUANTIZED,
    Tensor,
    element_bytes,
    loaded_bytes,
    of_shape,
    quantized,
    streamed_bytes,
)

# Device memory of a model while it decodes: weights, KV cache, buffers, runtime. Pure.
#
# The only estimator of memory: for `harness theory`, for dry runs, and for searches whose stack has no job
# `account`. Source and error of each term: docs/concepts/theory.md, "Does it fit".


Parts = dict[str, float]
"""Bytes by part: weights, kv, compute, runtime, slack."""

IDEAL, LLAMA_CPP, TRANSFORMERS, BITSANDBYTES = "ideal", "llama.cpp", "transformers", "bitsandbytes"
LLAMA_CPP_FLASH = "llama.cpp flash_attn"
MEMORY_MODELS = (LLAMA_CPP, TRANSFORMERS, BITSANDBYTES)
"""Of stacks; bitsandbytes: as transformers, with its linear layers packed."""

GIB, MIB = 2**30, 2**20
CUDA_RUNTIME_BYTES = 0.5 * GIB  # a CUDA context with its kernels and cuBLAS
# llama.cpp's on a CPU: 33 to 35 MB of its process, 2 to 3 MB of tables, and a row of logits (`need` of
# searches with llama-cpp-python 0.3.36 under Python 3.11).
LLAMA_CPP_RUNTIME_BYTES = 37.0 * MIB
# On a CPU, anonymous memory besides weights and cache: 272 MB once loaded, 281 to 284 MB with 256 to 2,560
# tokens filled (transformers 5.23, torch 2.13, a 0.5B model in bf16 within budgets of 1.7 and 3 GiB).
TORCH_RUNTIME_BYTES, TORCH_ACTIVATION_BYTES = 260.0 * MIB, 12.0 * MIB
PADDING = 256  # llama.cpp pads a context to a multiple of this
F32, F16 = 4, 2
# Of all architectures with windows, those in which llama.cpp has them (set_swa_pattern in src/models/*.cpp).
_WINDOWS_OF_LLAMA_CPP = (
    *("cohere2", "exaone4", "gemma2", "gemma3", "gemma3n", "gpt-oss", "llama4", "olmo2"),
)
_FAR = 1 << 31  # tokens; past every window


@dataclass(frozen=True)
class Model:
    """A model as a stack holds it. `weight_bytes`: all of them; `embedding_bytes`: the input embedding's
    part of these, 0 if tied to the lm_head. `kv_bytes_per_token`: while no window is full."""

    made: Decoder
    weight_bytes: float
    embedding_bytes: float
    kv_bytes_per_token: float

    def kv_bytes(self, tokens: int, room: int = 0, pad: int = 1, latent: bool = True) -> float:
        """Bytes of a cache of so many tokens, with states. A layer with a window holds `room` more tokens, in
        multiples of `pad`; `pad` over 1 means llama.cpp, which ignores some windows. A dense model's window
        is not used. `latent`: latents are cached, not keys and values."""
        made = self.made
        elements = decoder.kv_elements_per_token(made)
        one = self.kv_bytes_per_token / elements if elements else 0.0
        windows = not made.is_dense and (pad == 1 or self.windows_of_llama_cpp)
        held = 0.0
        for cache, layers in decoder.kinds(made).items():
            tokens_held = tokens
            if cache.window and windows:
                tokens_held = min(tokens, math.ceil((cache.window + room) / pad) * pad)
            of_token = cache.k + cache.v if latent or not cache.expanded else cache.expanded
            held += layers * (0 if cache.borrowed else of_token * one * tokens_held)
            held += layers * cache.state * F32
        return held

    @property
    def windows_of_llama_cpp(self) -> set[int]:
        """The windows of layers that llama.cpp uses; it ignores a dense model's."""
        if self.made.is_dense or self.made.arch not in _WINDOWS_OF_LLAMA_CPP:
            return set()
        return {cache.window for cache in decoder.kinds(self.made) if cache.window}

    @property
    def growing(self) -> float:
        """Bytes that a token adds past every window."""
        return self.kv_bytes(_FAR + 1) - self.kv_bytes(_FAR)


class Engine(Protocol):
    """How a stack uses memory. `granule`: contexts are multiples of this."""

    @property
    def granule(self) -> int: ...

    def parts(self, model: Model, tokens: int) -> Parts:
        """Bytes of a context of this length, filled to its end."""
        ...


@dataclass(frozen=True)
class Ideal:
    """Weights without the input embedding, KV cache, and nothing else: the upper bound of any stack."""

    granule: int = 1

    def parts(self, model: Model, tokens: int) -> Parts:
        return {
            "weights": model.weight_bytes - model.embedding_bytes,
            "kv": model.kv_bytes(tokens),
        }


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp, all layers on one device, the input embedding in main memory.

    `ubatch`: tokens of a prompt in one pass. `swa_full`: layers with a window cache the whole context. On a
    CPU, pages of unused logits are not touched.
    """

    on_gpu: bool
    flash_attn: bool = False
    ubatch: int = 512
    swa_full: bool = False
    granule: int = PADDING

    def parts(self, model: Model, tokens: int) -> Parts:
        made, n = model.made, math.ceil(tokens / PADDING) * PADDING
        u = min(self.ubatch, n)
        found = {"kv": model.kv_bytes(n, n if self.swa_full else u, PADDING), "weights": model.weight_bytes}
        windows = () if self.swa_full else model.windows_of_llama_cpp
        window = min(n, math.ceil((max(windows, default=0) + u) / PADDING) * PADDING) if windows else 0
        if self.on_gpu:
            found["weights"] -= model.embedding_bytes
            compute = compute_bytes(made, u, u, n, window, self.flash_attn)
            return found | {"compute": compute, "runtime": CUDA_RUNTIME_BYTES}
        compute = compute_bytes(made, u, 1, n, window, self.flash_attn)
        # On CPUs ggml converts the scores, or the inputs of a matrix, to the other factor's type.
        scores = 0 if self.flash_attn or not made.runs else F16 * u * n * made.heads
        work = max(scores, 2 * u * max(made.ffn, made.hidden_size))
        bookkeeping = n * (48 + 96)  # llama.cpp's KV cells, and the sets of those in use
        return found | {"compute": compute + work + bookkeeping, "runtime": LLAMA_CPP_RUNTIME_BYTES}


def compute_bytes(made: Decoder, tokens: int, outputs: int, cells: int, window: int, flash: bool) -> float:
    """llama.cpp's compute buffer for a pass of so many `tokens`, of which `outputs` have logits, over a cache
    of `cells`, or of `window` in layers with a window (0: there are none).

    The buffer holds the embeddings to the end, and the logits or the tensors of a layer's widest step: the
    masks, the layer's input before and after its norm, and one of these: queries, scores of all heads and
    their output; projections and state; both factors of a feed-forward and their product. Not counted: holes
    that the allocator leaves, and smaller tensors. The error is in docs/validation.md.
    """
    widest, values = 0.0, dict[int, int]()  # values: the most that a token adds to V, by cells
    for layer, _ in made.runs:
        dims = defaultdict(lambda: (0, 0), {each.name: each.dims for each in layer.pieces})
        cache = layer.cache
        if cache.k:
            held = window if window and cache.window else cells
            values[held] = max(values.get(held, 0), cache.v)
            # Queries of a latent cache are as wide as its keys.
            queries = made.heads * cache.k if cache.expanded else dims["attn_output.weight"][-1]
            scores = queries if flash else max(queries, made.heads * held)
            transposed = cache.k * held / 2 if cache.expanded and not flash else 0  # its V, in 16 bits
            widest = max(widest, tokens * (queries + scores) + transposed)
        if cache.state:
            mixed = sum(dims[f"{name}.weight"][0] for name in ("ssm_in", "attn_qkv", "shortconv.in_proj"))
            widest = max(widest, tokens * 2 * mixed + cache.state)
        for suffix, times in (("", 1), ("_shexp", 1), ("_exps", made.experts_used)):
            factors = sum(dims[f"ffn_{name}{suffix}.weight"][-2] for name in ("gate", "up"))
            widest = max(widest, tokens * times * (factors + dims[f"ffn_down{suffix}.weight"][-1]))
    # Without flash attention masks are in 32 bits, and a place of 8 bytes says where each value of V goes.
    inputs = sum(F16 * held if flash else F32 * held + 8 * most for held, most in values.items())
    in_layer = tokens * (inputs + F32 * 2 * made.hidden_size) + F32 * widest
    logits = F32 * outputs * (made.vocab_size + made.hidden_size)
    return F32 * tokens * made.hidden_size + max(logits, in_layer)


@dataclass(frozen=True)
class Torch:
    """transformers, and the stacks that load into it.

    `cache`: `static`, allocated as a whole; `dynamic`, with one layer held twice while it grows; `rebuilt`,
    as in transformers in early 2024 (4.39), which held the old cache until the new one was complete.
    `rope_tables`: a 16-bit cosine and sine table of the trained context in each layer, as at that time.
    `scratch_bytes`: see exllama_v2_scratch.
    """

    on_gpu: bool
    cache: str = "dynamic"
    scratch_bytes: float = 0.0
    rope_tables: bool = False
    granule: int = 1

    def parts(self, model: Model, tokens: int) -> Parts:
        made = model.made
        held, layers = model.kv_bytes(tokens, latent=False), made.count
        of_layer = held / (2 * layers)
        kv = held
        if self.cache != "static" and self.on_gpu:
            kv = 2 * layers * cuda_block_bytes(of_layer)
        if self.cache == "dynamic":
            kv += 2 * of_layer
        elif self.cache == "rebuilt":
            before = model.kv_bytes(max(tokens - 1, 1), latent=False) / (2 * layers)
            kv += 2 * layers * cuda_block_bytes(before)
        tables = layers * made.context * made.head_dim * 4 if self.rope_tables else 0
        return {
            "weights": model.weight_bytes,
            "kv": kv,
            "compute": self.scratch_bytes + tables,
            "runtime": CUDA_RUNTIME_BYTES if self.on_gpu else TORCH_RUNTIME_BYTES,
            # cuBLAS workspaces, activations, memory that torch's allocator cannot use: the remainder in the
            # published study's rows.
            "slack": 0.6 * GIB if self.on_gpu else TORCH_ACTIVATION_BYTES,
        }


def cuda_block_bytes(size: float) -> float:
    """CUDA memory that torch's caching allocator takes per tensor among many of equal size: segments of
    20 MiB up to 10 MiB, above that multiples of 2 MiB (c10/cuda/CUDACachingAllocator.h)."""
    if size <= MIB:
        return size
    if size < 10 * MIB:
        return 20 * MIB / (20 * MIB // size)
    return math.ceil(size / (2 * MIB)) * 2 * MIB


def exllama_v2_scratch(made: Decoder) -> float:
    """Scratch memory of auto-gptq's and autoawq's ExLlamaV2 kernels: a dequantized matrix, and the
    outputs of 8 sequences of 2,048 tokens, of the largest layer (qlinear_exllamav2.py)."""
    matrices = [t.dims for t in of_shape(made) if t.name.startswith("blk.0.") and len(t.dims) == 2]
    return max(2.0 * n_in * n_out for n_out, n_in in matrices) + max(
        F32 * 2048.0 * 8 * n_out for n_out, _ in matrices
    )


def total_bytes(engine: Engine, model: Model, tokens: int) -> float:
    return sum(engine.parts(model, tokens).values())


def longest_context(engine: Engine, model: Model, available_bytes: float) -> int | None:
    """The most tokens that fit, a multiple of the engine's granule; None if one granule does not fit."""
    most = available_bytes / model.growing if model.growing else _FAR
    low, high = 0, int(min(most, _FAR) / engine.granule) + 2
    while high - low > 1:
        middle = (low + high) // 2
        if total_bytes(engine, model, middle * engine.granule) <= available_bytes:
            low = middle
        else:
            high = middle
    return low * engine.granule or None


# Which weights and KV types of a model fit a memory, and how fast they can be at most. Pure.


WEIGHTS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
OF_MIXTURES = "mxfp4_moe"
# ggml-org's GGUFs have q8_0 beside: llama.cpp's benches/dgx-spark.md lists 59.02 GiB for gpt-oss-120b and
# 11.27 GiB for gpt-oss-20b, which are the bytes of such tensors. With bf16 they would be 60.77 and 12.82.
_RELEASED_IN_MXFP4 = ("gpt-oss",)
KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Of llama.cpp's KV cache (kv_cache_types in common/arg.cpp)."""
USUAL_KV = ("f16", "q8_0", "q4_0")


def kv_bits(kv: str) -> float:
    """Bits per element of a type of the KV cache, scales included."""
    return 8 * element_bytes(kv)


class Choice(TypedDict):
    """`fits`: the requested context, in the `engine` on a GPU, llama.cpp with flash attention; `spare_bytes`:
    negative if short. `trained`: context, `trained_stated`: by the model's files, else a default is assumed;
    `longest`: at most that; None: none. `longest_ideal`: of any stack.
    tok/s: upper bounds at zero and at the requested context; None without a bandwidth."""

    model: str
    engine: str
    weights: str
    kv: str
    model_bytes: float
    fits: bool
    spare_bytes: float
    trained: int
    trained_stated: bool
    longest: int | None
    longest_ideal: int | None
    tokens_per_s: float | None
    tokens_per_s_at_context: float | None


def released_in(made: Decoder) -> str | None:
    """The type of GGUF that llama.cpp's converter keeps, where a model was released in it; else None."""
    return OF_MIXTURES if made.arch in _RELEASED_IN_MXFP4 else None


def choices(
    name: str,
    made: Decoder,
    quants: Sequence[str],
    memory_bytes: float,
    context: int,
    bytes_per_s: float | None,
    stored: Form | None = None,
    trained_stated: bool = True,
    kvs: Sequence[str] = USUAL_KV,
    reserve_bytes: float = DRIVER_RESERVE_BYTES,
) -> list[Choice]:
    """One for each type of weights and of the KV cache. `quants`: empty for the `stored` weights, and, unless
    these are quantized and can be loaded as nothing else, the usual types."""
    found: list[Choice] = []
    forms = [] if quants or stored is None else [stored]
    if not forms or forms[0].label in UNQUANTIZED:
        released, usual = released_in(made), (*WEIGHTS, OF_MIXTURES) if made.experts else WEIGHTS
        wanted = quants or ((released,) if released else usual)
        forms += [Form(quant, tensors=quantized(made, quant)) for quant in wanted]
    for form in forms:
        is_torch = form.loaded_by is not None  # a quantized checkpoint
        engine: Engine = Torch(on_gpu=True) if is_torch else LlamaCpp(on_gpu=True, flash_attn=True)
        for kv in [each for each in kvs if not is_torch or each == USUAL_KV[0]]:
            bits = kv_bits(kv)
            needs = floors.demand_of_tensors(made, form.tensors, bits)
            of_token = decoder.kv_elements_per_token(made) * bits / 8
            held = Model(made, needs.resident_bytes, needs.embedding_bytes, of_token)
            fit = _fit(engine, held, memory_bytes - reserve_bytes, context)
            ideal = _fit(Ideal(), held, memory_bytes, context)
            ceiling = Ceiling(bytes_per_s or math.inf, math.inf)
            first_s, then_s = (floors.decode_floor_s(needs, ceiling, n) for n in (1, context))
            fits = fit["spare_bytes"] >= 0
            found.append(
                {
                    "model": name,
                    "engine": TRANSFORMERS if is_torch else LLAMA_CPP,
                    "weights": form.label,
                    "kv": kv,
                    "model_bytes": needs.resident_bytes,
                    "fits": fits,
                    "spare_bytes": fit["spare_bytes"],
                    "trained": made.context,
                    "trained_stated": trained_stated,
                    "longest": fit["longest"],
                    "longest_ideal": ideal["longest"],
                    "tokens_per_s": 1 / first_s if bytes_per_s else None,
                    "tokens_per_s_at_context": 1 / then_s if bytes_per_s and fits else None,
                }
            )
    return found


# Whether a model fits a machine: at the lower bound of any stack, in llama.cpp (with and without flash
# attention), in transformers. Pure.


FLOATS = ("f32", "f16", "bf16")
_HALVES = ("f16", "bf16")  # types of GGUF that transformers holds as they are
# How transformers holds weights of these widths: in 16 bits, or by bitsandbytes.
_BITSANDBYTES = {16.0: None, 8.0: "int8", 4.0: "nf4"}


@dataclass(frozen=True)
class Form:
    """The form that weights take: all at `bits`, or exactly these `tensors` (with `parameters`, if the file
    has them). `label` names it in a table. `loaded_by`: of a quantized checkpoint, the memory models of the
    stacks that load it; None: another form."""

    label: str
    bits: float | None = None
    tensors: tuple[Tensor, ...] = ()
    parameters: int | None = None
    loaded_by: frozenset[str] | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether they are quantized in their files, or a GGUF's: in another form they are other files."""
        return self.loaded_by is not None or _is_gguf(self.tensors)


class Fit(TypedDict):
    """`spare_bytes`: negative if short. `longest`: context, at most the trained one."""

    need_bytes: float
    spare_bytes: float
    longest: int | None
    longest_uncapped: int | None


def by_stack(
    made: Decoder,
    form: Form,
    needs: Demand,
    machine: Machine,
    context: int,
    kv_bits: float,
    gpu_bytes: int | None = None,
) -> dict[str, Fit | None]:
    """Whether `context` tokens fit, by stack; None where the stack cannot load the form.

    The ideal uses all of the memory; the others subtract the machine's reserve. `gpu_bytes`: of the weights,
    where llama.cpp holds the others on the CPU; None: all but the input embedding.
    """
    kv = decoder.kv_elements_per_token(made) * kv_bits / 8
    held = needs.resident_bytes if gpu_bytes is None else gpu_bytes + needs.embedding_bytes
    ideal = Model(made, held, needs.embedding_bytes, kv)
    on_gpu = machine.family != "cpu"
    stacks: dict[str, tuple[Engine, Model] | None] = dict.fromkeys((LLAMA_CPP, LLAMA_CPP_FLASH, TRANSFORMERS))
    if _in_gguf(form):
        if kv_bits >= 16:  # it quantizes V with flash attention alone
            stacks[LLAMA_CPP] = LlamaCpp(on_gpu), ideal
        stacks[LLAMA_CPP_FLASH] = LlamaCpp(on_gpu, flash_attn=True), ideal
    if gpu_bytes is None and kv_bits >= 16 and (weights := _in_torch(made, form)) is not None:
        engine = Torch(machine.family in ("cuda", "hip"))
        stacks[TRANSFORMERS] = engine, Model(made, weights, 0.0, kv)
    found: dict[str, Fit | None] = {IDEAL: _fit(Ideal(), ideal, float(machine.memory_bytes), context)}
    available = machine.memory_bytes - machine.reserve.value
    return found | {name: each and _fit(*each, available, context) for name, each in stacks.items()}


def _fit(engine: Engine, model: Model, available: float, context: int) -> Fit:
    need, uncapped = total_bytes(engine, model, context), longest_context(engine, model, available)
    return {
        "need_bytes": need,
        "spare_bytes": available - need,
        "longest": uncapped and min(uncapped, model.made.context),
        "longest_uncapped": uncapped,
    }


def _is_gguf(tensors: tuple[Tensor, ...]) -> bool:
    return any(tensor.name.startswith("blk.") for tensor in tensors)


def _in_gguf(form: Form) -> bool:
    """Whether llama.cpp loads the form, or a GGUF as large."""
    if form.loaded_by is not None:
        return LLAMA_CPP in form.loaded_by
    return form.bits is not None or _is_gguf(form.tensors) or all(t.type in FLOATS for t in form.tensors)


def _in_torch(made: Decoder, form: Form) -> float | None:
    """Bytes of the weights once transformers has loaded them; None if it cannot load this form."""
    if form.loaded_by is not None and form.loaded_by.isdisjoint((TRANSFORMERS, BITSANDBYTES)):
        return None
    bits = 16.0 if form.label in _HALVES else form.bits
    if bits in _BITSANDBYTES:
        return float(loaded_bytes(of_shape(made), "bf16", _BITSANDBYTES[bits]))
    if form.loaded_by is None and (
        form.bits is not None or form.label in ALL_QUANTS or _is_gguf(form.tensors)
    ):
        return None
    return float(sum(tensor.bytes for tensor in form.tensors))


# Weights split between a GPU and its host CPU: the place of each tensor, the bytes that a decode step reads
# of each side, and the bound on the step's speed. Pure.
#
# As llama.cpp's `--n-cpu-moe` and `--override-tensor` have it (common/arg.cpp): each is a pattern that a
# tensor's name contains, and the first that matches decides.


CPU = "CPU"
# With LLM_FFN_EXPS_REGEX of llama.cpp's common.h.
_EXPERTS_OF = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_(?:ch|)exps")
_LAYER = re.compile(r"blk\.(\d+)\.")


class PlacementError(ValueError):
    """An invalid placement; the message is a sentence."""


@dataclass(frozen=True)
class Placement:
    """`n_cpu_moe`: layers, from the first on, whose experts are on the CPU; more than there are: all.
    `override_tensor`: text such as `ffn_down=CPU,attn=CUDA0`, patterns with the buffer type of the tensors
    that they match. `gpu_layers`: on the GPU, the last ones, the output counts as one; -1: all."""

    n_cpu_moe: int = 0
    override_tensor: str = ""
    gpu_layers: int = -1

    def first_on_gpu(self, layers: int) -> int:
        """The first of so many layers that is on the GPU, as llama.cpp divides them (`i_gpu_start` in
        llama-model.cpp); `layers`: only the output is, one more: nothing is."""
        return 0 if self.gpu_layers < 0 else max(layers + 1 - self.gpu_layers, 0)

    @cached_property
    def overrides(self) -> list[tuple[re.Pattern[str], str]]:
        """Patterns and buffer types, in order. Raises PlacementError."""
        found: list[tuple[re.Pattern[str], str]] = []
        for each in self.override_tensor.split(",") if self.override_tensor else ():
            pattern, equals, buffer = each.partition("=")
            if not (pattern and equals and buffer):
                raise PlacementError(f"override_tensor: {each!r} is not PATTERN=BUFFER, such as ffn_down=CPU")
            try:
                found.append((re.compile(pattern), buffer))
            except re.error as wrong:
                raise PlacementError(
                    f"override_tensor: {pattern!r} is not a regular expression: {wrong}"
                ) from wrong
        return found

    def buffer_of(self, name: str) -> str | None:
        """The buffer type that a tensor is given; None: none, it stays where its layer is."""
        if (experts := _EXPERTS_OF.search(name)) and int(experts[1]) < self.n_cpu_moe:
            return CPU
        return next((buffer for pattern, buffer in self.overrides if pattern.search(name)), None)

    def check(self, made: Decoder | None, names: Sequence[str] | None) -> None:
        """Raises PlacementError for a placement that matches nothing in a model with tensors of these names.
        None: not known."""
        if self.n_cpu_moe and made is not None and not made.experts:
            raise PlacementError(f"n_cpu_moe {self.n_cpu_moe}: the model has no experts")
        for pattern, buffer in self.overrides:
            if names is not None and not any(map(pattern.search, names)):
                raise PlacementError(
                    f"override_tensor: {f'{pattern.pattern}={buffer}'!r} matches no tensor of the model"
                )


def is_host(buffer: str) -> bool:
    """Whether a buffer type of llama.cpp is main memory: CPU, CPU_Mapped, CPU_REPACK, CUDA_Host, ..."""
    return buffer.startswith(CPU) or buffer.endswith("_Host")


@dataclass(frozen=True)
class Split:
    """Bytes of the weights by side, and of them those that a decode step reads. The input embedding is on the
    CPU's side, which reads a row of it; a tied one is on both."""

    cpu_bytes: int
    gpu_bytes: int
    cpu_read: int
    gpu_read: int


def split_layers(placement: Placement, made: Decoder, tensors: Sequence[Tensor]) -> Split:
    """The bytes of both sides."""
    gpu, cpu, cpu_computed = on_sides(placement, made, tensors)
    held = (sum(each.bytes for each in side) for side in (cpu, gpu))
    read = (
        sum(streamed_bytes(each, made.tied, made.expert_share) for each in side)
        for side in (cpu_computed, gpu)
    )
    return Split(*held, *read)


def on_sides(
    placement: Placement, made: Decoder, tensors: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The tensors on the GPU, those on the CPU, and of these the ones that the CPU computes with. A tied
    embedding is on both: rows are looked up on the CPU, and the output is computed where its layer is."""
    first = placement.first_on_gpu(made.count)
    gpu: list[Tensor] = []
    cpu: list[Tensor] = []
    computed: list[Tensor] = []
    for tensor in tensors:
        layer = _LAYER.match(tensor.name)
        on_gpu = (int(layer[1]) if layer else made.count) >= first
        if buffer := placement.buffer_of(tensor.name):
            on_gpu = not is_host(buffer)
        elif decoder.is_table(tensor.name):
            cpu.append(tensor)
            if not (made.tied and tensor.part == "embedding"):
                continue
            if not on_gpu:
                computed.append(tensor)
                continue
        if on_gpu:
            gpu.append(tensor)
        else:
            cpu.append(tensor)
            computed.append(tensor)
    return gpu, cpu, computed


def side_models(
    placement: Placement, made: Decoder, tensors: Sequence[Tensor], kv_element_bytes: float
) -> tuple[Model, Model]:
    """What the GPU and the CPU hold: each its layers with their part of the cache, and its weights."""
    layers, first = list(made.layers()), placement.first_on_gpu(made.count)
    gpu, cpu, _ = on_sides(placement, made, tensors)
    found = []
    for part, held in ((layers[first:], gpu), (layers[:first], cpu)):
        of_side = replace(made, runs=decoder.in_runs(part))
        kv = decoder.kv_elements_per_token(of_side) * kv_element_bytes
        found.append(Model(of_side, sum(each.bytes for each in held), 0.0, kv))
    return found[0], found[1]


def step_s(split: Split, cpu_bytes_per_s: float, gpu_bytes_per_s: float = math.inf) -> float:
    """Least seconds of a decode step for the weights: the sides take turns, layer by layer, so their times
    add. What crosses the bus is a token's activations, a few KB a layer, and does not count."""
    return split.cpu_read / cpu_bytes_per_s + split.gpu_read / gpu_bytes_per_s
