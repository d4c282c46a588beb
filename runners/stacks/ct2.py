"""One model in CTranslate2: converted to its own format once, then decoded greedily token by token."""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "ctranslate2==4.8.5", "torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "numpy==2.2.6",
# ]
#
# [tool.harness]
# summary = "CTranslate2: int8 and float32 on CPUs; 16-bit types need a GPU, where it has never run"
# weights = "hf"
# named = ["quant"]
# made = ["quant"]
#
# # Those whose logits were those of transformers 5.23. Not llama3's scaling, which the converter leaves
# # without the original context; gemma2's capped logits; gemma3's windows; phi3, which it does not convert.
# [tool.harness.architectures]
# gemma = []
# llama = ["linear"]
# mistral = ["linear"]
# qwen2 = ["linear"]
# qwen3 = ["linear"]
#
# [tool.harness.cannot]
# context = "CTranslate2 keeps no context between two calls"
# dequantize = "CTranslate2 fuses matrices and renames them: compared with the checkpoint alone"
# max_ctx = "CTranslate2 fills a context only by decoding, which takes hours: use a workload of kind grow"
#
# [[tool.harness.limits]]
# when = { quant = ["int8_bfloat16", "int8_float16", "bfloat16", "float16"] }
# device = "cuda"
# message = "Requested compute type, but the target device or backend do not support efficient computation."
#
# [[tool.harness.limits]]
# when = { quant = ["bfloat16", "int8_bfloat16"] }
# compute_capability = "8.0"
# message = "Requested compute type, but the target device or backend do not support efficient computation."
#
# [tool.harness.options.quant]
# choices = ["int8", "float32", "int8_bfloat16", "int8_float16", "bfloat16", "float16"]
# default = "int8"
# help = "type of all matrices, embeddings included; int8: the rest in float32, its compute type int8_float32"
#
# [tool.harness.options.gemm]
# choices = ["auto", "mkl", "onednn"]
# default = "auto"
# help = "library of a CPU's matrix products; auto: MKL on Intel, oneDNN on AMD, Ruy on Arm; ignored by a GPU"
#
# [tool.harness.options.threads]
# type = "int"
# minimum = 1
# default-from = "threads"
# help = "CPU threads of prompt and decode"
#
# # torch and transformers load the checkpoint for its converter; a measured process imports neither.
# [tool.harness.env.cpu]
# device = "cpu"
# imports = ["ctranslate2"]
# variables = { UV_TORCH_BACKEND = "cpu" }
#
# # Of CUDA 12, which the wheel opens by name; torch may have that of another.
# [tool.harness.env.cuda]
# device = "cuda"
# dependencies = ["nvidia-cublas-cu12==12.9.3.13"]
# imports = ["ctranslate2"]
# variables = { UV_TORCH_BACKEND = "auto" }
# ///

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from runners.protocol import Refused, Request, Say, not_a_number
from runners.weights.safetensors import json_object, staged, stored_in

DOES_NOT_FIT: tuple[type[BaseException], ...] = (MemoryError,)

# By `quant`, the compute type that CTranslate2 gets and reports. Its own "int8" would leave the type of the
# rest to the file and the device; what the device lacks of these it refuses.
COMPUTE_TYPES = {"int8": "int8_float32"}
COMPUTE_TYPES |= {n: n for n in ("float32", "int8_bfloat16", "int8_float16", "bfloat16", "float16")}
QUANTS = {compute_type: quant for quant, compute_type in COMPUTE_TYPES.items()}
# Without end_token the end of text would end a decode.
GREEDY = {"sampling_topk": 1, "end_token": [], "cache_static_prompt": False}
GEMMS = {"MKL": "mkl", "DNNL": "onednn"}  # as CTranslate2 logs them
SATURATES = (
    "oneDNN adds pairs of int8 products in 16 bits on a CPU without VNNI, which cuts large sums off:"
    " --check-weights shows how far its logits are off; gemm: mkl comes nearer"
)
_NO_ROOM = re.compile(r"failed to allocate|out of memory|bad_alloc")

# A model.bin, as save() of ctranslate2.specs.model_spec writes it: binary version 6.


BINARY_VERSION = 6
TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
EMBEDDING, HEAD = "decoder/embeddings/weight", "decoder/projection/weight"
ATTENTION = "decoder/layer_0/self_attention"
MATRIX, PARAMETERS = "/weight", ("/weight", "/bias", "/gamma", "/beta")
COMPENSATION_BYTES = 4  # an int32 for each output of a layer


