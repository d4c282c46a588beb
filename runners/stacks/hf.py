"""One model in transformers: loads a checkpoint, every weight of it from there, onto one device."""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "compressed-tensors==0.20.0",
#   "numpy==2.2.6",
# ]
#
# [tool.harness]
# summary = "transformers: 16- and 32-bit checkpoints, on CPUs and NVIDIA GPUs"
# weights = "hf"
# accepts = ["python>=3.10", "torch>=2.6", "transformers>=4.56"]
# may_lack = ["compressed-tensors"]
# named = ["dtype", "cache"]
# inheritable = ["cache", "n_ctx", "attn", "cudnn_attention", "threads", "expandable_segments", "mmap",
#   "trust_remote_code"]
# memory = "transformers"
# cannot_truncate = [{ cache = "static" }, { speculate = "draft" }]
# reference = { attn = "eager" }  # fused attention may round differently
# published = { bf16-dynamic = "bf16" }
# offers = [{ dtype = "bf16" }, { dtype = "fp16" }]
# applies = { torchao = [] }
# needs = { torchao = "torchao" }  # where it is installed every worker imports it, for 65 MB
# dequantizes = ["compressed-tensors", "fp8", "mxfp4"]
#
# # With a text_config, in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES of transformers 5.23.
# wrappers = [
#   "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "llama4", "mllama",
#   "qwen3_5", "qwen3_5_moe",
# ]
#
# [[tool.harness.limits]]
# when = { dtype = "bf16" }
# compute_capability = "8.0"
# message = "has no bf16; use dtype fp16"
#
# # CUDA programming guide, throughput of native arithmetic instructions: 2 results of 16 bits a clock on 6.1,
# # 128 of 32 bits.
# [[tool.harness.limits]]
# when = { dtype = "fp16" }
# compute_capability_except = "6.1"
# message = "computes fp16 at 1/64 of the rate of fp32; use dtype fp32"
#
# [[tool.harness.limits]]
# when = { speculate = "draft", draft = "" }
# never = true
# refuses = true
# message = "speculate: draft needs draft, the folder of the draft model's checkpoint"
#
# [[tool.harness.limits]]
# when = { speculate = "none" }
# unless = { draft = "" }
# never = true
# refuses = true
# message = "only speculate: draft has a draft model"
#
# [[tool.harness.limits]]
# when = { speculate = "draft" }
# unless = { cache = "dynamic", compile = false }
# never = true
# refuses = true
# message = "assisted generation needs cache: dynamic and compile: false"
#
# [[tool.harness.context]]
# when = { cache = "static" }
# option = "n_ctx"
# granule = 256  # finer than measured memory can resolve
# dry = false
#
# [tool.harness.first]
# order = 2
# cpu = "# - {stack: hf, dtype: bf16}           # transformers; first: harness env create hf"
# cuda = "- {stack: hf, dtype: {dtype}}                   # transformers"
#
# [tool.harness.options.dtype]
# choices = ["bf16", "fp16", "fp32"]
# default = "bf16"
# help = "type the weights are held and computed in"
#
# # Always explicit: a dynamic cache copies itself at every token, a static one is read whole.
# [tool.harness.options.cache]
# choices = ["dynamic", "static"]
# default = "dynamic"
# help = "KV cache: dynamic is copied as it grows; static is allocated whole and attended over whole"
#
# [tool.harness.options.n_ctx]
# type = "int"
# minimum = 1
# default-from = "tokens"
# help = "tokens a static cache holds; a dynamic one has no such limit"
#
# [tool.harness.options.attn]
# choices = ["sdpa", "eager"]
# default = "sdpa"
# help = "attention: PyTorch's fused one (sdpa) or plain matrix products (eager)"
#
# [tool.harness.options.cudnn_attention]
# default = true
# help = "let sdpa take cuDNN's attention where torch prefers it (H100, B200): a plan for each length"
#
# [tool.harness.options.compile]
# default = false
# help = "torch.compile of the decode step; the prompt is never compiled"
#
# [tool.harness.options.threads]
# type = "int"
# minimum = 1
# default-from = "threads"
# help = "CPU threads, for prompt and decode alike"
#
# [tool.harness.options.expandable_segments]
# default = false
# help = "let the CUDA allocator grow its segments in place rather than take new ones"
#
# [tool.harness.options.mmap]
# default = true
# help = "map the checkpoint instead of reading it into memory, for tensors used as stored"
#
# [tool.harness.options.trust_remote_code]
# default = false
# help = "run Python code that comes with the checkpoint"
#
# [tool.harness.options.speculate]
# choices = ["none", "draft"]
# default = "none"
# help = "draft: a draft model guesses tokens ahead (assisted generation of transformers)"
#
# [tool.harness.options.draft]
# type = "path"
# default = ""
# help = "the draft model's checkpoint: absolute, from ~, or relative to the config"
#
# [tool.harness.options.draft_tokens]
# type = "int"
# minimum = 1
# help = "tokens guessed at once; default: transformers' own, up to 20 while its draft model is sure"
#
# # A build of torch for the machine: without a GPU the CUDA one would be gigabytes for nothing.
# [tool.harness.env.cpu]
# device = "cpu"
# variables = { UV_TORCH_BACKEND = "cpu" }
#
# [tool.harness.env.cuda]
# device = "cuda"
# variables = { UV_TORCH_BACKEND = "auto" }
# ///

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils  # now: 85 MB of modules that a model load would import otherwise
from transformers import AutoConfig, AutoModelForCausalLM

