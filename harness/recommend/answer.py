"""The choice, its reasons and its commands."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import TypedDict

from harness.analysis import quality as analysis_quality
from harness.analysis.columns import Cell as ColumnsCell
from harness.base import data
from harness.base.text import plural
from harness.config.plan import Cell
from harness.recommend.candidates import FOLDER, Candidate
from harness.recommend.least_squares import Floats
from harness.recommend.speed import NORMAL_90, Example, Predictor, Range, Traits
from harness.records.kinds import Record
from harness.stacks.header import Value, references

if TYPE_CHECKING:
    from harness.dataset.study import Study

# Predictions of all candidates -> the answer: rows, ranked by a goal, with one sentence each. Pure.

SHORT_PROMPT = 2048
MOST_LOSS = 0.02  # of the perplexity of 16-bit weights; more is not `balance`
MOST_KLD = 0.02  # nats per token, which costs about as much in ln PPL; where it was measured, it decides
PERPLEXITY_NOISE = 0.006  # its standard error, as llama.cpp prints it on wikitext
ABOUT_AS_FAST = 1.1  # for `balance`, the better quality comes first of speeds that differ by no more
LEAST_BITS = 4  # per weight, with a 16-bit cache: for `balance` where no quality is known
MEASURED, CALIBRATED, ELSEWHERE, THEORY = BASES = "measured", "calibrated", "calibrated elsewhere", "theory"
GOALS = ("balance", "speed", "quality", "context")
KEPT, ENOUGH, SMALL_CACHE, UNLIKELY = 3, 2, 1, 0  # see _balanced
_LEADS = {
    "speed": "fastest",
    "quality": "best quality that fits",
    "context": "longest context",
    "balance": "fastest that keeps quality",
}


@dataclass(frozen=True)
class Quality:
    """`loss`: perplexity over that of 16-bit weights, less 1. `source`: whose, of which model. `kld`: mean
    KL divergence from them in nats per token, with the ends of its 95% interval; null: not measured."""

    loss: float
    source: str
    kld: float | None = None
    kld_ci95: tuple[float, float] | None = None

    @property
    def kept(self) -> bool:
        """Whether so little is lost that `balance` takes it."""
        return self.loss <= MOST_LOSS if self.kld is None else self.kld < MOST_KLD

    @property
    def cost(self) -> float:
        """Nats per token that are lost; of a published perplexity, those beyond its noise."""
        return max(0.0, self.loss - PERPLEXITY_NOISE) if self.kld is None else self.kld

    @property
    def words(self) -> str:
        return f"perplexity {self.loss:+.1%}" if self.kld is None else f"KLD {self.kld:.2g}"


@dataclass(frozen=True)
class Choice:
    """A candidate with its predictions. `start`, `deep`: tokens per second at zero context, and at the
    requested context; `first_short`, `first_deep`: ms of a prompt of 2,048 tokens, and of the context.
    `basis`: the evidence for the prediction. `unknowns`: the standard deviation of `deep`'s logarithm by each
    unknown, in the same order for all choices."""

    candidate: Candidate
    start: Range
    deep: Range
    first_short: Range | None
    first_deep: Range | None
    quality: Quality | None
    basis: str
    unknowns: Floats = field(compare=False, repr=False)

    @property
    def title(self) -> str:
        return f"{self.candidate.cell.variant.stack} {self.candidate.cell.variant.name}"

    def is_faster(self, other: Choice) -> bool:
        """Whether it is faster at the context with a probability of 95%. What is unknown of the machine is
        common to both."""
        spread = float(np.linalg.norm(self.unknowns - other.unknowns))
        return math.log(self.deep.value / other.deep.value) > NORMAL_90 * spread


@dataclass(frozen=True)
class Ranked:
    choice: Choice
    why: str


def choices(
    found: Sequence[Candidate],
    examples: Sequence[Example],
    context: int,
    quality: Callable[[Candidate], Quality | None],
    fitted: Predictor | None = None,
) -> list[Choice]:
    """Predict all candidates at once. `fitted`: to these examples, where it is asked again."""
    predictor, traits = fitted or Predictor(examples), [each.traits for each in found]
    start, deep = (predictor.steps([each.parts for each in found], n) for n in (1, context))
    figures = zip(
        found,
        start.ranges,
        deep.ranges,
        deep.unknowns,
        predictor.first_token_ms(traits, SHORT_PROMPT),
        predictor.first_token_ms(traits, context),
        strict=True,
    )
    return [
        Choice(
            candidate=each,
            start=first.inverted(1e3),
            deep=last.inverted(1e3),
            first_short=short,
            first_deep=long,
            quality=quality(each),
            basis=basis(each, examples),
            unknowns=unknowns,
        )
        for each, first, last, unknowns, short, long in figures
    ]


def basis(candidate: Candidate, examples: Sequence[Example]) -> str:
    """`measured`: this variant on this device; `calibrated`: others of its kind of stack there; `calibrated
    elsewhere`: its kind of stack on another device of its kind; `theory`: none of these. Of a variant in two
    memories, the weaker."""
    return max((_basis(each, examples) for each in candidate.parts), key=BASES.index)


def _basis(wanted: Traits, examples: Sequence[Example]) -> str:
    alike = [each.traits for each in examples if each.at_ms and each.traits.family == wanted.family]
    same_stack = [each for each in alike if each.group == wanted.group]
    here = [each for each in same_stack if each.device == wanted.device]
    if any(
        (each.model, each.type, each.layers) == (wanted.model, wanted.type, wanted.layers)
        and each.software == wanted.software
        for each in here
    ):
        return MEASURED
    engines = {(each.device, each.engine) for each in alike}
    if here or (wanted.device, wanted.engine) in engines:
        return CALIBRATED
    return ELSEWHERE if any(engine == wanted.engine for _, engine in engines) else THEORY


def ranked(found: Sequence[Choice], goal: str, most: int) -> list[Ranked]:
    """At most so many choices that fit, best first. The best of each goal come first, led by the requested
    goal; then choices that no other beats in both speed and quality (or bits, where quality is unknown). By
    quality, the best is followed by these alone, in its order."""
    fitting = [each for each in found if each.candidate.fits]
    if not fitting:
        return []
    # 16 bits keep quality, but are no answer where of nothing else quality is known: they would always win.
    rated = any(each.quality for each in fitting if not each.candidate.is_whole)
    keys: Mapping[str, Callable[[Choice], tuple[float, ...]]] = {
        "speed": _pace,
        "quality": lambda each: (*_goodness(each), *_pace(each)),
        "context": lambda each: (each.candidate.longest or 0, *_pace(each)),
        "balance": lambda each: (_balanced(each, rated), *_pace(each)),
    }
    fastest = max(fitting, key=keys["balance"])
    leads: dict[int, list[str]] = {}
    chosen: list[Choice] = []
    for each_goal in [goal, *(other for other in GOALS if other != goal)]:
        best = max(fitting, key=keys[each_goal])
        if each_goal == "balance":
            best = _best_of_alike(fastest, fitting, rated)
        if id(best) not in leads and not (chosen and goal == "quality"):
            chosen.append(best)
        leads.setdefault(id(best), []).append(each_goal)
    front = sorted((c for c in fitting if not _dominated(c, fitting)), key=keys[goal], reverse=True)
    shown = [*chosen, *(each for each in front if not any(each is other for other in chosen))][:most]

    def why(best: Choice) -> str:
        led = leads.get(id(best), [])
        led = [each for each in led if each != "speed" or "balance" not in led]  # the fastest of fewer
        rivals = [_rivals(each, best, shown, fitting, rated) for each in led]
        reasons = [_reason(each, best, fastest, rated) + of for each, of in zip(led, rivals, strict=True)]
        return "; ".join(reasons) or "all that are faster have fewer bits, of weights or of the cache"

    return [Ranked(each, why(each)) for each in shown]


def _best_of_alike(fastest: Choice, fitting: Sequence[Choice], rated: bool) -> Choice:
    """The one that loses least, as far as is known, of those that are about as fast."""
    rank, least = _balanced(fastest, rated), fastest.deep.value / ABOUT_AS_FAST
    alike = [each for each in fitting if _balanced(each, rated) == rank and each.deep.value >= least]
    return max(alike, key=lambda each: (*_goodness(each), *_pace(each)))


def _rivals(goal: str, best: Choice, shown: Sequence[Choice], fitting: Sequence[Choice], rated: bool) -> str:
    """Name choices that may be as good: that the best is not faster with certainty."""

    def is_rival(other: Choice) -> bool:
        if goal == "context":
            return other.candidate.longest == best.candidate.longest
        if goal == "quality":
            return _goodness(other) == _goodness(best)
        alike = goal == "speed" or _balanced(other, rated) == _balanced(best, rated)
        return alike and not best.is_faster(other)

    rivals = [each for each in fitting if each is not best and is_rival(each)]
    numbers = [str(n) for n, each in enumerate(shown, 1) if any(each is other for other in rivals)]
    parts = [f"row{'s' * (len(numbers) > 1)} {', '.join(numbers)}"] if numbers else []
    if hidden := len(rivals) - len(numbers):
        parts.append(f"{hidden} other{'s' * (hidden > 1)}" + " not shown" * (not numbers))
    end = "" if len(rivals) > 1 else "s"
    verb = {"context": f"hold{end} as much", "quality": f"lose{end} no more"}.get(goal, "may be as fast")
    return f" ({' and '.join(parts)} {verb})" if rivals else ""


def _reason(goal: str, best: Choice, fastest: Choice, rated: bool) -> str:
    """Why a choice leads at a goal, in a few words."""
    words, quality = _LEADS[goal], best.quality
    if goal == "context" and (longest := best.candidate.longest or 0) >= best.candidate.trained:
        limit = "it was trained on" if longest == best.candidate.trained else "was asked for"
        return f"{words}: all that {limit}"
    if goal == "balance":
        reason = _reason_of_balance(best, _balanced(best, rated))
        return reason if best is fastest else reason.replace("fastest", "within 10% of the fastest", 1)
    if goal != "quality" or best.candidate.is_whole:
        return words
    if quality is None:
        return "most bits a weight that fit, quality unknown"
    return "best known quality that fits" + (f" ({quality.words})" if quality.kld is not None else "")


def _reason_of_balance(best: Choice, rank: int) -> str:
    if best.candidate.is_whole:
        return f"{_LEADS['balance']} (16 bits)"
    if rank == KEPT and best.quality:
        if best.quality.kld is not None:
            return f"fastest that keeps KLD under {MOST_KLD} ({best.quality.words})"
        return f"{_LEADS['balance']} ({best.quality.words})"
    if rank == ENOUGH:
        return f"fastest with at least {LEAST_BITS} bits a weight and a 16-bit KV cache, quality unknown"
    if rank == SMALL_CACHE:
        return f"fastest with at least {LEAST_BITS} bits a weight; none that fits is known to keep quality"
    return "fastest; none that fits is known or likely to keep quality"


def _pace(choice: Choice) -> tuple[float, ...]:
    """Speed at the context, as printed; for equal speeds, the longer context, then less memory."""
    candidate = choice.candidate
    return float(f"{choice.deep.value:.3g}"), candidate.longest or 0, -candidate.memory_bytes


def _goodness(choice: Choice) -> tuple[float, ...]:
    """Known quality before unknown, then the smaller loss, where it exceeds the noise of a perplexity; of
    unknown quality the more bits, and a 16-bit cache."""
    if choice.candidate.is_whole:
        return 1.0, 0.0
    if choice.quality is None:
        return 0.0, choice.candidate.bits, choice.candidate.keeps_cache
    return 1.0, -choice.quality.cost


def _balanced(choice: Choice, rated: bool) -> int:
    """How likely its quality is kept: known to be; unknown, with bits of which most models lose little; the
    same but for the cache; neither. `rated`: whether quality is known of any that is quantized; if not, bits
    alone count."""
    candidate, known = choice.candidate, choice.quality
    if rated and (candidate.is_whole or (known is not None and known.kept)):
        return KEPT
    if known is not None or candidate.bits < LEAST_BITS:
        return UNLIKELY
    return ENOUGH if candidate.keeps_cache else SMALL_CACHE


def _dominated(choice: Choice, others: Sequence[Choice]) -> bool:
    """Whether another is at least as fast with as many bits of weights and cache, and better in one; or alike
    in these, and holds more context or takes less memory."""
    mine, pace = _merits(choice), _pace(choice)
    for other in others:
        theirs = _merits(other)
        if theirs == mine and _pace(other) > pace:
            return True
        if theirs != mine and all(t >= m for t, m in zip(theirs, mine, strict=True)):
            return True
    return False


def _merits(choice: Choice) -> tuple[float, ...]:
    return _pace(choice)[0], choice.candidate.bits, choice.candidate.keeps_cache


# What to type to run a chosen variant: commands and files of common programs, and a config of ours. Pure.

_ALL_LAYERS = 999


@dataclass(frozen=True)
class Source:
    """A model's source of weights. `checkpoint`: a hub repository or folder for transformers; null: unknown.
    `gguf`: the given file, and `gguf_type` its type. `row`: the model's row in a config; null where
    no row can name the model."""

    name: str
    checkpoint: str | None = None
    gguf: str | None = None
    gguf_type: str | None = None
    row: Mapping[str, object] | None = None


def commands_of_candidate(
    candidate: Candidate, source: Source, context: int, family: str, threads: int | None
) -> dict[str, str]:
    """The commands by program that run the variant on a device of this family. `threads`: null for another
    machine."""
    cell, on_gpu = candidate.cell, family != "cpu"
    pairs = {"stack": cell.variant.stack, **cell.variant.options}.items()
    variant = f"variants: [{{{', '.join(f'{key}: {_yaml(value)}' for key, value in pairs)}}}]"
    whole = [f"device: {family}", f"models: [{json.dumps(source.row)}]"] if source.row else []
    ours = {"harness run": "\n".join([*whole, variant])}
    if cell.weights_format == "gguf":
        return _llama_cpp(candidate, source, context, on_gpu, threads) | ours
    return _of_torch(candidate, source, context, on_gpu) | ours


def _of_torch(candidate: Candidate, source: Source, context: int, on_gpu: bool) -> dict[str, str]:
    cell, checkpoint = candidate.cell, source.checkpoint
    kind = {"awq": "an AWQ checkpoint", "gptq": "a GPTQ checkpoint"}.get(cell.weights_format)
    if kind or checkpoint is None:
        then = f"; vLLM serves it, with --max-model-len {context}" if kind and on_gpu else ""
        return {"fetch": f"{kind or 'a checkpoint'} of {source.name}{then}"}
    where = ', device_map="cuda"' if on_gpu else ""
    load = f'AutoModelForCausalLM.from_pretrained("{checkpoint}", '
    dtype = "float16" if cell.variant.options.get("dtype") == "fp16" else "bfloat16"
    if words := cell.header.loads.get(cell.quant or ""):
        return {"transformers": f"{load}{words.replace('bfloat16', dtype)}{where})"}
    longer = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 " if context > candidate.trained else ""
    served = f'{longer}vllm serve "{checkpoint}" --dtype {dtype} --max-model-len {context}'
    return {"transformers": f'{load}dtype="{dtype}"{where})'} | ({"vLLM": served} if on_gpu else {})


def config_text(cells: Sequence[Cell], model: Mapping[str, object], device: str, context: int) -> str:
    """YAML for `harness run` that measures the variants: a short decode, and windows up to the context.
    `model`: its row."""
    depths = sorted({0, context // 4, context - 1})
    rows = [
        {
            "stack": cell.variant.stack,
            **({"name": measured_name(cell)} if _takes_file_as_it_is(cell) else {}),
            **cell.variant.options,
        }
        for cell in cells
    ]
    return (
        f"device: {device}\n"
        "protocol: {new_tokens: 128, repeats: 2, retry_disturbed: 1}\n"
        f"models: [{json.dumps(model)}]\n"
        "variants:\n" + "".join(f"  - {json.dumps(row)}\n" for row in rows) + "workloads:\n"
        "  - {kind: decode}\n"
        f"  - {{kind: depth, depths: {depths}, window: 16, most_windows: 6, stop_at: 1%}}\n"
    )


def measured_name(cell: Cell) -> str:
    """The variant's name in that config, where given names have no `=`."""
    name = cell.variant.name
    return name.replace("=", "-") if _takes_file_as_it_is(cell) else name