@dataclass(frozen=True)
class Variable:
    """A tensor or, without a shape, a setting; `value`: its, if it is a whole number."""

    shape: tuple[int, ...]
    type: str
    bytes: int
    value: int


@dataclass(frozen=True)
class ModelFile:
    """`names`: of all tensors and settings; equal ones, which the file has once, have several. `held`: what
    the file has."""

    names: dict[str, Variable]
    held: list[Variable]
    tied: bool

    @classmethod
    def read(cls, path: Path) -> ModelFile:
        """Raises ValueError for a file that is cut short, or of another version."""
        try:
            with path.open("rb") as file:
                names, aliases = _index(file)
        except (struct.error, IndexError, KeyError, ValueError) as odd:
            raise ValueError(f"{path}: is cut short, or no model of this version of CTranslate2") from odd
        held = list(names.values())
        names |= {alias: names[name] for alias, name in aliases.items()}
        return cls(names, held, aliases.get(HEAD) == EMBEDDING)

    def setting(self, name: str, default: int) -> int:
        return self.names[name].value if name in self.names else default

    @property
    def matrices(self) -> dict[str, Variable]:
        """What CTranslate2 quantizes: all linear layers and the embedding."""
        return {name: each for name, each in self.names.items() if name.endswith(MATRIX)}

    @property
    def parameters(self) -> int:
        """Equal tensors each count, but not an lm_head that is the embedding."""
        every = (each for name, each in self.names.items() if name.endswith(PARAMETERS))
        return sum(prod(each.shape) for each in every) - self.tied * prod(self.names[HEAD].shape)

    def bytes_loaded(self, shifts: bool) -> int:
        """Bytes of all tensors as loaded. `shifts`: with the sums for products of inputs shifted to unsigned
        8 bits, of each linear layer."""
        linear = [each for name, each in self.matrices.items() if shifts and name != EMBEDDING]
        sums = sum(COMPENSATION_BYTES * each.shape[0] for each in linear if each.type == "int8")
        return sums + sum(each.bytes for each in self.held if each.shape)


def _index(file: BinaryIO) -> tuple[dict[str, Variable], dict[str, str]]:
    """The variables, and the names of others with the same values."""

    def number(kind: str) -> int:
        (found,) = struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))
        return int(found)

    def text() -> str:
        return file.read(number("H"))[:-1].decode()

    if number("I") != BINARY_VERSION:
        raise ValueError
    text(), number("I")  # name and revision of the layout, which CTranslate2 checks
    found = {}
    for _ in range(number("I")):
        name = text()
        shape = tuple(number("I") for _ in range(number("B")))
        kind, size = TYPES[number("B")], number("I")
        value = 0 if shape else int.from_bytes(file.read(size), "little", signed=True)
        found[name] = Variable(shape, kind, size, value)
        file.seek(size if shape else 0, os.SEEK_CUR)
    return found, {text(): text() for _ in range(number("I"))}


# Conversion of a checkpoint, once.


class Numbers:
    """In place of a tokenizer: the text of a token is its id. So the ids of a prompt are exact, whatever the
    checkpoint brings; and no token ends a decode."""

    bos_token = eos_token = unk_token = pad_token = "0"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self._vocab_size)}


def convert(request: Request, say: Say) -> dict[str, Any]:
    """Make the folder files["target"] by CTranslate2's converter. Options: as for `load`.

    Raises Refused for a quantized checkpoint, ValueError for one that is not whole.
    """
    say("importing torch")
    import torch
    import transformers
    from ctranslate2.converters import TransformersConverter

    from runners.hf import loading

    class Converter(TransformersConverter):
        def load_model(self, kind: Any, name: str, **given: Any) -> Any:
            say("loading the checkpoint")
            only = {"use_safetensors": True, "local_files_only": True}  # a pickle may run code
            seen = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, found = kind.from_pretrained(name, **only, **seen, **given)
            loading.check_whole_checked(source, model, found)
            say("converting")
            return model

        def load_tokenizer(self, *_: Any, **__: Any) -> Numbers:
            return Numbers(json_object(source / "config.json")["vocab_size"])

    began = time.monotonic()
    source, target = Path(request.files["source"]), Path(request.files["target"])
    loading.check_unquantized(source, stored_in(source), request.stack)
    if json_object(source / "config.json").get("use_sliding_window"):
        raise Refused(
            f"{source}: has use_sliding_window, which CTranslate2 leaves out: it would compute another model"
        )
    torch.set_num_threads(request.options["threads"])
    transformers.utils.logging.disable_progress_bar()
    with staged(source) as folder:
        Converter(str(folder)).convert(str(target), quantization=COMPUTE_TYPES[request.options["quant"]])
    tensors = len(ModelFile.read(target / "model.bin").held)
    versions = loading.versions("ctranslate2")
    return {"tensors": tensors, "seconds": time.monotonic() - began, "versions": versions}


