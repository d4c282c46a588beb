"""What a server in another process reports of its model, and how fast this machine allows it to be. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import PurePosixPath, PureWindowsPath

from harness.analysis import traffic
from harness.analysis.columns import ServerRow
from harness.analysis.served import ALIKE, ON_GPU
from harness.base.text import is_this_machine, list_named, shortened
from harness.records.kinds import Record, done_of, loaded_of, served_elsewhere
from harness.records.measured import Counters
from harness.records.parts import Served, StackFacts
from harness.theory import base_shapes, decoder, floors, ggml_quants, machine_names
from harness.theory.decoder import Decoder
from harness.theory.known_models import Known
from harness.theory.names import NotUnderstood

IN_WORDS = 0.05  # of the same in the server's words, as 8.2B
WITH_VISION = 0.15  # more than those of the text model, where it can read images
WIDEST = 33.0  # bits of a weight with its scales; a size that gives more is of something else
TRUNCATED = 0.9  # of a prompt's tokens; a text has some more or fewer
LOADED_SHOWN = 3
NOT_REPORTED = "device not reported by the server"
_BY_NAME = "name the model: --model NAME or FILE"
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


class _Unknown(ValueError):
    """The message is a clause: why it is not known what this machine allows."""


def row(record: Record, measured_bytes_per_s: float | None) -> ServerRow | None:
    """What is known of a server in another process; None for all else, and before it has answered.
    `measured_bytes_per_s`: read bandwidth of this machine's main memory."""
    served = (loaded_of(record) | done_of(record).get("facts_changed", StackFacts())).get("served")
    if not served or not served_elsewhere(record):
        return None
    allows, by, unknown = None, None, None
    try:
        needs, size = _needs(record, served)
        rate, by = _memory(record, size, measured_bytes_per_s)
        middle = record["workload"]["prompt_tokens"] + max(1, record["tokens"] // 2)
        allows = 1 / floors.decode_floor_s(needs, floors.Ceiling(rate, math.inf), middle)
        by = f"{needs.weight_bytes_per_token / 1e9:,.2f} GB of weights a token from {by}"
    except _Unknown as why:
        unknown = str(why)
    return {
        "device": device(served),
        "quant": loaded_of(record).get("quant"),
        "allows_tokens_per_s": allows,
        "by": by,
        "unknown": unknown,
        "causes": list(_causes(record, served)),
    }


def device(served: Served) -> str:
    """Where the server reports its model to be: `45% on the GPU`."""
    on_gpu = served.get("gpu_share")
    if on_gpu is None:
        return NOT_REPORTED
    if on_gpu >= ON_GPU:
        return "on the GPU"
    return f"{on_gpu:.0%} on the GPU" if on_gpu > 1 - ON_GPU else "on the CPU"


def _needs(record: Record, served: Served) -> tuple[floors.Demand, float]:
    """What a step reads, and the bytes of all weights. Raises _Unknown."""
    weights = record["model"]["weights"]
    if weights.get("header"):
        step, size = traffic.step(record), traffic.model_bytes(record)
        if step and size:
            return step, size
    words = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) ?([KMBT])", served.get("parameter_size") or "")
    in_words = round(float(words[1]) * _UNITS[words[2]]) if words else None
    counted = loaded_of(record).get("parameters") or in_words
    size = served.get("file_bytes") or loaded_of(record).get("model_bytes")
    tried = None
    for name in (record["model"]["name"], served["model"], served.get("file")):
        if name and (found := _named(name)):
            made, quant = found
            own = decoder.parameters(made)
            more = (counted or own) / own - 1
            tried = tried or f"it reports {counted or 0:,} parameters, and {shortened(name)} has {own:,}"
            tolerance = ALIKE if loaded_of(record).get("parameters") else IN_WORDS
            if abs(more) <= tolerance and size and size * 8 / own < WIDEST:
                return floors.demand_of_bits(made, size * 8 / own), size
            if -tolerance <= more <= max(tolerance, WITH_VISION):
                quant = loaded_of(record).get("quant") or quant
                file = served.get("file") or served["model"]
                if quant is None and served["api"] == "vllm" and not base_shapes.formats(file):
                    quant = "bf16"  # vLLM loads a checkpoint as it is stored, unless its name says otherwise
                if quant is None:
                    hint = "add it, as in --model qwen3-8b:q4_k_m"
                    raise _Unknown(f"the server does not report its quantization: {hint}")
                if quant not in ggml_quants.ALL_QUANTS:
                    raise _Unknown(f"the size of {shortened(quant)} is not known: {_BY_NAME}")
                needs = floors.demand_of_tensors(made, ggml_quants.quantized(made, quant))
                return needs, needs.resident_bytes
    if tried:
        raise _Unknown(f"{tried}: {_BY_NAME}")
    if size and served.get("experts") == 0 and counted and size * 8 / counted < WIDEST:
        return floors.Demand(0, 0, size, 0, 0), size
    raise _Unknown(f"the server does not report what a token reads: {_BY_NAME}")


