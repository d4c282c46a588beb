"""llama.cpp's library through ctypes, or in its place ik_llama.cpp's: the one that the environment has."""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import llama_cpp
    import llama_cpp.llama_cpp as lib
    from llama_cpp._ggml import libggml
except ModuleNotFoundError as lack:
    if lack.name != "llama_cpp":  # it is installed, and what it imports is not
        raise
    try:
        import runners.llamacpp.ik as lib
        from runners.llamacpp.ik import libggml
    except ModuleNotFoundError as other:
        if other.name == "ik_llama_cpp":
            raise ModuleNotFoundError("No module named 'llama_cpp', nor 'ik_llama_cpp'") from None
        raise other from None

from runners.protocol import Request

if older := not hasattr(lib, "LLAMA_LOAD_MODE_NONE"):  # llama-cpp-python up to 0.3.34
    lib.LLAMA_LOAD_MODE_NONE, lib.LLAMA_LOAD_MODE_MMAP = 0, 1

# Tensors that a request puts into another buffer than their layer's: the list that llama.cpp takes, and
# whether its log has each of them there.


# LLM_FFN_EXPS_REGEX in llama.cpp's common/common.h, which its --n-cpu-moe uses; harness/theory/memory.py
# has the same.
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
MAIN_MEMORY = "CPU"


class Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override"""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def overrides(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Patterns and buffer types, in order; the first that matches a tensor's name decides."""
    found = [(rf"blk\.{layer}{EXPERTS}", MAIN_MEMORY) for layer in range(options.get("n_cpu_moe") or 0)]
    given = options.get("override_tensor")
    pairs = [each.partition("=") for each in given.split(",")] if given else []
    return [*found, *((pattern, buffer) for pattern, _, buffer in pairs)]


def array_of(wanted: list[tuple[str, str]]) -> Any:
    """For llama_model_params, ended by a null; llama.cpp keeps the pointer as long as the model. Raises
    ValueError for a buffer type that this build lacks."""
    known = _buffer_types()
    if missing := [buffer for _, buffer in wanted if buffer not in known]:
        raise ValueError(f"override_tensor: unknown buffer type {missing[0]}; there are {', '.join(known)}")
    return (Override * (len(wanted) + 1))(
        *((pattern.encode(), known[buffer]) for pattern, buffer in wanted), (None, None)
    )


def placed(
    wanted: list[tuple[str, str]], sizes: Mapping[str, int], found: Mapping[str, str]
) -> dict[str, Any] | None:
    """Where the tensors that `wanted` matches are, None if there is none: their number and bytes by buffer
    type, and the `misplaced`. `sizes`: of all tensors; `found`: the buffer types that llama.cpp logged."""
    if not wanted:
        return None
    patterns = [(re.compile(pattern), buffer) for pattern, buffer in wanted]
    tensors: dict[str, int] = {}
    held: dict[str, int] = {}
    misplaced = []
    for name, size in sizes.items():
        requested = next((buffer for pattern, buffer in patterns if pattern.search(name)), None)
        if requested is None:
            continue
        at = found.get(name)
        if at is None or _memory_of(at) != _memory_of(requested):
            misplaced.append({"tensor": name, "asked": requested, "found": at})
        if at is not None:
            tensors[at] = tensors.get(at, 0) + 1
            held[at] = held.get(at, 0) + size
    return {"tensors": tensors, "bytes": held, "misplaced": misplaced}


def _memory_of(buffer: str) -> str:
    """llama.cpp takes a faster buffer type of main memory for CPU: repacked, or pinned for a GPU."""
    return MAIN_MEMORY if buffer.startswith(MAIN_MEMORY) or buffer.endswith("_Host") else buffer


def _buffer_types() -> dict[str, int]:
    """Each device's own, by name, as common/arg.cpp collects them."""
    ggml: Any = libggml
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ggml.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
    ggml.ggml_backend_buft_name.restype = ctypes.c_char_p
    found = {}
    for index in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(index)))
        buffer = ggml.ggml_backend_dev_buffer_type(device)
        if buffer:
            found[ggml.ggml_backend_buft_name(ctypes.c_void_p(buffer)).decode()] = buffer
    return found