def probe(request: Request, say: Say) -> dict[str, Any]:
    """The device by torch: CTranslate2 shows no kernel to measure. See runners.hf.probe."""
    from runners.hf.probe import probe as probe_by_torch

    return probe_by_torch(request, say)


# The loaded model.


def load(request: Request) -> Ct2Session:
    """Load the converted files. Raises the errors of CTranslate2, for a compute type that the device lacks a
    ValueError; ValueError for weights that are no numbers, Refused for files of another type."""
    session = Ct2Session(request)
    session.settle()
    return session


class Ct2Session:
    """One model; see runners.protocol.Session."""

    chunk = 512

    def __init__(self, request: Request) -> None:
        if os.environ.get("OMP_DYNAMIC", "false").lower() not in ("", "0", "false"):
            raise ValueError("unset OMP_DYNAMIC: on fewer threads than it asks for, oneDNN computes nonsense")
        folder = Path(request.files["made"])
        self._on_cpu = request.device == "cpu"
        self._file = ModelFile.read(folder / "model.bin")
        self._config = json_object(Path(request.model["path"]) / "config.json")
        self._weights_type = COMPUTE_TYPES[request.options["quant"]].partition("_")[0]
        for name, each in self._file.matrices.items():
            if each.type != self._weights_type:  # loading would convert it
                raise Refused(f"{folder}: has {name} in {each.type}; expected {self._weights_type}")
        self._threads: int | None = None
        self._gemm = request.options["gemm"]
        if self._gemm != "auto":
            os.environ["CT2_USE_MKL"] = str(int(self._gemm == "mkl"))  # read by the import
        import ctranslate2

        if not self._on_cpu:
            _open_cublas()
        self._ids: list[int] = []  # that were fed
        with _memory_errors(), _logged() as self._log:
            self._generator = ctranslate2.Generator(
                str(folder),
                device="cpu" if self._on_cpu else "cuda",  # the only GPU visible to this process
                compute_type=COMPUTE_TYPES[request.options["quant"]],
                inter_threads=1,
                intra_threads=request.options["threads"],
            )

    def settle(self) -> None:
        """Take a step: the engine's threads start, and are counted."""
        before = _os_threads()
        self.empty(0)
        logits = self.feed([0, 0], 1)
        if not np.isfinite(logits).all():
            raise ValueError(not_a_number(1))
        after = _os_threads()
        if self._on_cpu and before and after:
            self._threads = 1 + after - before  # the first, which feeds OpenMP's, started while loading
        self.empty(0)

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """The rest runs when iterated. The engine begins with an empty cache: it keeps that of a
        `static_prompt` alone. All of the prompt but its last token is one pass."""
        self._check_window(prompt)
        return self._decode(_words(prompt), new_tokens)

    def _decode(self, words: list[str], new_tokens: int) -> Iterator[int]:
        with _memory_errors():
            for step in self._generator.generate_tokens(words, max_length=new_tokens, **GREEDY):
                yield step.token_id

    def _check_window(self, prompt: list[int]) -> None:
        window = self._file.setting(f"{ATTENTION}/sliding_window", 0)
        if 0 < window < len(prompt):
            tokens = f"{len(prompt)} tokens at once are more than the model's sliding window of {window}"
            raise ValueError(f"{tokens}, where CTranslate2 computes another model")

    def empty(self, tokens: int) -> None:
        """Forget what was fed. The cache grows: there is room."""
        self._ids = []

    def feed(self, ids: list[int], keep: int) -> np.ndarray:
        """Logits after the last `keep` of `ids`, float32. All ids so far are evaluated again; the last alone
        by a step of generate(), several by a pass that only this takes."""
        self._ids = [*self._ids, *ids]
        self._check_window(self._ids)
        with _memory_errors():
            if keep > 1:
                return _float32(self._generator.forward_batch([self._ids]))[0, -keep:]
            steps: list[Any] = []
            self._generator.generate_batch(
                [_words(self._ids)],
                max_length=1,
                **GREEDY,
                include_prompt_in_result=False,
                return_logits_vocab=True,
                callback=lambda step: bool(steps.append(step)),
            )
        return _float32(steps[0].logits)

    def counters(self) -> dict[str, Any]:
        """None: CTranslate2 has no clock, and counts no evaluated tokens."""
        return {}

    def facts(self) -> dict[str, Any]:
        """The model's facts: types and device by the generator, tensors by its file, kernels by its log."""
        file, compute_type = self._file, self._generator.compute_type
        weights_type, _, rest = compute_type.partition("_")
        backend = "GEMM_S8 backend" if weights_type == "int8" else "SGEMM backend"
        backend = self._log.get(backend, "") if self._on_cpu else ""
        gemm = GEMMS.get(backend.partition(" ")[0])
        saturates = weights_type == "int8" and gemm == "onednn" and not _has_vnni()
        embedding = [file.names[name] for name in (EMBEDDING, f"{EMBEDDING}_scale") if name in file.names]
        packages = {name: version(name) for name in ("ctranslate2", "numpy")}
        return {
            "versions": packages | {"python": platform.python_version()},
            "quant": QUANTS.get(compute_type, compute_type),
            "kernel_asked": f"Dense[{self._weights_type}]",
            "kernels": {f"Dense[{weights_type}]": len(file.matrices) - 1, f"Embeddings[{weights_type}]": 1},
            "leftovers": [],
            "devices": {"weights": {self._generator.device: len(file.held)}},
            "options": {"gemm": gemm if self._gemm != "auto" else None, "threads": self._threads},
            "settings": {"compute_type": compute_type, "vocabulary": "ids as text", "cpu": self._log},
            "warnings": [SATURATES] if saturates else [],
            "model_bytes": file.bytes_loaded("u8s8 preferred: true" in backend),
            "parameters": file.parameters,
            "tied": file.tied,
            "input_embedding_bytes": sum(each.bytes for each in embedding),
            "vocab_size": file.names[EMBEDDING].shape[0],
            "trained_context": self._config.get("max_position_embeddings"),
            **_cache_facts(file, ITEM_BYTES[rest or weights_type]),
        }

    def close(self) -> None:
        del self._generator  # a thread of it that lives on would end the process with an abort