from runners.hf import device as hf_device
from runners.hf import loading
from runners.hf.assisted import AssistedSession
from runners.hf.device import DTYPES
from runners.hf.probe import probe
from runners.hf.session import DOES_NOT_FIT, HfSession
from runners.protocol import Refused, Request
from runners.weights.safetensors import staged, stored_in

__all__ = ["DOES_NOT_FIT", "facts_of_torchao", "load", "load_model", "probe"]

QUANTS = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}  # as weights of these types are named elsewhere
DEQUANTIZED = ("compressed-tensors", "fp8", "mxfp4")
NEEDS = {"compressed-tensors": "compressed-tensors", "torchao": "torchao"}
WIDENED = (
    "the checkpoint is stored as {method}, and was dequantized to {dtype} while it was loaded: its speed,"
    " bytes and memory are those of {dtype} weights"
)
TRUSTED = "trust_remote_code: true"
_LACKING = re.compile(r"not found in your environment: (.+?)\. Run")


def load(request: Request) -> HfSession:
    """Load a checkpoint on one device. Raises the errors of load_model, Refused if it is quantized."""
    path, dtype = Path(request.model["path"]), request.options["dtype"]
    method = loading.quantization_in(path).get("quant_method")
    if method in NEEDS:
        loading.check_installed(path, NEEDS[method])
    if method not in (*DEQUANTIZED, "torchao"):
        loading.check_unquantized(path, stored_in(path), request.stack)
    model = load_model(request)
    loading.check_types(path, model, DTYPES[dtype])
    facts: dict[str, Any] = {"quant": QUANTS[dtype], "kernel_asked": "Linear"}
    if method in DEQUANTIZED:
        facts["warnings"] = [WIDENED.format(method=method, dtype=dtype)]
    elif method == "torchao":
        facts = facts_of_torchao(path, model, request)

    def describe() -> dict[str, Any]:
        return loading.model_facts(model, name=loading.held_by) | facts

    if request.options["speculate"] == "draft":
        drafts = Path(request.options["draft"])
        loading.check_unquantized(drafts, stored_in(drafts), request.stack)
        session: HfSession = AssistedSession(request, model, describe, _model_of(drafts, request))
    else:
        session = HfSession(request, model, describe)
    session.settle()
    return session


def facts_of_torchao(path: Path, model: torch.nn.Module, request: Request) -> dict[str, Any]:
    """Raises Refused for a checkpoint of which no layer is loaded as torchao's."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    counted = Counter(filter(None, map(loading.held_by, linear)))
    if not counted:
        raise Refused(f"{path}: no linear layer was loaded as torchao's")
    kernel = counted.most_common(1)[0][0]
    unpacks = request.device == "cpu" and not request.options["compile"]
    return {
        "quant": "torchao-" + kernel.partition("[")[2].removesuffix("Tensor]").lower(),
        "kernel_asked": kernel,
        "versions": loading.versions("torchao"),
        "leftovers": [name for name, m in model.named_modules() if m in linear and not loading.held_by(m)],
        "functional": loading.UNPACKS if unpacks else None,
    }


def load_model(request: Request, **more: Any) -> torch.nn.Module:
    """The model in evaluation mode, with every tensor of the checkpoint and no other weight. `more`: for
    from_pretrained.

    Raises ValueError: a type the device lacks, or see check_whole in loading.py; RuntimeError, MemoryError.
    """
    options, device = request.options, hf_device.device_of(request.device)
    memory = options.get("expandable_segments", False)
    hf_device.prepare(device, DTYPES[options["dtype"]], options["threads"], memory)
    transformers.utils.logging.disable_progress_bar()
    return _model_of(Path(request.model["path"]), request, **more)


@hf_device.memory_errors()
def _model_of(path: Path, request: Request, **more: Any) -> torch.nn.Module:
    """As load_model, of another checkpoint, once the device is prepared."""
    options, device = request.options, hf_device.device_of(request.device)
    dtype, trusted = DTYPES[options["dtype"]], options["trust_remote_code"]
    with staged(path) as folder, _explained(path):
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted, local_files_only=True)
        except ValueError as refusal:
            if "custom code" not in str(refusal):
                raise
            raise ValueError(f"{path}: contains Python code; it runs only with {TRUSTED}") from refusal
        given = getattr(config, "quantization_config", None)
        if isinstance(given, dict) and given.get("quant_method") in DEQUANTIZED:
            given["dequantize"] = True  # else by the device, or in the first forward pass
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=options["attn"],
                device_map={"": device},
                use_safetensors=True,  # a pickle may run code
                local_files_only=True,
                trust_remote_code=trusted,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # else its error refers to a table in its log
                **more,
            )
        except ValueError as refusal:
            if "scaled_dot_product_attention" not in str(refusal):
                raise
            kind = config.model_type
            raise ValueError(f"{path}: transformers has no sdpa for {kind}; set attn: eager") from refusal
    loading.check_whole_checked(path, model, found)
    loading.hold(model, options["mmap"])
    return model.eval()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raises ValueError for errors of transformers that say what to install, or refer to a table in its log.
    The original message is in the worker's log."""
    try:
        yield
    except ImportError as lack:
        found = _LACKING.search(str(lack))
        needed = found[1] if found else lack.name or str(lack).strip().splitlines()[0]
        raise ValueError(
            f"{path}: needs {needed}, which the environment of the stack lacks: run it in an interpreter of"
            " your own that has it (harness env use)"
        ) from lack
    except RuntimeError as failure:
        if "the above report" not in str(failure):
            raise
        raise ValueError(
            f"{path}: transformers cannot make the model of its config.json from its tensors; a table of them"
            " is in the worker's log"
        ) from failure
