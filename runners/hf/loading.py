"""Load a model with transformers, and say what was loaded."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from runners.hf import device
from runners.protocol import Refused, reason_of
from runners.weights.safetensors import FLOATS, NOT_WEIGHTS, Stored, json_object, stored_in
from runners.workloads.experts import Heard

# Load a model with transformers, and say what was loaded.


# The loaded model: layer classes, devices, types and bytes, counted from a torch model's modules.


PAGE_BYTES = 4096  # or a multiple of it
# Parameters of experts of which a token uses some: as in harness.theory.tensors.
_EXPERTS = re.compile(r"(?<!shared_)experts\.|block_sparse_moe\.(in|out)put_linear")
Packed = Callable[[nn.Module], dict[str, list[Tensor]]]
"""Tensors of a quantized layer besides its parameters, by kind."""


def plain(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold a tensor's data: itself, or those in a subclass such as torchao's."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in plain(getattr(tensor, name))]


def versions(*packages: str) -> dict[str, str]:
    """Versions of the packages; `packages`: those of a stack besides transformers."""
    names = ("torch", "transformers", "accelerate", "numpy", *packages)
    found = {name: importlib.metadata.version(name) for name in names}
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    return found | {"python": platform.python_version()}


@device.memory_errors()
def hold(model: nn.Module, mmap: bool) -> None:
    """Bring the weights on the CPU into memory before timing. With `mmap`, weights mapped from the checkpoint
    stay mapped, and a byte of every page is read: otherwise an unused row of the embedding would be read from
    the disk while timing. Without it they are copied, one after another."""
    mapped, copies = _mappings(), dict[tuple[Any, ...], Tensor]()
    for tensor in _on_cpu(model):
        if mmap:
            tensor.detach().reshape(-1).view(torch.uint8)[::PAGE_BYTES].sum()
        elif mapped is None or _lies_in(tensor, mapped):
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if place not in copies:
                copies[place] = tensor.detach().clone()
            tensor.data = copies[place]  # one copy of what two modules share


def is_mapped(model: nn.Module, wanted: bool) -> bool | None:
    """Whether weights are mapped from a file; None if unknown, or if `wanted` and no stored tensor is used as
    it is: all are cast, quantized, or on a GPU."""
    mapped = _mappings()
    if mapped is None:
        return None
    return any(_lies_in(tensor, mapped) for tensor in _on_cpu(model)) or (None if wanted else False)


def _on_cpu(model: nn.Module) -> Iterator[Tensor]:
    every = (inner for t in (*model.parameters(), *model.buffers()) for inner in plain(t))
    return (tensor for tensor in every if tensor.device.type == "cpu" and tensor.numel())


def _mappings() -> list[range] | None:
    """Addresses of this process that are mapped from files (Linux); None if unknown."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    fields = [line.split(maxsplit=5) for line in lines]  # addresses, rights, offset, device, inode, path
    ends = [each[0].split("-") for each in fields if each[4] != "0"]
    return [range(int(first, 16), int(last, 16)) for first, last in ends]


def _lies_in(tensor: Tensor, mapped: list[range]) -> bool:
    return any(tensor.data_ptr() in addresses for addresses in mapped)