def _cache_facts(file: ModelFile, item_bytes: int) -> dict[str, Any]:
    """How a step reads the cache. Keys and values of grouped heads are repeated for all heads before they
    are cached, in the type of the activations; each step copies the cache (src/layers/attention.cc)."""
    layers = sum(name.endswith("/self_attention/linear_0/weight") for name in file.names)
    heads, window = file.setting("decoder/num_heads", 1), file.setting(f"{ATTENTION}/sliding_window", 0)
    of_hidden = file.names[f"{ATTENTION}/linear_1/weight"].shape[0] // heads
    head_dim = file.setting(f"{ATTENTION}/head_dim", of_hidden)
    cached = 1 if file.setting(f"{ATTENTION}/multi_query", 0) else heads
    return {
        "kv_read": "window" if window else "copied",
        "window": window or None,
        "kv_bytes_per_token": 2 * layers * cached * head_dim * item_bytes,
    }


def _open_cublas() -> None:
    """Load the libraries that CTranslate2 opens by name, from where the loader would not look."""
    folder = Path(next(iter(import_module("nvidia.cublas").__path__)), "lib")
    for name in ("libcublasLt.so.12", "libcublas.so.12"):
        ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)


def _words(ids: list[int]) -> list[str]:
    return [str(token) for token in ids]


def _float32(logits: Any) -> np.ndarray:
    from ctranslate2 import DataType, Device

    return np.array(logits.to(DataType.float32).to_device(Device.cpu))


def _has_vnni() -> bool:
    """Whether an x86 CPU has instructions that add int8 products in 32 bits; true where that is unknown."""
    known = Path("/proc/cpuinfo")
    return not known.exists() or re.search(r"\bavx(512)?_vnni\b", known.read_text()) is not None


def _os_threads() -> int | None:
    """Threads of this process; None off Linux."""
    return len([*Path("/proc/self/task").iterdir()]) if sys.platform == "linux" else None


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn a RuntimeError of CTranslate2 that means a failed allocation into a MemoryError."""
    try:
        yield
    except RuntimeError as failure:
        if _NO_ROOM.search(str(failure)):
            raise MemoryError(str(failure)) from failure
        raise


@contextmanager
def _logged() -> Iterator[dict[str, str]]:
    """What CTranslate2 logs meanwhile of its kernels, by its words. It logs to standard error alone."""
    import ctranslate2

    found: dict[str, str] = {}
    ctranslate2.set_log_level(logging.INFO)
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            ctranslate2.set_log_level(logging.WARNING)
            file.seek(0)
            text = file.read().decode(errors="replace")
            print(text, end="", file=sys.stderr)
    found |= dict(re.findall(r"\[info\]\s+(?:- )?(CPU|Selected ISA|\w+ backend|Use Intel MKL): (.+)", text))
