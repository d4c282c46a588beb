"""Packed layers by their tensors: whether their sizes match the settings, and the bits of a weight. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from harness.models.gguf_model import dims_text
from harness.models.stored_sizes import LAYER
from harness.theory.decoder import Decoder
from harness.theory.ggml_quants import layer_of
from harness.theory.packed_sizes import Packing
from harness.theory.tensors import Tensor, of_shape

_INT32_BITS = 32
_WIDTHS = (2, 3, 4, 8)


def mismatch(packing: Packing, layer: str, dims: Mapping[str, tuple[int, ...]], is_mixed: bool) -> str | None:
    """How a layer's tensors contradict the settings; None if they agree. `is_mixed`: the layer has bits and
    groups of its own, by its tensors: the rules are regular expressions of a stranger, which may take for
    ever."""
    for kind, size in dims.items():
        if len(size) != (1 if kind == "g_idx" else 2) or 0 in size:
            return f"{packing.words}, but {layer}.{kind} is {dims_text(size) or 'a number'}"
    gptq = packing.method == "gptq"
    (rows, columns), (groups, n_out) = dims["qweight"], dims["scales"]
    n_in = dims["g_idx"][0] if gptq else rows
    stored_bits, n_packed = _INT32_BITS * (rows if gptq else columns), n_in if gptq else n_out
    if is_mixed and stored_bits // n_packed in _WIDTHS:
        group_size = -1 if groups == 1 else -(-n_in // groups)
        packing = replace(packing, bits=stored_bits // n_packed, group_size=group_size)
    if stored_bits != n_packed * packing.bits:
        bits, odd = divmod(stored_bits, n_packed)
        stored = f"is {dims_text(dims['qweight'])}" if odd else f"holds {bits}"
        return f"{packing.bits} bits, but {layer}.qweight {stored}"
    wide = n_in if packing.group_size == -1 else packing.group_size
    if groups != -(-n_in // wide):
        stored = f"has groups of {-(-n_in // groups)}"
        return f"group_size {packing.group_size}, but {layer}.scales {stored}"
    packed_columns = n_out * packing.bits // _INT32_BITS
    expected = {"qweight": (rows, n_out) if gptq else (n_in, columns), "qzeros": (groups, packed_columns)}
    for kind, expected_dims in expected.items():
        if dims[kind] != expected_dims:
            sizes = f"should be {dims_text(expected_dims)}, but is {dims_text(dims[kind])}"
            return f"{packing.words}: {layer}.{kind} {sizes}"
    return None


def bits_by_matrix(decoder: Decoder, stored: Iterable[Tensor]) -> dict[float, list[str]]:
    """The matrices of a dense model by their bits per weight, scales included, the fewest first. `stored`: by
    the names of Hugging Face checkpoints."""
    weights = {(layer_of(t.name), t.part): t.elements for t in of_shape(decoder) if len(t.dims) == 2}
    stored_bytes: Counter[tuple[int, str]] = Counter()
    for tensor in stored:
        match = LAYER.search(tensor.name)
        if not tensor.name.endswith(".bias"):
            stored_bytes[int(match[1]) if match else -1, tensor.part] += tensor.bytes
    by_bits: dict[float, list[str]] = {}
    for (layer, part), size in sorted(stored_bytes.items()):
        if count := weights.get((layer, part)):
            name = part if layer < 0 else f"{part} of layer {layer}"
            by_bits.setdefault(round(8 * size / count, 2), []).append(name)
    return dict(sorted(by_bits.items()))