def model_facts(
    model: nn.Module,
    packed: Packed = lambda module: {},
    name: Callable[[nn.Module], str | None] = lambda module: None,
    weights: Mapping[nn.Module, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Classes, devices, types and exact bytes of the modules; a tensor that two modules share counts once.

    `name`: of a layer's kernel, if not its class. `weights`: the number in a layer, biases included, if they
    are not parameters.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    by_type: Counter[str] = Counter()
    by_device: Counter[str] = Counter()
    mapped = _mappings() or []
    seen: set[tuple[str, int]] = set()
    for kind, tensor in _parameters_held(model, packed):
        place = (str(tensor.device), tensor.data_ptr())
        if tensor.numel() and place not in seen:
            seen.add(place)
            by_type[kind] += tensor.nbytes
            in_file = tensor.device.type == "cpu" and _lies_in(tensor, mapped)
            by_device[f"{tensor.device}{' mapped' if in_file else ''}"] += tensor.nbytes
    held = ((name, each) for name, p in model.named_parameters() for each in plain(p))
    experts = sum(tensor.nbytes for name, tensor in held if _EXPERTS.search(name))
    tied = is_tied(model)
    return {
        "kernels": dict(Counter(name(module) or type(module).__name__ for module in _leaves(model))),
        "leftovers": [],
        "devices": {
            "parameters": dict(Counter(str(p.device) for p in model.parameters())),
            "buffers": dict(Counter(str(b.device) for b in model.buffers())),
        },
        "lm_head": {
            "class": type(head).__name__,
            "dtype": str(head.weight.dtype).removeprefix("torch.") if _is_plain(head) else None,
        },
        "model_bytes": sum(by_type.values()),
        "bytes_by_type": dict(by_type),
        "memory": {"model": dict(by_device)},
        # auto-gptq separates tied matrices for Marlin: two in memory, one in the model.
        "parameters": _parameters(model, tied or ties(model.config), weights),
        "input_embedding_bytes": sum(tensor.nbytes for tensor in plain(embedding.weight)),
        "tied": tied,
        **({"expert_bytes": experts} if experts else {}),
        "vocab_size": embedding.weight.shape[0],
        "trained_context": getattr(model.config.get_text_config(), "max_position_embeddings", None),
    }


def is_tied(model: nn.Module) -> bool:
    """Whether the lm_head is the input embedding."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not _is_plain(head):
        return False
    return plain(head.weight)[0].data_ptr() == plain(embedding.weight)[0].data_ptr()


def _is_plain(head: nn.Module) -> bool:
    """Whether an lm_head holds its matrix itself: a packed one has none, or gptqmodel's account of one."""
    return isinstance(getattr(head, "weight", None), Tensor)


def ties(config: Any) -> bool:
    """Whether a config.json ties the embeddings."""
    return bool(config.get_text_config(decoder=True).tie_word_embeddings)


def compute_dtype(model: nn.Module) -> str | None:
    """The type of the norms, by our name: that of the activations; None if mixed."""
    found = {p.dtype for name, p in model.named_parameters() if "norm" in name}
    return next((name for name, dtype in device.DTYPES.items() if found == {dtype}), None)


def _leaves(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if next(module.children(), None) is None)


def _parameters_held(model: nn.Module, packed: Packed) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of weights, by the name of its type or its kind from `packed`. Other buffers and complex
    numbers are omitted: they are computed tables, not weights."""
    for module in model.modules():
        for kind, tensors in packed(module).items():  # first: of duplicates the first name counts
            yield from ((kind, tensor) for tensor in tensors)
        for parameter in module.parameters(recurse=False):
            for tensor in plain(parameter) if not parameter.is_complex() else ():
                yield str(tensor.dtype).removeprefix("torch."), tensor


def _parameters(model: nn.Module, tied: bool, weights: Mapping[nn.Module, int]) -> int:
    """Weights and biases of the model, packed or not."""
    head = model.get_output_embeddings() if tied else None
    count = 0
    for module in model.modules():
        if module is head:
            continue
        if module in weights:
            count += weights[module]
            continue
        for name, parameter in module.named_parameters(recurse=False):
            linear = name == "weight" and isinstance(module, nn.Linear)
            if not parameter.is_complex():
                count += module.in_features * module.out_features if linear else parameter.numel()
    return count


# The experts that the routers of a mixture choose in transformers: heard, or given to them. Untimed.
#
# A router chooses by torch.topk over its scores, one call a layer and forward pass, in every version of
# transformers and whatever its class is called. A function mode hears these calls.


_TOP_K = (torch.topk, torch.Tensor.topk)


class _Mode(TorchFunctionMode):
    """Lets `heard` hear, and replace, what routers choose."""

    def __init__(self, heard: Heard) -> None:
        super().__init__()
        self._heard, self._layer = heard, 0

    def next_pass(self, *_given: Any) -> None:
        """A forward pre-hook of the model."""
        self._layer = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return found
        scores = args[0].reshape(-1, args[0].shape[-1])
        own = found.indices.reshape(len(scores), -1)
        self._heard.experts = scores.shape[-1]
        followed = self._heard.hear(self._layer, own.cpu().numpy(), scores.float().cpu().numpy())
        self._layer += 1
        if followed is None:
            return found
        chosen = torch.from_numpy(followed).to(own)
        values = scores.gather(-1, chosen).view_as(found.values)
        return type(found)((values, chosen.view_as(found.indices)))


def is_mixture(model: nn.Module) -> bool:
    return any("experts" in name for name, _ in model.named_modules())


@contextmanager
def listening(model: nn.Module, given: str | None = None) -> Iterator[Heard]:
    """Hear the routers as long as the block runs. `given`: an array of `Heard.write` to follow."""
    heard = Heard(None if given is None else np.load(given))
    mode = _Mode(heard)
    hook = model.register_forward_pre_hook(mode.next_pass)
    try:
        with mode:
            yield heard
    finally:
        hook.remove()


# Tensors and kernels of a loaded model with packed linear layers, counted from its modules.


Named = Callable[[nn.Module], str | None]
"""The name of the kernel that a layer calls; None for a layer that is not packed."""

# Tensors of a packed layer -> the kinds in which a checkpoint's bytes are counted; null: by type. `B` and `s`
# are Marlin's.
KINDS = {"qweight": "qweight", "B": "qweight", "qzeros": "qzeros", "scales": "scales", "s": "scales"}
KINDS |= {"g_idx": "g_idx", "bias": None}
UNPACKS = (
    "every product unpacks the whole matrix first: it shows that the model is right, and no kernel's speed"
)


def check_whole(source: Path, trusted: bool, mixed: bool = False) -> set[str]:
    """The names of all tensors that a model of this config.json has, before it is packed.

    Raises ValueError for a checkpoint that lacks one or has others, or, unless `mixed`, in which only some
    linear layers are packed, or the lm_head too: auto-gptq and autoawq would silently leave such a layer
    uninitialized.
    """
    stored = stored_in(source)
    config = AutoConfig.from_pretrained(source, trust_remote_code=trusted, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
    if "lm_head.qweight" in stored and not mixed:
        raise ValueError(f"{source}: its lm_head is packed too, which is not supported")
    for name, tensor in model.state_dict().items():
        packed = name.removesuffix("weight") + "qweight"
        tied = name == "lm_head.weight" and config.tie_word_embeddings
        if not tied and name not in stored and packed not in stored:
            raise ValueError(f"{source}: has no {name}, which its config.json requires")
        if ".layers." in name and name in stored and tensor.dim() == 2 and not mixed:
            raise ValueError(f"{source}: has {name} unpacked besides packed layers, which is not supported")
    places = set(model.state_dict())
    layers = {name.removesuffix("qweight") for name in stored if name.endswith(".qweight")}
    layers &= {name.removesuffix("weight") for name in places}
    packed_places = {layer + part for layer in layers for part in KINDS}
    check_none_left(source, stored.keys() - places - packed_places)
    return places


def check_bits(source: Path, model: nn.Module, name: Named, bits: int) -> None:
    """Raises Refused if a packed layer has another number of bits, as rules by layer (`dynamic`) give it. A
    kernel that knows one number alone does not name it."""
    found = {getattr(module, "bits", bits) for module in model.modules() if name(module)}
    if others := sorted(found - {bits}):
        more = " and ".join(map(str, others))
        raise Refused(f"{source}: has layers of {more} bits too, so it is not a checkpoint of {bits} bits")


def kernel_facts(
    model: nn.Module,
    name: Named,
    expected: str,
    known: Collection[str] | None = None,
    plain_layers: Collection[str] = (),
) -> dict[str, Any]:
    """Like model_facts. `expected`: the kernel that every linear layer but lm_head should call; those
    that call another are `leftovers`. `known`: the result of check_whole: biases outside of it were added by
    the stack; None: it adds none. `plain_layers`: those that the checkpoint holds unpacked."""
    head = model.get_output_embeddings()
    weights = {
        module: _weights(module, known is None or f"{path}.bias" in known)
        for path, module in model.named_modules()
        if name(module)
    }
    linear = {
        path: module
        for path, module in model.named_modules()
        if module in weights or (isinstance(module, nn.Linear) and module is not head)
    }
    linear = {path: module for path, module in linear.items() if path not in plain_layers}
    other = sorted(path for path, module in linear.items() if name(module) != expected)
    return {
        **model_facts(model, lambda module: _packed_held(module) if module in weights else {}, name, weights),
        "kernel_asked": expected,
        "leftovers": other if len(other) < len(linear) else [],
    }


def _weights(layer: nn.Module, with_bias: bool) -> int:
    """Weights and biases, packed or not. The three libraries have two names for a layer's size."""
    n_in = layer.in_features if hasattr(layer, "in_features") else layer.infeatures
    n_out = layer.out_features if hasattr(layer, "out_features") else layer.outfeatures
    return n_in * n_out + (layer.bias.numel() if with_bias and layer.bias is not None else 0)


def _packed_held(layer: nn.Module) -> dict[str, list[Tensor]]:
    """A packed layer's tensors by kind."""
    found: dict[str, list[Tensor]] = {}
    for part, kind in KINDS.items():
        if isinstance(tensor := getattr(layer, part, None), Tensor):
            found.setdefault(kind or str(tensor.dtype).removeprefix("torch."), []).append(tensor)
    return found


def lacks(module: str, device: torch.device, since: tuple[int, int] | None = None) -> str | None:
    """Why a kernel with compiled code in `module` does not run here; None if it does. `since`: the compute
    capability that it needs."""
    if device.type != "cuda":
        return "needs a GPU (cuda)"
    try:
        importlib.import_module(module)
    except Exception as failure:  # it is missing, or torch no longer has a symbol
        return f"{module} does not load: {reason_of(failure)}"
    has = torch.cuda.get_device_capability(device)
    if since and has < since:
        return f"needs compute capability {since[0]}.{since[1]}; this GPU has {has[0]}.{has[1]}"
    return None


# Is a model of transformers what its files hold and its name says? Checked before and after it loads.


# Tensors of a checkpoint without which the same tokens are decoded.
WITHOUT_EFFECT = re.compile(
    "|".join(
        (
            *(rf"{re.escape(end)}$" for end in NOT_WEIGHTS),  # tables and masks that transformers computes
            r"\.(attn|attention)\.bias$|\.attn\.causal_mask$|\.inv_freq$|position_ids$",  # those of others
            r"\.(input_scale|input_global_scale|[kqv]_scale)$",  # of activations, which stay in 16 bits
            # Towers of other senses: a text uses none. The controller counts none: _OTHER_SENSES there.
            r"(^|\.)(vision|visual|audio|image|multi_modal|mm_)",
        )
    )
)
_PLAIN = (*FLOATS, "F64")


def quantization_in(source: Path) -> dict[str, Any]:
    """The quantization that a checkpoint's config.json describes; empty for none."""
    config = json_object(source / "config.json")
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        if isinstance(given := place.get("quantization_config"), dict) and given:
            return given
    return {}


def check_installed(source: Path, package: str) -> None:
    """Raises Refused where a package that a checkpoint needs is not in this environment."""
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise Refused(
            f"{source}: needs {package}, which the environment of the stack lacks: run it in an interpreter"
            " of your own that has it (harness env use)"
        )


def held_by(layer: nn.Module) -> str | None:
    """The class of a linear layer with the one that holds its weight, such as torchao's Int8Tensor; None for
    a plain weight and other layers."""
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Linear) or not hasattr(weight, "__tensor_flatten__"):
        return None
    return f"{type(layer).__name__}[{type(weight).__name__}]"


def check_unquantized(source: Path, stored: Mapping[str, Stored], stack: str) -> None:
    """Raises Refused for a checkpoint whose weights are not 16- or 32-bit floats. Of such a one transformers
    dequantizes the weights, takes their codes for weights, or leaves out their scales, by the method."""
    given = quantization_in(source)
    coded = (
        f"{name} is stored as {tensor.dtype}"
        for name, tensor in sorted(stored.items())
        if tensor.dtype not in _PLAIN and not WITHOUT_EFFECT.search(name)
    )
    found = next(coded, "")
    if not (given or found):
        return
    words = " ".join(str(given[key]) for key in ("quant_method", "quant_algo", "format") if given.get(key))
    kind = "is quantized" + (f" ({words})" if words else "") + (f": {found}" if found else "")
    raise Refused(
        f"{source}: {kind}; {stack} loads only 16- and 32-bit checkpoints: name the one that this was made of"
    )


def check_whole_checked(source: Path, model: nn.Module, found: Mapping[str, Any]) -> None:
    """Raises ValueError unless all parameters are from the checkpoint, and all of its tensors in the model.

    `found`: transformers' loading info; the tensors that a model's class declares to be left out, such as
    heads that draft, are not in it.
    """
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{source}: has no {missing[0]}, which its config.json requires")
    if odd := sorted(str(key[0]) for key in found["mismatched_keys"]):
        raise ValueError(f"{source}: its {odd[0]} has another size than in its config.json")
    check_none_left(source, found["unexpected_keys"])
    if found["error_msgs"]:
        raise ValueError(f"{source}: {found['error_msgs'][0]}")
    if ties(model.config) and not is_tied(model):
        raise ValueError(
            f"{source}: its config.json ties the lm_head to the embedding, but its lm_head.weight is another:"
            " remove the tensor, or set tie_word_embeddings to false"
        )


def check_none_left(source: Path, left: Iterable[str]) -> None:
    """Raises ValueError for tensors of a checkpoint that are left out, unless they have no effect."""
    if names := sorted(name for name in left if not WITHOUT_EFFECT.search(name)):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(
            f"{source}: has {names[0]}{more}, which the model of its config.json does not have: correct"
            " config.json, else another model would be measured"
        )


def check_types(source: Path, model: nn.Module, dtype: torch.dtype, quantized: tuple[type, ...] = ()) -> None:
    """Raises Refused if a matrix outside of the `quantized` layers has another type than the requested one.
    Not those that the model's own class keeps in float32."""
    kept = re.compile("|".join(_kept_in_float32(model)) or "$^")
    for path, module in model.named_modules():
        if isinstance(module, quantized):
            continue
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if parameter.dim() > 1 and parameter.dtype != dtype and not kept.search(name):
                has, requested = (str(each).removeprefix("torch.") for each in (parameter.dtype, dtype))
                raise Refused(f"{source}: its {name} was loaded as {has}, and {requested} was requested")


def _kept_in_float32(model: nn.Module) -> list[str]:
    named = (getattr(model, f"_keep_in_fp32_modules{end}", None) or () for end in ("", "_strict"))
    return [re.escape(name) for names in named for name in names]