# llama.cpp's library: its types, devices and log, and how a model is opened. No decoding here.
#
# The log goes to stderr, and is parsed for facts that the API lacks. Buffer sizes are in MiB with two
# decimals, so bytes parsed from it are exact to RESOLUTION_BYTES.


os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # an abort dies at once, instead of attaching gdb for seconds


# File types and KV types by the names we use. The binding lacks GGML_TYPE_BF16: 30 in ggml.h.
FTYPES = getattr(lib, "FTYPES", None) or {"f32": lib.LLAMA_FTYPE_ALL_F32} | {
    name: getattr(lib, f"LLAMA_FTYPE_MOSTLY_{name.upper()}")
    for name in (
        *("f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "q2_k", "q3_k_s", "q3_k_m", "q3_k_l"),
        *("q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "mxfp4_moe", "q2_k_s", "tq1_0", "tq2_0"),
        *("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "iq3_s", "iq3_m"),
        *("iq4_nl", "iq4_xs"),
    )
}
KV_TYPES = getattr(lib, "KV_TYPES", None) or {"bf16": 30} | {
    name: getattr(lib, f"GGML_TYPE_{name.upper()}")
    for name in ("f32", "f16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1")
}
RESOLUTION_BYTES = round(0.01 * 2**20)

_GUESSED = 1024  # LLAMA_FTYPE_GUESSED: a flag for a file that does not name its type
_DEVICE_TYPES = ("cpu", "gpu", "integrated gpu", "accelerator", "meta")  # enum ggml_backend_dev_type
# enum ggml_log_level in ggml.h; the binding's own table is out of date
_DEBUG, _WARN, _ERROR, _CONTINUED = 1, 3, 4, 5

# Where a pattern has two forms, one is ik_llama.cpp's.
_BUFFER = re.compile(r"(\S+) +(?:(model|KV|RS|output|compute) )?buffer size = +([\d.]+) MiB")
_KV = re.compile(r"(?:llama_kv_cache: |KV self )size += +([\d.]+) MiB.*, K \((\w+)\): .*, V \((\w+)\): ")
_STATES = re.compile(r"llama_memory_recurrent: size = +([\d.]+) MiB")
_KV_LAYER = re.compile(r"llama_(?:kv_cache:|memory_recurrent,) layer +\d+: dev = (\S+)")
_LAYER = re.compile(r"load_tensors: layer +\d+ assigned to device ([^,]+),")
_TENSORS = re.compile(r"llama_model_loader: - type +(\S+): +(\d+) tensors")
_OVERRIDDEN = re.compile(r"tensor (\S+) \(\d+ MiB \S+\) buffer type overridden to (\S+)")
_REPACKED = re.compile(r"repack tensor \S+ with (\S+)")
_ALL_REPACKED = re.compile(r"=+ Repacked (\d+) tensors")
_FLASH = re.compile(r"llama_(?:context|init_from_model): flash_attn += (\w+)")
_UNIFIED = re.compile(r"kv_unified += (\w+)")
_ROTATED = re.compile(r"attn_rot_([kv]) = (\d)")
_SPLITS = re.compile(r"(?:sched_reserve|init_from_model): graph.* splits = (\d+)(?: / (\d+))?")
_UNUSED = re.compile(r"model has unused tensor (\S+) \(size = (\d+) bytes\)")
_ARCHITECTURE = re.compile(r"general\.architecture +str += (\S+)")
_TOKENS_IN_FILE = re.compile(r"tokenizer\.ggml\.tokens +arr\[str,(\d+)\]")
_CONVERTED = re.compile(r"no FlashAttention vector kernel compiled for K/V types (\w+)-(\w+)")
_NO_ROOM = re.compile(
    r"(unable|failed) to (allocate|reserve)|could not reserve|[Oo]ut of memory|bad_alloc|[Cc]annot allocate"
)


_PARTS = {"KV": "kv", "RS": "kv", None: "model"}  # states of recurrent layers count with the KV cache


class DoesNotFit(Exception):
    """The model or its context does not fit in memory."""


class Log:
    """The only listener of llama.cpp's log, of which there is one per process."""

    def __init__(self) -> None:
        self.forget()
        self.warnings: list[str] = []  # which llama.cpp writes once a process
        self._on_line: Callable[[str], None] | None = None
        self._level = 0
        self._partial = ""
        self._callback = lib.llama_log_callback(self._hear)  # kept: C holds a bare pointer to it
        lib.llama_log_set(self._callback, ctypes.c_void_p(0))

    def forget(self) -> None:
        """Reset for another model."""
        self.memory: dict[str, dict[str, int]] = {}
        self.assigned: list[str] = []  # the device of each layer, and last that of the output
        self.tensors: dict[str, int] = {}
        self.repacked: Counter[str] = Counter()
        self.overridden: dict[str, str] = {}  # by tensor, the buffer type that an override gave it
        self.unused: dict[str, int] = {}  # bytes by tensor that is not loaded: of layers that draft a token
        self.architecture = ""
        self.tokens_in_file = 0
        self.forget_context()

    def forget_context(self) -> None:
        """Reset for another context of the same model."""
        self.memory = {part: sizes for part, sizes in self.memory.items() if part == "model"}
        self.kv_layers: Counter[str] = Counter()
        self.kv_bytes = 0
        self.kv_types: tuple[str | None, str | None] = None, None
        self.flash_attn: bool | None = None
        self.rotated: dict[str, bool] = {}
        self.kv_unified: bool | None = None
        self.splits: dict[str, int] | None = None  # of the graph of a prompt, and of a decode step
        self._errors: list[str] = []

    @property
    def layers(self) -> Counter[str]:
        """The number of layers on each device."""
        return Counter(self.assigned)

    def failure(self, what: str) -> Exception:
        """The exception for a failure of `what`, with llama.cpp's own message.

        The first error is the cause; later ones only repeat it.
        """
        errors = self._errors or ["llama.cpp logged no reason"]
        cause = re.sub(r"^\w+: (error loading model: )?", "", errors[0])
        out_of_memory = any(_NO_ROOM.search(line) for line in errors)
        return (DoesNotFit if out_of_memory else RuntimeError)(f"{what}: {cause}")

    def vocabulary_error(self) -> str | None:
        """What llama.cpp does not read in the model's vocabulary; None: that is not why it failed."""
        found = (line.partition("error loading model vocabulary: ")[2] for line in self._errors)
        return next(filter(None, found), None)

    @contextmanager
    def listening(self, on_line: Callable[[str], None]) -> Iterator[None]:
        self._on_line = on_line
        try:
            yield
        finally:
            self._on_line = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is logged in the block is forgotten."""
        kept = dict(vars(self))
        self.forget_context()
        try:
            yield
        finally:
            vars(self).update(kept)

    def _hear(self, level: int, text: bytes, _user: Any) -> None:
        if level != _CONTINUED:
            self._level = level
        if self._level != _DEBUG:  # one line per repacked tensor, and more
            os.write(2, text)
        *lines, self._partial = (self._partial + text.decode("utf-8", "replace")).split("\n")
        for line in lines:
            self._read(line)

    def _read(self, line: str) -> None:
        if self._on_line:
            self._on_line(line)
        if self._level == _ERROR and line.strip():
            self._errors.append(line.strip())
        elif self._level == _WARN and (found := _CONVERTED.search(line)):
            types = f"K of type {found[1]} with V of type {found[2]}"
            self.warnings.append(f"no FlashAttention kernel for {types}: each step converts both to f16")
        elif found := _UNUSED.search(line):
            self.unused[found[1]] = int(found[2])
        elif found := _ARCHITECTURE.search(line):
            self.architecture = found[1]
        elif found := _TOKENS_IN_FILE.search(line):
            self.tokens_in_file = int(found[1])
        elif found := _REPACKED.search(line):
            self.repacked[found[1]] += 1
        elif found := _ALL_REPACKED.search(line):
            self.repacked["rows"] = int(found[1])
        elif "sched_reserve: reserving" in line:
            self.memory["compute"] = {}  # a later reservation replaces the previous one
        elif found := _BUFFER.search(line):
            part = self.memory.setdefault(_PARTS.get(found[2], found[2]), {})
            part[found[1]] = part.get(found[1], 0) + round(float(found[3]) * 2**20)
        elif found := _KV.search(line):
            self.kv_bytes += round(float(found[1]) * 2**20)
            self.kv_types = found[2].lower(), found[3].lower()
        elif found := _STATES.search(line):
            self.kv_bytes += round(float(found[1]) * 2**20)
        elif found := _OVERRIDDEN.search(line):
            self.overridden[found[1]] = found[2]
        elif found := _LAYER.search(line):
            self.assigned.append(found[1])
        elif found := _KV_LAYER.search(line):
            self.kv_layers[found[1]] += 1
        elif found := _TENSORS.search(line):
            self.tensors[found[1]] = int(found[2])
        elif found := _SPLITS.search(line):
            self.splits = {"prompt": int(found[1]), "step": int(found[2] or found[1])}
        elif found := _UNIFIED.search(line):
            self.kv_unified = found[1] == "true"
        elif found := _FLASH.search(line):
            self.flash_attn = found[1] in ("enabled", "1")
        else:
            self.rotated.update((which, state == "1") for which, state in _ROTATED.findall(line))


LOG = Log()
lib.llama_backend_init()
_KEPT: list[Any] = []  # llama.cpp holds a bare pointer to them as long as a model lives


def load_model(path: Path, device: str, **params: Any) -> int:
    """A llama_model pointer, to be freed by llama_model_free. `params`: fields of llama_model_params."""
    if not path.is_file():
        raise FileNotFoundError(f"no such model file: {path}")
    given = lib.llama_model_default_params()
    nothing = (ctypes.c_void_p * 1)(None)
    if device == "cpu":
        given.n_gpu_layers = 0
        given.devices = ctypes.addressof(nothing)  # an empty list: a GPU build would use its GPU for prompts
    else:
        if not lib.llama_supports_gpu_offload():
            raise RuntimeError(f"device {device}: this llama.cpp build has no GPU support, or finds no GPU")
        given.split_mode = lib.LLAMA_SPLIT_MODE_NONE  # the only GPU visible to this process
    for name, value in params.items():
        setattr(given, name, value)
    if older:
        given.use_mmap = params.get("load_mode") == lib.LLAMA_LOAD_MODE_MMAP
    LOG.forget()
    model = lib.llama_model_load_from_file(os.fsencode(path), given)
    if not model and (why := LOG.vocabulary_error()):
        LOG.warnings.append(f"llama.cpp does not read its vocabulary ({why}): it runs without, on fixed ids")
        _KEPT.append(_without_vocabulary(LOG.architecture, LOG.tokens_in_file))
        given.kv_overrides = _KEPT[-1]
        LOG.forget()
        model = lib.llama_model_load_from_file(os.fsencode(path), given)
    if not model:
        raise LOG.failure(path.name)
    return model


def _without_vocabulary(architecture: str, tokens: int) -> Any:
    """Overrides of a file's metadata, which has so many tokens: no tokenizer, and a model of that size."""
    found = (lib.llama_model_kv_override * 3)()  # the last one's empty key ends them
    found[0].tag, found[0].key = lib.LLAMA_KV_OVERRIDE_TYPE_STR, b"tokenizer.ggml.model"
    found[0].value.val_str = b"none"
    if tokens:
        found[1].tag, found[1].key = lib.LLAMA_KV_OVERRIDE_TYPE_INT, f"{architecture}.vocab_size".encode()
        found[1].value.val_i64 = tokens
    return found


def model_params(request: Request) -> dict[str, Any]:
    """Fields of llama_model_params, by the request's options. Raises ValueError for an unknown buffer
    type."""
    found = {"use_extra_bufts": request.options["repack"]}
    if request.device != "cpu":
        found["n_gpu_layers"] = request.options["gpu_layers"]
    if wanted := overrides(request.options):
        _KEPT.append(array_of(wanted))
        found["tensor_buft_overrides"] = ctypes.addressof(_KEPT[-1])
    return found


def make_context(
    model: int, options: dict[str, Any], outputs: int = 0, on_node: Any = None, sequences: int = 1
) -> int:
    """A llama_context pointer, to be freed by llama_free. `outputs`: the most tokens at once with logits, 0
    for all. `on_node`: the evaluation callback. `sequences`: which share n_ctx in equal parts, each a
    multiple of 256 tokens. Raises DoesNotFit, or the error of llama.cpp."""
    params = lib.llama_context_default_params()
    if on_node is not None:
        params.cb_eval = on_node
    params.n_ctx = options["n_ctx"]
    params.n_batch = options["n_batch"]
    params.n_ubatch = options["n_ubatch"]
    params.n_outputs_max = outputs
    params.n_seq_max = sequences
    params.n_threads = params.n_threads_batch = options["threads"]
    params.flash_attn_type = (
        lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if options["flash_attn"] else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.type_k = KV_TYPES[options["type_k"]]
    params.type_v = KV_TYPES[options["type_v"]]
    params.swa_full = bool(options.get("swa_full"))
    params.no_perf = False  # llama.cpp's own clock, to check ours against
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise LOG.failure(f"context of {options['n_ctx']} tokens")
    return int(context)


@contextmanager
def opened(path: Path, **params: Any) -> Iterator[int]:
    """A model on the CPU for as long as the block runs."""
    model = load_model(path, "cpu", **params)
    try:
        yield model
    finally:
        lib.llama_model_free(model)


def quant_of(model: int) -> str:
    """The file's type by our name, else by llama.cpp's."""
    ftype = lib.llama_model_ftype(model) & ~_GUESSED
    return next((name for name, value in FTYPES.items() if value == ftype), None) or (
        (lib.llama_ftype_name(ftype) or b"unknown").decode().lower()
    )


def metadata(model: int, key: str) -> str:
    """A value of the file's header as llama.cpp prints it, empty if missing."""
    buffer = ctypes.create_string_buffer(256)
    lib.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")


def versions() -> dict[str, str]:
    """Versions without ggml's commit, which ggml's build takes from any git repository around its folder."""
    return {
        "llama-cpp-python": llama_cpp.__version__,
        **({"llama.cpp": lib.llama_version().decode()} if hasattr(lib, "llama_version") else {}),
        "ggml": _ggml("ggml_version", ctypes.c_char_p).decode(),
    }


def system_info() -> str:
    """CPU features and build flags, by backend."""
    return lib.llama_print_system_info().decode().strip(" |")


def devices() -> list[dict[str, Any]]:
    """The devices of this build on this machine."""
    found = []
    for index in range(_ggml("ggml_backend_dev_count", ctypes.c_size_t)):
        device = ctypes.c_void_p(_ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t(index)))
        description = _ggml("ggml_backend_dev_description", ctypes.c_char_p, device)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _ggml("ggml_backend_dev_memory", None, device, ctypes.byref(free), ctypes.byref(total))
        found.append(
            {
                "name": _ggml("ggml_backend_dev_name", ctypes.c_char_p, device).decode(),
                "description": description.decode().strip(),
                "type": _DEVICE_TYPES[_ggml("ggml_backend_dev_type", ctypes.c_int, device)],
                "memory_bytes": total.value,
            }
        )
    return found


def _ggml(name: str, restype: Any, *arguments: Any) -> Any:
    function = libggml[name]
    function.restype = restype
    return function(*arguments)