def _takes_file_as_it_is(cell: Cell) -> bool:
    """Whether the stack takes the file's type, which no option gives, so that the row needs a name."""
    return cell.weights_format == "gguf" and cell.quant is None


def calibration_command(device: str) -> str:
    """YAML for `harness run` that measures what other variants are predicted from: two sizes, three types."""
    return (
        f"device: {device}\n"
        "protocol: {new_tokens: 64, repeats: 3, retry_disturbed: 1}\n"
        "models: [{shape: qwen1.5-0.5b}, {shape: qwen1.5-1.8b}]\n"
        f"variants: [{{stack: {references()['gguf'].stack}, quant: [q8_0, q4_0, q4_k_m]}}]\n"
    )


def _llama_cpp(
    candidate: Candidate, source: Source, context: int, on_gpu: bool, threads: int | None
) -> dict[str, str]:
    options, quant = candidate.cell.options(threads or 1), candidate.type
    split = candidate.split
    layers = split.gpu_layers if split and split.gpu_layers else _ALL_LAYERS if on_gpu else 0
    is_given = source.gguf is not None and source.gguf_type == quant
    file = str(source.gguf) if is_given else f"{source.name}-{quant.upper()}.gguf"
    whole = source.gguf or f"{source.name}-F16.gguf"
    flash, cache = bool(options.get("flash_attn")), [str(options.get(k)) for k in ("type_k", "type_v")]
    given = f"-m {file} -c {context} {f'-ngl {layers} ' if on_gpu else ''}-fa {'on' if flash else 'off'}"
    given += f" --n-cpu-moe {split.n_cpu_moe}" if split and split.n_cpu_moe else ""
    given += f" -t {threads}" if threads and (not on_gpu or split) else ""
    given += f" -ctk {cache[0]} -ctv {cache[1]}" if cache != ["f16", "f16"] else ""
    lines = [f"FROM {file if file.startswith('/') else './' + file}", f"PARAMETER num_ctx {context}"]
    lines += [f"PARAMETER num_gpu {layers}"]
    lines += [f"PARAMETER num_thread {threads}"] if threads and not on_gpu else []
    variables = ["OLLAMA_FLASH_ATTENTION=1"] if flash else []
    variables += [f"OLLAMA_KV_CACHE_TYPE={cache[0]}"] if cache[0] != "f16" else []
    lines += [f"# start the server with {' '.join(variables)}"] if variables else []
    if source.gguf or source.checkpoint:
        made = [] if source.gguf else _converted(source, whole)
        made += [] if is_given or file == whole else [f"llama-quantize {whole} {file} {quant.upper()}"]
        makes = {"first": "\n".join(made)} if made else {}
    else:
        makes = {"fetch": f"a GGUF of {source.name} in {quant.upper()}, as {file}"}
    servers = {"llama-server": f"llama-server {given}", "llama-cli": f"llama-cli {given}"}
    if split and split.n_cpu_moe:  # which Ollama cannot be told
        return makes | servers
    return makes | servers | {"Modelfile": "\n".join(lines)}