def _named(text: str) -> tuple[Decoder, str | None] | None:
    """The known model with a name, or with the name of a file, and the type in it; None: not known."""
    path = PureWindowsPath(text) if re.match(r"[A-Za-z]:[\\/]", text) else PurePosixPath(text)
    name = path.name if path.is_absolute() or path.suffix.lower() == ".gguf" else text
    name = re.sub(r"(?i)\.gguf$", "", name)
    types = "|".join(sorted(ggml_quants.ALL_QUANTS, key=len, reverse=True))
    stem, _, quant = re.fullmatch(rf"(?i)(.*?)([-_:. ]({types}))?", name).groups()  # type: ignore[union-attr]
    try:
        made = base_shapes.understood(stem, Known()).made
    except NotUnderstood:
        return None
    return made, quant.lower() if quant else None


def is_known(name: str) -> bool:
    """Whether a model's name, or a file's, is that of a known model."""
    return _named(name) is not None


def _memory(record: Record, size: float, measured_bytes_per_s: float | None) -> tuple[float, str]:
    """Bytes per second of the fastest memory of this machine that holds the weights, and its name; of a GPU
    that holds a part of them, with main memory for the others. Raises _Unknown."""
    if not is_this_machine((record.get("options") or {}).get("url") or ""):
        raise _Unknown("it runs on another machine")
    main = f"main memory at {(measured_bytes_per_s or 0) / 1e9:,.1f} GB/s, as measured"
    gpus = record["machine"].get("gpus") or []
    served = loaded_of(record).get("served")
    if not gpus and served and (served.get("gpu_share") or 0.0) > 0:
        raise _Unknown("it uses a GPU that harness does not see here")
    if not gpus:
        if measured_bytes_per_s is None:
            raise _Unknown("the bandwidth of this machine's memory was not measured")
        return measured_bytes_per_s, main
    known = [machine for gpu in gpus if (machine := machine_names.of_gpu(gpu["name"], gpu["memory_bytes"]))]
    if not known:
        raise _Unknown(f"the bandwidth of {gpus[0]['name']} is not known")
    fastest = max(known, key=lambda machine: machine.data_sheet_bytes_per_s)
    rate, holds = fastest.data_sheet_bytes_per_s, sum(gpu["memory_bytes"] or 0 for gpu in gpus)
    by = f"{fastest.name} at {rate / 1e9:,.0f} GB/s, by its data sheet"
    if size <= holds:
        return rate, by
    if measured_bytes_per_s is None:
        raise _Unknown(f"it does not fit {fastest.name}, and main memory's bandwidth was not measured")
    part = holds / size
    return 1 / (part / rate + (1 - part) / measured_bytes_per_s), f"{by}, the rest from {main}"


def _causes(record: Record, served: Served) -> Iterator[str]:
    """Why it may be slow: only what the server reports."""
    on_gpu = served.get("gpu_share")
    is_here = is_this_machine((record.get("options") or {}).get("url") or "")
    has_gpu = bool(record["machine"].get("gpus")) or not is_here
    if on_gpu is not None and on_gpu < ON_GPU and (on_gpu > 1 - ON_GPU or has_gpu):
        on_cpu = f"{1 - on_gpu:.0%}" if on_gpu > 1 - ON_GPU else "all"
        at = f" at num_ctx {num_ctx:,}" if (num_ctx := served.get("num_ctx")) else ""
        yield f"{on_cpu} of the model is on the CPU{at}: lower num_ctx or take a smaller quantization"
    prompt, holds = record["workload"]["prompt_tokens"], loaded_of(record).get("holds_tokens")
    counted = (done_of(record).get("counters") or Counters()).get("prompt_tokens")
    if holds and holds < prompt:
        yield f"the context is {holds:,} and the prompt has {prompt:,}"
    elif counted and counted < TRUNCATED * prompt:
        yield f"the server read {counted:,} of the prompt's {prompt:,} tokens"
    if others := served.get("loaded_too"):
        shown = [
            shortened(other["name"]) + (f" ({other['bytes'] / 1e9:.1f} GB)" if other["bytes"] else "")
            for other in others
        ]
        which = "another model is" if len(shown) == 1 else "other models are"
        yield f"{which} loaded too: {list_named(shown, LOADED_SHOWN)}"
