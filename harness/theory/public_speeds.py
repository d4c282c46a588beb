"""Speeds that others measured and published: read, and compared with the machine's limits. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from harness.base import data
from harness.theory import floors, ggml_quants, machine_names, names
from harness.theory.decoder import Decoder
from harness.theory.floors import Ceiling, Demand
from harness.theory.ggml_quants import ALL_QUANTS
from harness.theory.known_models import Known
from harness.theory.machines import Figure, Machine
from harness.theory.names import NotUnderstood
from harness.theory.rows import ReachedByOthers

COLUMNS = (
    *("model", "quant", "stack", "version", "year", "machine", "memory_gib", "bandwidth_gb_per_s", "family"),
    *("context", "tok_s", "prompt_tokens", "prompt_tok_s", "suspicious", "source"),
)
_NEEDED = ("model", "quant", "machine")
_SPEEDS = (("context", "tok_s"), ("prompt_tokens", "prompt_tok_s"))
BEYOND = "beyond"  # the key of cells that no column has
# Types that are not llama.cpp's: nominal bits of the layers, whose scales come on top. The lm_head has 16.
_PACKED_BITS = {"awq4": 4, "gptq4": 4}
# What a speed may be of: llama.cpp under its names, and the variants of PyTorch's stacks that have rows.
_GGML = (
    "",
    "llama.cpp",
    "llamacpp",
    "llama-server",
    "ollama",
    "llama.cpp/ollama",
    "lm studio",
    "ik_llama.cpp",
)
_SOFTWARE = (*_GGML, "hf", "autoawq exllama", "autoawq gemm fused")
_FAMILIES = ("cuda", "hip", "vulkan", "metal", "cpu")


@dataclass(frozen=True)
class PublicSpeed:
    """One row of public_speeds.csv. `line`: of the file. `name`, `made`: the model. `device`: the machine.
    `family`: what ran it (cuda, hip, vulkan, metal or cpu), which may be another than the device's own.
    `version`, `year`: of the software, where known. `tok_s`: decode, at `context` tokens. `prompt_tok_s`:
    prefill of `prompt_tokens`, from an empty cache. `suspicious`: why the row is not used; empty if it is.
    """

    line: int
    name: str
    made: Decoder
    quant: str
    stack: str
    version: str
    year: int | None
    device: Machine
    family: str
    context: int | None
    tok_s: float | None
    prompt_tokens: int | None
    prompt_tok_s: float | None
    suspicious: str
    source: str

    @property
    def packed(self) -> bool:
        """Weights of fewer than 16 bits."""
        return self.quant not in ggml_quants.UNQUANTIZED

    @property
    def demand(self) -> Demand:
        return _demand(self.made, self.quant)

    @property
    def maker(self) -> str:
        return maker(self.device)

    @cached_property
    def ceiling_tok_s(self) -> float | None:
        """The most tokens per second at the context, by the data sheet; None without a decode speed."""
        if self.context is None:
            return None
        return 1 / floors.decode_floor_s(self.demand, self._limits, self.context)

    @cached_property
    def prompt_ceiling_tok_s(self) -> float | None:
        """The same of prefill."""
        if self.prompt_tokens is None:
            return None
        return self.prompt_tokens / floors.prefill_floor_s(self.demand, self._limits, self.prompt_tokens)

    @property
    def share(self) -> float | None:
        """Of the ceiling, reached by decode."""
        return self.tok_s / self.ceiling_tok_s if self.tok_s and self.ceiling_tok_s else None

    @property
    def prompt_share(self) -> float | None:
        """The same by prefill; None where the compute rate is not known, which bounds it."""
        if not self.prompt_tok_s or not self.prompt_ceiling_tok_s or self._limits.flops == math.inf:
            return None
        return self.prompt_tok_s / self.prompt_ceiling_tok_s

    @cached_property
    def _limits(self) -> Ceiling:
        return Ceiling(self.device.data_sheet_bytes_per_s, self.device.kernel_flops(self.packed) or math.inf)


@cache
def _demand(decoder: Decoder, quant: str) -> Demand:
    if quant in _PACKED_BITS:
        needs = floors.demand_of_bits(decoder, _PACKED_BITS[quant])
        return replace(needs, lm_head_bytes=needs.lm_head_params * 2.0)
    return floors.demand_of_tensors(
        decoder, ggml_quants.quantized(decoder, quant, as_published=decoder.is_dense)
    )


class Refused(ValueError):
    """A row that cannot be used; the message says why."""


@cache
def rows() -> tuple[PublicSpeed, ...]:
    """The shipped rows, also those that are suspicious."""
    return tuple(_row(line, cells) for line, cells in enumerate(data.rows("public_speeds.csv"), 2))


def used(speeds: Iterable[PublicSpeed]) -> list[PublicSpeed]:
    """Those that are not suspicious."""
    return [speed for speed in speeds if not speed.suspicious]


def read(table: Iterable[Mapping[str, str | None]]) -> tuple[list[PublicSpeed], list[str]]:
    """Rows of the same columns, and a sentence on each that is left out: of an unknown name, without
    a speed, or above its ceiling. Columns may be missing where their cells may be empty."""
    speeds, refused = [], []
    for line, cells in enumerate(table, 2):
        stripped = {name: (cells.get(name) or "").strip() for name in COLUMNS}
        try:
            if cells.get(BEYOND):
                raise Refused("it has more cells than the first line; numbers have points, no commas")
            speeds.append(_below_ceiling(_row(line, stripped)))
        except Refused as why:
            refused.append(
                f"line {line} ({stripped['model']} {stripped['quant']} on {stripped['machine']}): {why}"
            )
    return speeds, refused


def _row(line: int, cells: Mapping[str, str]) -> PublicSpeed:
    """Raises Refused."""
    if empty := next((column for column in _NEEDED if not cells[column]), None):
        raise Refused(f"{empty} is empty")
    if cells["stack"].lower() not in _SOFTWARE:
        raise Refused(f"unknown stack {cells['stack']!r}; there are {', '.join(filter(None, _SOFTWARE))}")
    named = _named(cells["model"])
    quant, device = cells["quant"].lower(), _device(cells)
    if quant not in (*ALL_QUANTS, *_PACKED_BITS):
        raise Refused(f"unknown quantization {quant!r}")
    if (family := cells["family"] or device.family) not in _FAMILIES:
        raise Refused(f"unknown family {family!r}")
    decode, prefill = (_pair(cells, *columns) for columns in _SPEEDS)
    if decode == prefill == (None, None):
        raise Refused("no speed")
    year = _number(cells, "year")
    return PublicSpeed(
        line=line,
        name=named.name,
        made=named.made,
        quant=quant,
        stack=cells["stack"],
        version=cells["version"],
        year=int(year) if year else None,
        device=device,
        family=family,
        context=decode[0],
        tok_s=decode[1],
        prompt_tokens=prefill[0],
        prompt_tok_s=prefill[1],
        suspicious=cells["suspicious"],
        source=cells["source"],
    )


@cache
def _named(model: str) -> names.Named:
    """Raises Refused."""
    try:
        return names.named(model, Known())
    except NotUnderstood as why:
        raise Refused(why.sentence("model", model)) from why


def _device(cells: Mapping[str, str]) -> Machine:
    """Raises Refused."""
    memory, bandwidth = _number(cells, "memory_gib"), _number(cells, "bandwidth_gb_per_s")
    if bandwidth is None:
        return _known(cells["machine"])
    if not cells["family"]:
        raise Refused(f"a machine of that bandwidth needs its family: {', '.join(_FAMILIES)}")
    figures = Figure(int((memory or 0) * 2**30), "given"), Figure(bandwidth * 1e9, "given")
    device = Machine(cells["machine"], *figures, {}, "")
    if cells["family"] == "cuda":
        return replace(device, compute_capability=(0, 0))  # not known; no rate depends on it
    return device if cells["family"] == "cpu" else replace(device, gpu_api=cells["family"])


@cache
def _known(machine: str) -> Machine:
    """Raises Refused."""
    try:
        return machine_names.one_machine(machine, any_size=True)
    except NotUnderstood as why:
        raise Refused(why.sentence("machine", machine)) from why


def _pair(cells: Mapping[str, str], tokens: str, speed: str) -> tuple[int, float] | tuple[None, None]:
    """A speed and the tokens that it holds at. Raises Refused for one without the other."""
    n, tok_s = _number(cells, tokens), _number(cells, speed)
    if n is None and tok_s is None:
        return None, None
    if n is None or tok_s is None:
        raise Refused(f"{tokens} or {speed} is empty; it takes both")
    if n % 1:
        raise Refused(f"{tokens} is {cells[tokens]}, not a whole number")
    return int(n), tok_s


def _number(cells: Mapping[str, str], column: str) -> float | None:
    """None for an empty cell. Raises Refused for what is not a number above zero."""
    if not cells[column]:
        return None
    try:
        value = float(cells[column])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise Refused(f"{column} is {cells[column]}, not a number above zero")
    return value


def _below_ceiling(row: PublicSpeed) -> PublicSpeed:
    """Raises Refused."""
    for column, tok_s, ceiling in (
        ("tok_s", row.tok_s, row.ceiling_tok_s),
        ("prompt_tok_s", row.prompt_tok_s, row.prompt_ceiling_tok_s),
    ):
        if tok_s and ceiling and tok_s > ceiling:
            times = tok_s / ceiling
            raise Refused(f"{column} is {tok_s:,.4g}, {times:.2g} times the most that {row.device.name} can")
    return row


def maker(machine: Machine) -> str:
    """Whose GPU a machine has; without one the kind of its CPU, `CPU` for x86 with AVX2 and for boards."""
    if machine.family == "vulkan":
        return "AMD" if "Radeon" in machine.name else "Intel"
    return {"cuda": "NVIDIA", "hip": "AMD", "metal": "Apple"}.get(machine.family, machine.cpu_kind or "CPU")


def others(machine: Machine) -> ReachedByOthers | None:
    """What others reached on this machine, or on those of its maker; None if nothing is known of either."""
    decodes = [speed for speed in used(rows()) if speed.tok_s]
    of_machine = [decode for decode in decodes if decode.device.name == machine.name]
    speeds = of_machine or [decode for decode in decodes if decode.maker == maker(machine)]
    if not speeds:
        return None
    shares = sorted(share for speed in speeds if (share := speed.share))
    return {
        "on": machine.name if of_machine else maker(machine),
        "is_machine": bool(of_machine),
        "rows": len(speeds),
        "sources": len({speed.source for speed in speeds}),
        "median": statistics.median(shares),
        "least": shares[0],
        "most": shares[-1],
    }