def _converted(source: Source, file: str) -> list[str]:
    """How a checkpoint becomes a GGUF of 16 bits, with the script in llama.cpp's repository."""
    folder, found = source.checkpoint, []
    if source.checkpoint and not source.checkpoint.startswith("/"):
        folder = source.name
        found = [f"hf download {source.checkpoint} --local-dir {folder}"]
    return [*found, f'python convert_hf_to_gguf.py "{folder}" --outtype f16 --outfile {file}']


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# How far off predictions have been: of the published study, and of those that were measured here.

ERRORS = "prediction_errors.csv"  # in harness/data, as benchmarks/predictions.py --store writes it
# As benchmarks/predictions_here.py prints it.
_CALIBRATED_CPU = (
    "on one CPU, calibrated with three variants and the rate of each type, 5.6 to 5.9% in three runs (median "
    "of 18; 13 to 21% without the rates); 13 to 17 of 18 lay in their interval"
)


FEW_ROWS, FEW_MACHINES = 5, 3  # of fewer, shares and medians say nothing


def how_far_off(maker: str) -> str | None:
    """How far off predictions of decode were on this maker's machines; null: nobody measured any."""
    for row in data.rows(ERRORS):
        if (row["maker"], row["phase"]) == (maker, "decode"):
            machines = plural(int(row["machines"]), "machine")
            of = f"{row['machines']} CPUs and boards" if maker == "CPU" else f"{machines} of {maker}"
            if int(row["rows"]) < FEW_ROWS or int(row["machines"]) < FEW_MACHINES:
                return (
                    f"how far off: too few to say: others measured {plural(int(row['rows']), 'row')} on {of}."
                )
            return (
                f"how far off: on {of} that others measured, each predicted without its own rows, "
                f"{row['median']} (median of {plural(int(row['rows']), 'row')}); "
                f"{row['within 25%']} within 25%, {row['in interval']} in their interval"
                + (f"; {_CALIBRATED_CPU}" if maker == "CPU" else "")
                + "."
            )
    return None


