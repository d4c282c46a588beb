"""The storage of a linear layer's weight in GPTQ and AWQ: tensors, fields, words and rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runners.safetensors_folder import json_object

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_F16_LARGEST = 65504
_F16_SMALLEST_NORMAL = np.float32(2.0**-14)  # a smaller scale would be imprecise and slow, or zero


@dataclass(frozen=True)
class Packing:
    """A weight of n_out x n_in is (field - zero) * scale, fields of `bits`, with a zero and a scale for every
    `group_size` input rows (-1: for all of them). `format`: gptq or awq; `missing`: from a zero as stored."""

    format: str
    bits: int
    group_size: int
    missing: int

    @property
    def most(self) -> int:
        """The largest value of a field."""
        return (1 << self.bits) - 1

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def order(self) -> tuple[int, ...]:
        """Which of per_word neighbours each field of a word is, from the lowest bits up."""
        return _AWQ_ORDER if self.format == "awq" else tuple(range(self.per_word))

    def group_of(self, n_in: int) -> np.ndarray:
        """The group of each input row, in the rows' own order."""
        return np.arange(n_in, dtype=np.int32) // (n_in if self.group_size == -1 else self.group_size)

    def parts(self, n_out: int, n_in: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each tensor stored in place of a weight, by the end of its name."""
        groups = 1 if self.group_size == -1 else -(-n_in // self.group_size)
        by_rows = (n_in // self.per_word, n_out)  # a word is of neighbouring input rows
        by_columns = (n_in, n_out // self.per_word)
        parts: dict[str, tuple[str, tuple[int, ...]]] = {
            "qweight": ("I32", by_rows if self.format == "gptq" else by_columns),
            "qzeros": ("I32", (groups, n_out // self.per_word)),
            "scales": ("F16", (groups, n_out)),
        }
        return parts | {"g_idx": ("I32", (n_in,))} if self.format == "gptq" else parts

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """n_out and n_in of the weight whose qweight has these sizes."""
        return (columns, rows * self.per_word) if self.format == "gptq" else (columns * self.per_word, rows)

    def words(self, fields: np.ndarray) -> np.ndarray:
        """uint32 of n x m / per_word, from fields: uint8 of n x m."""
        first, *others = [fields[:, place :: self.per_word] for place in self.order]
        words = first.astype(np.uint32)
        for k, other in enumerate(others, 1):
            words |= other.astype(np.uint32) << np.uint32(self.bits * k)
        return words

    def fields(self, words: np.ndarray) -> np.ndarray:
        """uint8 of n x m * per_word, from words: uint32 of n x m."""
        fields = np.empty((words.shape[0], words.shape[1] * self.per_word), np.uint8)
        for k, place in enumerate(self.order):
            fields[:, place :: self.per_word] = words >> np.uint32(self.bits * k) & np.uint32(self.most)
        return fields

    def symmetric_zeros(self, groups: int, n_out: int) -> np.ndarray:
        """qzeros of a weight whose zero is the middle field everywhere."""
        zero = (self.most + 1) // 2 - self.missing
        return np.full((groups, n_out // self.per_word), zero * (0xFFFFFFFF // self.most), np.uint32)

    def zeros(self, qzeros: np.ndarray) -> np.ndarray:
        """Zeros, uint8 of groups x n_out. They wrap around, as in auto-gptq's kernel: 0 is stored as -1."""
        return (self.fields(qzeros) + np.uint8(self.missing)) & np.uint8(self.most)

    def rounded(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fields, uint8 of n x n_in, and scales, float16 of n x groups; float32 `rows` are overwritten.

        Rounded to nearest, symmetric, as in GPTQ's own quantizer: 2 * max|w| is the largest field times the
        scale. Raises ValueError for values that are not finite, or exceed float16 once rounded.
        """
        groups = rows.reshape(len(rows), -1, self.group_size)
        largest = np.maximum(groups.max(axis=-1), -groups.min(axis=-1))
        # The lowest field is half a step below -largest.
        if not largest.max() * (self.most + 1) / self.most <= _F16_LARGEST:
            raise ValueError(f"holds {largest.max():g}, which rounded to {self.bits} bits is beyond float16")
        scales = np.maximum(2 * largest / self.most, _F16_SMALLEST_NORMAL).astype(np.float16)
        groups /= scales.astype(np.float32)[..., None]
        np.rint(groups, out=groups)
        groups += (self.most + 1) // 2
        np.clip(groups, 0, self.most, out=groups)
        return rows.astype(np.uint8), scales

    def described(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """`quantization_config`, and the content of quantize_config.json if the format has one."""
        common = {"bits": self.bits, "group_size": self.group_size}
        if self.format == "awq":
            more = {"zero_point": True, "version": "gemm", "modules_to_not_convert": None}
            return {"quant_method": "awq", **common, **more}, None
        common |= {"desc_act": False, "static_groups": False, "sym": True, "true_sequential": True}
        extra = {"damp_percent": 0.01, "model_name_or_path": None, "model_file_base_name": "model"}
        return {"quant_method": "gptq", **common, "checkpoint_format": "gptq"}, common | extra


def packing_of(options: Mapping[str, Any]) -> Packing:
    """By `format`, `bits` and `group_size` (128). Raises ValueError for an unsupported packing."""
    form, bits, group_size = options["format"], options["bits"], options.get("group_size", 128)
    if (form, bits) not in (("gptq", 4), ("gptq", 8), ("awq", 4)):
        raise ValueError(f"cannot pack {bits} bits as {form!r}; known: gptq of 4 or 8 bits, awq of 4")
    if group_size < 1:
        raise ValueError(f"cannot pack with group_size {group_size}; expected a positive number")
    return Packing(form, bits, group_size, missing=1 if form == "gptq" else 0)


def found_in(source: Path, config: Mapping[str, Any]) -> Packing:
    """From a checkpoint's config.json, else from auto-gptq's quantize_config.json. Raises ValueError."""
    given, path = config.get("quantization_config"), source / "config.json"
    if not given and (source / "quantize_config.json").exists():
        path = source / "quantize_config.json"
        given = {"quant_method": "gptq"} | json_object(path)
    if not isinstance(given, dict):
        raise ValueError(f"{path}: has no quantization_config; expected a GPTQ or AWQ checkpoint")
    method, bits, group_size = (given.get(key) for key in ("quant_method", "bits", "group_size"))
    versions: tuple[str, ...]
    widths: tuple[int, ...]
    if method == "gptq":
        version, versions, widths = given.get("checkpoint_format") or "gptq", ("gptq", "gptq_v2"), (2, 4, 8)
        version = "marlin" if given.get("is_marlin_format") else str(version).lower()
    elif method == "awq":
        version, versions, widths = str(given.get("version") or "gemm").lower(), ("gemm",), (4,)
    else:
        raise ValueError(f"{path}: has quant_method {method!r}; expected gptq or awq")
    if version not in versions:
        raise ValueError(f"{path}: is {method} of format {version!r}; expected {' or '.join(versions)}")
    if bits not in widths:
        raise ValueError(f"{path}: is {method} of {bits} bits; expected {' or '.join(map(str, widths))}")
    if not isinstance(group_size, int) or group_size == 0 or group_size < -1:
        raise ValueError(f"{path}: has group_size {group_size!r}; expected a positive number, or -1")
    return Packing(method, bits, group_size, missing=1 if version == "gptq" else 0)
