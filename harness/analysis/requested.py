"""Does a stack run what was requested: device, buffers, kernels, options, weights, length? Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.analysis import served
from harness.analysis.warnings import Flag, Warnings
from harness.base.text import plural, yaml_word
from harness.records.kinds import Record, done_of, loaded_of, served_elsewhere
from harness.records.parts import Placed, StackFacts
from harness.stacks.header import Options

ELSEWHERE = ("cpu", "meta", "disk")  # not on a GPU; on a CPU only the first is correct
NAMES_SHOWN = 3
# Of llama.cpp's graph with all layers on a GPU: the input embedding, always on the CPU, and all else.
OFFLOADED_SPLITS = 2


def option_mismatches(device: str, options: Options, facts: StackFacts) -> list[Flag]:
    """Differences between the loaded and the requested options."""
    return [
        *other_kernels(facts),
        *placement_mismatches(device, options, facts),
        *other_options(options, facts),
    ]


def device_and_kernels(record: Record) -> list[Flag]:
    """Other kernels or places than the requested ones, in the stack's report after loading, else in the one
    after the run."""
    loaded = loaded_of(record)
    for facts in (loaded, loaded | done_of(record)["facts_changed"]):
        placed = placement_mismatches(record["device"], record["options"], facts)
        if mismatches := [*other_kernels(facts), *placed]:
            return mismatches
    return []


def placement_mismatches(device: str, options: Options, facts: StackFacts) -> list[Flag]:
    """Weights, tables or KV cache on another device, or tensors in another buffer, than the requested one; or
    operations without a kernel for the GPU: llama.cpp runs them on the CPU, whatever it reports of layers.
    Its graph is split at each change of device."""
    if misplaced := (facts.get("placement") or Placed(misplaced=[]))["misplaced"]:
        where = [
            f"{tensor['tensor']} ({tensor['asked']} was requested, {tensor['found'] or 'its layer'} has it)"
            for tensor in misplaced[:NAMES_SHOWN]
        ]
        more = ", ..." if len(misplaced) > NAMES_SHOWN else ""
        tensors = plural(len(misplaced), "tensor")
        return [Warnings.misplaced.flag(tensors=tensors, where=", ".join(where) + more)]
    wrong: Sequence[str]
    if device == "cpu":
        wrong = ELSEWHERE[1:]
    elif options.get("gpu_layers", -1) == -1:
        wrong = ELSEWHERE
    else:
        return []
    mismatches = [
        f"{part}: {count} on {'the CPU' if name.lower() == 'cpu' else name}"
        for part, on in (facts.get("devices") or {}).items()
        if isinstance(on, dict)
        for name, count in on.items()
        if name.lower() in wrong and count
    ]
    if mismatches:
        return [Warnings.offloaded.flag(parts="; ".join(mismatches))]
    splits = max((facts.get("graph_splits") or {}).values(), default=0)
    if facts.get("placement") or device == "cpu" or splits <= OFFLOADED_SPLITS:
        return []  # with a placement the graph is split on purpose
    return [Warnings.operations_on_cpu.flag(splits=splits, all_on_gpu=OFFLOADED_SPLITS)]


def other_kernels(facts: StackFacts) -> list[Flag]:
    """Other kernels than the requested one, and linear layers that should be quantized but are not."""
    raised = []
    requested = facts.get("kernel_asked")
    if requested is not None and requested not in (ran := facts["kernels"]):
        # For a torch model these are all classes of layers; the one that replaced the requested is linear.
        linear = [name for name in ran if "Linear" in name and name != "Linear"] or list(ran)
        raised.append(Warnings.other_kernel.flag(requested=requested, ran=", ".join(linear) or "none"))
    if names := facts.get("leftovers") or []:
        more = ", ..." if len(names) > NAMES_SHOWN else ""
        layers = f"{len(names)} linear layers are" if len(names) > 1 else "1 linear layer is"
        raised.append(Warnings.not_quantized.flag(layers=layers, names=", ".join(names[:NAMES_SHOWN]) + more))
    return raised


def other_options(requested: Options, facts: StackFacts) -> list[Flag]:
    """Switches, names and thread counts that the stack resolved differently. Sizes may be rounded."""
    resolved: Mapping[str, object] = facts.get("options") or {}
    return [
        Warnings.other_option.flag(name=name, requested=yaml_word(value), ran=yaml_word(resolved[name]))
        for name, value in requested.items()
        if isinstance(value, bool | str) or name == "threads"
        if resolved.get(name) is not None and resolved[name] != value
    ]


def other_weights(record: Record) -> list[Flag]:
    """Compare the loaded weights with the file's header. Bytes are compared only where the stack keeps the
    stored types: of a GGUF, and of a checkpoint with a single type (it is cast to one type)."""
    if served_elsewhere(record):
        return served.other_model(record)
    weights, loaded = record["model"]["weights"], loaded_of(record)
    header, stored, quant = weights.get("header"), weights.get("quant"), loaded.get("quant")
    raised = []
    if header:
        cast = weights.get("format") == "hf" and len(header.get("bytes_by_type") or ()) != 1
        cast = cast or bool(stored and quant and stored != quant)
        sizes = [
            ("model_bytes", None if cast else loaded.get("model_bytes"), header["model_bytes"]),
            ("parameters", loaded.get("parameters"), header["parameters"]),
            ("draft_bytes", loaded.get("draft_bytes"), header.get("draft_bytes", 0)),
        ]
        raised += [
            Warnings.other_weights.flag(name=name, loaded=ours, stored=theirs)
            for name, ours, theirs in sizes
            if ours is not None and ours != theirs
        ]
    requested = record["options"].get("quant")
    if requested is not None and quant is not None and requested != quant:
        raised.append(Warnings.other_type.flag(requested=requested, found=quant))
    return raised


def short_cache(record: Record) -> list[Flag]:
    """A KV cache shorter than the run: the stack discarded tokens and continued. Of servers, Ollama does."""
    facts = loaded_of(record) | done_of(record).get("facts_changed", StackFacts())
    holds, server, workload = facts.get("holds_tokens"), facts.get("served"), record["workload"]
    needed = workload["prompt_tokens"] + workload["new_tokens"]
    stops = served_elsewhere(record) and not (server and server["api"] in ("ollama", "openai"))  # it has both
    if holds is None or holds >= needed or stops:
        return []
    return [Warnings.short_cache.flag(holds=holds, needed=needed)]