HEADING = "predictions"


def with_predictions(study: Study, folders: Iterable[Path]) -> Study:
    """The study with outcomes of predictions that `harness recommend --prove` stored in these results."""
    proved = [folder for folder in folders if (folder / FOLDER).is_dir()]
    if not proved:
        return study

    found = [sentence for folder in proved if (sentence := outcomes_so_far(folder))]
    known = [
        sentence
        for row in data.rows(ERRORS)
        if row["phase"] == "decode" and (sentence := how_far_off(row["maker"]))
    ]
    further = {**study.further_methods, HEADING: [*found, *known]}
    return replace(study, further_methods=further) if found else study


# Outcomes: predictions that were measured later, stored with the records, and their errors so far.

NAME = "outcomes.jsonl"  # in that folder of the results


class Outcome(TypedDict):
    """Tokens per second at the last position of `context`, predicted with its interval, and measured."""

    model: str
    stack: str
    variant: str
    device: str
    context: int
    predicted: float
    low: float
    high: float
    measured: float


def outcome_of_choice(choice: Choice, windows: Sequence[ColumnsCell], context: int) -> Outcome | None:
    """Pair a prediction with the latest measurement at its context; null: there is none."""
    cell, found = choice.candidate.cell, choice.deep
    wanted = cell.model.name, cell.variant.stack, measured_name(cell)
    mine = [
        row for row in windows if (row["model"], row["stack"], row["variant"]) == wanted and row["depths"]
    ]
    for row in sorted(mine, key=lambda row: row["started_utc"], reverse=True):
        for at in row["depths"]["at"] if row["depths"] else []:
            if at["depth"] == context - 1 and row["status"] == "ok":
                return {
                    "model": wanted[0],
                    "stack": wanted[1],
                    "variant": wanted[2],
                    "device": choice.candidate.traits.device,
                    "context": context,
                    "predicted": found.value,
                    "low": found.low,
                    "high": found.high,
                    "measured": at["tokens_per_s"],
                }
    return None


def outcome_sentence(choice: Choice, outcome: Outcome | None) -> str:
    """Compare a prediction with its measurement."""
    found = choice.deep
    predicted = f"{choice.title}: predicted {found.value:.3g} tok/s ({found.low:.3g} to {found.high:.3g})"
    if outcome is None:
        return f"{predicted}, no measurement is ok"
    return f"{predicted}, measured {outcome['measured']:.3g}: off by {error(outcome):+.1%}"


def error(outcome: Outcome) -> float:
    """Predicted over measured, less 1."""
    return outcome["predicted"] / outcome["measured"] - 1


def keep_outcome(results: Path, outcome: Outcome) -> None:
    """Append an outcome."""
    with (results / FOLDER / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(outcome) + "\n")


def outcomes_so_far(results: Path) -> str | None:
    """The error of all predictions that were measured; null without any. A damaged line does not count."""
    try:
        lines = (results / FOLDER / NAME).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    errors, inside = [], 0
    for line in lines:
        try:
            outcome: Outcome = json.loads(line)
            off, lies_in = abs(error(outcome)), outcome["low"] <= outcome["measured"] <= outcome["high"]
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            continue
        if math.isfinite(off):
            errors.append(off)
            inside += lies_in
    if not errors:
        return None
    return (
        f"of {len(errors)} predictions that were measured, {inside} lie in their interval; median error "
        f"{statistics.median(errors):.1%}, largest {max(errors):.1%}"
    )


# The quality of a variant: scored here, else published for the same kind of weights. Pure.

HERE = "measured here"
# Options that change the weights or the cache; the others change speed and rounding alone.
_OPTIONS = ("double_quant", "dtype", "format", "bits", "type_k", "type_v")
_16_BITS = ("f16", "fp16", "bf16")
_SIZE = re.compile(r"\d+(?:\.\d+)?b\b", re.IGNORECASE)


_Key = tuple[str, ...]


class Perplexity(NamedTuple):
    """Perplexity of a variant's weights. `source`: who measured it."""

    model: str
    stack: str
    quant: str
    value: float
    source: str


def published_quality(records: Iterable[Record]) -> list[Perplexity]:
    """Collect the perplexities of published records."""
    found = []
    for record in records:
        value, source = (record.get("reported") or {}).get("perplexity"), record.get("source")
        if value and source:
            name = record["model"]["name"], record["stack"], record["variant"]
            found.append(Perplexity(*name, float(value), source["title"]))
    return found


def measured_quality(
    records: Iterable[Record], model: str, fingerprint: str | None = None
) -> dict[_Key, Quality]:
    """The quality of each variant of a model that was last scored, on the text that most of them have.

    `fingerprint`: of the model's weights. Scores of other weights under the same name do not count. Null: the
    fingerprint is unknown, and all scores of the name count.
    """
    found = [each for each in records if each["kind"] == "scored" and each["model"]["name"] == model]
    if fingerprint is not None:
        found = [each for each in found if _content(fingerprint) in _scored_weights(each)]
    found.sort(key=lambda each: each["started_utc"])
    rows = [analysis_quality.row(each) for each in found]
    chosen = analysis_quality.comparable(rows)
    of: dict[_Key, Quality] = {}
    for record, row in zip(found, rows, strict=True):
        if row in chosen:
            figures = row["figures"]
            options, kld = record["options"], figures["kld_mean"]
            weights = record["model"]["weights"]
            stored = weights.get("quant") if weights.get("format") == "gguf" else options.get("dtype")
            quant = options.get("quant") or stored
            ends = None if kld["low"] is None or kld["high"] is None else (kld["low"], kld["high"])
            loss = math.expm1(figures["ln_ppl_ratio"]["value"])
            of[_key(record["stack"], quant, options)] = Quality(loss, HERE, kld["value"], ends)
    return of


def _scored_weights(record: Record) -> list[object]:
    """The content of the weights that were loaded, and of the 16-bit ones that they were compared with."""
    reference: Mapping[str, Any] = record["quality"].get("reference") or {}
    whole = reference.get("weights") or {}
    given = record["model"]["weights"].get("fingerprint"), whole.get("fingerprint")
    # A reference out of a file has the digest of the content alone.
    return [whole.get("sample"), *(_content(str(each)) for each in given if each)]


def _content(fingerprint: str) -> str:
    """Strip the parts that a copy may change, such as times."""
    return fingerprint.rpartition("-")[2]


def _key(stack: str, quant: object, options: Mapping[str, Value]) -> _Key:
    return stack, str(quant).lower(), *(str(options.get(name)) for name in _OPTIONS)


def known_quality(
    perplexities: Sequence[Perplexity], model: str, scored: Mapping[_Key, Quality]
) -> Callable[[Candidate], Quality | None]:
    """Looks up the quality of a candidate's weights: scored here, else published of this model, else of the
    nearest size of its family; null where none is known. The kind of weights is always the same."""
    of_model: dict[str, dict[tuple[str, str], float]] = {}
    sources: dict[str, str] = {}
    for each in perplexities:
        of_model.setdefault(each.model, {})[each.stack, each.quant] = each.value
        sources[each.model] = each.source
    alike = [name for name in of_model if _family(name) == _family(model)]
    near = sorted(alike, key=lambda name: _far(name, model))

    def of(candidate: Candidate) -> Quality | None:
        cell, options = candidate.cell, candidate.cell.options(1)
        given = candidate.type or options.get("quant") or options.get("dtype")
        if here := scored.get(_key(cell.variant.stack, given, options)):
            return here
        stack, quant = candidate.cell.variant.stack, candidate.type or str(candidate.cell.quant)
        if any(candidate.cell.variant.options.get(name, "f16") != "f16" for name in ("type_k", "type_v")):
            return None  # a quantized cache adds another loss
        for name in near:
            found = of_model[name]
            plain = next((found[stack, q] for q in _16_BITS if (stack, q) in found), None)
            mine = found.get((stack, quant))
            if plain and mine:
                of_whom = "" if name == model else f"{name}, "
                return Quality(mine / plain - 1, f"{of_whom}{sources[name]}")
        return None

    return of


def _family(model: str) -> str:
    return _SIZE.split(model.lower(), maxsplit=1)[0]


def _far(name: str, model: str) -> float:
    sizes = [_SIZE.search(each.lower()) for each in (name, model)]
    if name == model:
        return -1.0
    if not all(sizes):
        return math.inf
    one, other = (float(found[0][:-1]) for found in sizes if found)
    return abs(math.log(max(one, 1e-9) / max(other, 1e-9)))
