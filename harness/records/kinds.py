"""Every kind of record: timed, checked, scored, searched; and the schema."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import NotRequired, TypedDict, get_original_bases

from harness.records import measured
from harness.records.measured import (
    Attempt,
    EndFacts,
    Measured,
    Memory,
    OnlyMeasured,
    OnlyReported,
    Published,
    Timing,
)
from harness.records.parts import (
    Above0,
    Begun,
    Common,
    Count,
    Ended,
    From0,
    Number,
    Own,
    OwnBegun,
    OwnEnded,
    Pairs,
    Positive,
    StackFacts,
    Switch,
    Text,
    clause,
)

# `kind: checked`: one variant's logits against the 16-bit reference of its model.


class ReferenceAsked(TypedDict):
    """The one available; `lock`: the hash of its versions."""

    stack: Text
    variant: Text
    lock: NotRequired[Any]
    weights: NotRequired[Any]


class CheckAsked(TypedDict):
    """A check with the same `asked` and `content_key` is not repeated unless it failed: then by
    `run --check-weights`, and by a run with `--retry-failed`."""

    windows: Pairs
    """positions from 0, [first, end): the last 25 of the prompt, and 25 up to n = 300, 2,100, twice that
    and so on, and the workload's last"""
    seconds: Above0
    """its time limit"""
    reference: ReferenceAsked | None
    """null without one"""
    own: NotRequired[Any]
    """what identifies the comparison with the variant's own weights; null for one not quantized; missing in
    older records"""


class Reference(TypedDict):
    """A reference that has run."""

    name: Text
    why: Text
    """this precision, or not transformers"""
    stack: NotRequired[Any]
    options: NotRequired[Any]
    weights: NotRequired[Any]
    unpacked: NotRequired[Any]
    """whether it has the variant's own weights, unpacked or dequantized"""
    environment: NotRequired[Any]
    versions: NotRequired[Any]
    seconds: NotRequired[Any]
    file: NotRequired[Any]
    """that it was read from: name, and hash of its description"""


class Depth(TypedDict):
    """A window; errors are null where logits are not finite."""

    n: Positive
    """its last position, from 1"""
    positions: Positive
    not_finite: Count
    """positions with logits that are not finite"""
    reference_not_finite: Count
    """the same of the reference, or all 0"""
    relative_error: From0 | None
    """length of the difference over the reference's, mean over positions"""
    relative_error_max: From0 | None
    scale: NotRequired[From0 | None]
    """norm of the logits over the reference's, mean over positions; missing in older records"""
    top1_agreement: From0 | None
    kl_nats: From0 | None
    near_ties: Count | None
    """positions where another token comes first and the reference's first two are within 0.001 of its
    spread"""


class Experts(TypedDict):
    """For a mixture: the reference's routers chose the variant's experts."""

    experts: Positive
    """in a layer"""
    used: Positive
    """by a token, as the reference has it"""
    chosen: Positive
    """the same, of the variant: if it differs, the reference chose its own"""
    choices: Count
    """compared, one for each token and layer"""
    others: Count
    """of these: other experts than the reference's own choice"""
    gap: From0
    """root mean square over the choices: by how much the reference's highest score of an expert that was left
    exceeds its lowest of one chosen (0 where they are its own choice), over sqrt(2) and the scores' spread"""


class OwnWeights(TypedDict):
    """A quantized variant against its own weights, dequantized and run in float32."""

    settings: list[Text]
    """settings of the file that differ from those of the 16-bit weights, a sentence each"""
    values: NotRequired[Any]
    """the file against the 16-bit weights: the worst `matrices`, by their worst row, and `vectors`, with
    their relative errors, and names that are `missing`; null without 16-bit weights"""
    reference: Reference
    depths: list[Depth]
    experts: NotRequired[Experts]
    """of a mixture"""


class Check(TypedDict):
    asked: CheckAsked
    speaks_for: list[Text]
    """content keys of the cells of this model and variant, of all workloads"""
    unchecked: NotRequired[Text]
    """why there is no reference; else missing. If the reference failed, see `outcome` and `reason`"""
    reference: NotRequired[Reference]
    left_out: NotRequired[Pairs]
    """windows skipped for the time limit"""
    depths: NotRequired[list[Depth]]
    experts: NotRequired[Experts]
    """of a mixture; missing where its stack cannot tell them, and in older records"""
    ran: NotRequired[StackFacts | None]
    """facts of the variant's job that the verdict reads: kernels, options"""
    own: NotRequired[OwnWeights]
    """of a quantized variant"""
    own_failure: NotRequired[Text]
    """why that comparison failed; the verdict is from the 16-bit reference alone"""
    versions: NotRequired[Any]
    """of the variant's job"""
    seconds: NotRequired[Any]


class OnlyChecked(TypedDict):
    """Keys that no other kind has."""

    check: Check


class Checked(Common, Own, OnlyChecked):
    """A check of weights: no series, and the keys of a measured record up to `conditions`."""


def checked_error(record: Checked) -> str | None:
    """A completed check's missing part, as a clause: each depth needs an error or non-finite values."""
    if record["outcome"] != "ok":
        return None
    check = record["check"]
    if not check.get("depths") or "reference" not in check:
        return "check.depths and check.reference must be there where the outcome is ok"
    for index, depth in enumerate(check["depths"]):
        if depth["relative_error"] is None and not depth["not_finite"] + depth["reference_not_finite"]:
            return f"check.depths[{index}].relative_error is missing"
    return None


# `kind: scored`: the quality of one variant on a text, teacher-forced.


class Figure(TypedDict):
    value: Number
    low: Number | None
    """of its 95% interval over windows; null for a maximum, and of a single window"""
    high: Number | None
    standard_error: NotRequired[From0 | None]
    """from the spread of the windows; missing for percentiles"""


class ScoredText(TypedDict):
    file: Text
    sha256: Text
    license: NotRequired[Text | None]
    """of the text that is shipped"""
    tokens: Positive
    """of the whole text"""
    ids_sha256: Text
    """of the ids of the windows, as 64-bit integers, little-endian"""
    special: NotRequired[dict[str, Count]]
    """how often strings come that are special tokens of some tokenizers; they are scored as text"""
    carriage_returns: NotRequired[Count]
    """of lines that end in CRLF; they are scored as they stand"""


class WindowMeans(TypedDict):
    """One value a window."""

    nll: list[Number]
    """nats per token"""
    reference_nll: NotRequired[list[Number]]
    kld: NotRequired[list[Number]]
    top1: NotRequired[list[Number]]


class AtDepth(TypedDict):
    """Windows of one length, of which as many last positions are scored as of those of `n_ctx`."""

    depth: Positive
    """tokens of a window"""
    windows: Positive
    scored: Positive
    """positions"""
    figures: dict[str, Figure]
    """as of the whole score"""
    means: WindowMeans


class NotFinite(TypedDict):
    """The first position whose logits are NaN or infinite, counted from 1."""

    window: Positive
    position: Positive


class Quality(TypedDict):
    asked: Any
    """text, windows and reference: a score with the same `asked` and `content_key` is not repeated"""
    text: NotRequired[ScoredText]
    windows: NotRequired[Count]
    n_ctx: NotRequired[Positive]
    """tokens of a window; those after its first half are scored"""
    scored: NotRequired[Count]
    """positions"""
    bos: NotRequired[Count | None]
    """the id of the BOS that each window begins with; null: none, because the tokenizer asks for none or the
    workload has `bos: false`; missing: none, in records of earlier versions"""
    vocabulary: NotRequired[Positive]
    reference: NotRequired[Reference]
    no_reference: NotRequired[Text]
    """why there are no 16-bit weights to compare with; the figures are then `ppl` alone"""
    loss_nats: NotRequired[From0]
    """by which the mean KLD may be off, because the reference is kept in 16 bits a logit"""
    figures: NotRequired[dict[str, Figure]]
    """`ppl`, `ln_ppl_ratio`, `kld_mean`, `kld_median`, `kld_p90`, `kld_p99`, `kld_p99_9`, `kld_max` (nats),
    `top1`, `top5`, `rms_dp` (shares)"""
    means: NotRequired[WindowMeans]
    at_depth: NotRequired[list[AtDepth]]
    """of the workload's `depths`; they end at the same tokens"""
    trained_context: NotRequired[Positive | None]
    """the longest context of the model's training, in tokens; null: not known"""
    not_finite: NotRequired[NotFinite]
    ran: NotRequired[StackFacts | None]
    """facts of the job: kernels, options"""
    versions: NotRequired[Any]
    seconds: NotRequired[Any]


class OnlyScored(TypedDict):
    """Keys that no other kind has."""

    quality: Quality


class Scored(Common, Own, OnlyScored):
    """A score: no series, and the keys of a measured record up to `conditions`."""


def scored_error(record: Scored) -> str | None:
    """A completed score's missing part, as a clause: figures, or the position that is not finite."""
    quality = record["quality"]
    if record["outcome"] == "ok" and "not_finite" not in quality and not quality.get("figures"):
        return "quality.figures must be there where the outcome is ok"
    return None


# `kind: searched`: one search for the longest context.


class Probe(TypedDict):
    n_ctx: Positive
    limit_bytes: Positive
    filled: Switch
    """whether filling was requested"""
    fits: Switch | None
    allocates: Switch
    decodes: NotRequired[Any]
    outcome: NotRequired[Any]
    reason: Text | None
    phase: NotRequired[Any]
    """the last one"""
    held: NotRequired[Any]
    """tokens"""
    decode: NotRequired[Any]
    """[tokens of context, ms of the fastest of 8 steps]"""
    peak_bytes: Count | None
    """counted as the limit counts"""
    seconds: Number
    fill_s: Number | None
    estimate_s: NotRequired[Any]
    speed_ratio: Number | None
    """the last step over the line through the others"""
    left_out: Text | None
    free_before_bytes: NotRequired[Any]
    waited_s: NotRequired[Any]
    """for memory to be freed"""
    pressure: NotRequired[Any]
    """pages read again while it was filled"""
    cpu_wait_share: NotRequired[Any]
    memory: NotRequired[Any]
    """as of `loaded`, at the end"""
    allocator: NotRequired[Any]


class Search(TypedDict):
    probes: list[Probe]
    granule: NotRequired[Positive | None]
    """contexts are multiples of it, in tokens, from `lowest` to `highest`"""
    lowest: NotRequired[Any]
    highest: NotRequired[Any]
    limit_bytes: NotRequired[Positive | None]
    """the memory limit"""
    limit_stated: NotRequired[Any]
    """whether the config states it, else the free memory"""
    held_by_others_bytes: NotRequired[Any]
    """memory of a GPU in use before the search began"""
    predicted_n_ctx: NotRequired[Positive | None]
    """predicted from the stack's job `account`, to be filled; without `account` from the first probe"""
    predicted_allocated_n_ctx: NotRequired[Positive | None]
    """predicted, only to be allocated; null without `account`"""
    predicted_from: NotRequired[Text | None]
    """`account`, or `first probe`"""
    need: NotRequired[dict[str, From0] | None]
    """bytes by part at `predicted_n_ctx` (of the shortest context, if none fits); null without `account`"""
    account_s: NotRequired[Number]
    """seconds of the job `account`"""
    verified_n_ctx: NotRequired[Positive | None]
    """the longest verified"""
    verified_by: NotRequired[Text | None]
    """`decode` at its end, or `allocation`"""
    allocated_n_ctx: NotRequired[Positive | None]
    """the longest that was allocated"""
    limit_reason: NotRequired[Text | None]
    """why the next longer one failed, or was not tried"""
    limited_by: NotRequired[Text | None]
    """`memory`, `trained context`, or `stack`: it allows no longer one; missing in older records"""
    not_filled: NotRequired[Text | None]
    """why contexts were not filled although requested"""


class OnlySearched(TypedDict):
    """Keys that no other kind has."""

    search: Search


class Searched(Common, Own, OnlySearched):
    """A search: no series, `search` instead of `done`, and `loaded` of the last probe."""

    timing: Timing


class UntimedEnd(Ended, OwnEnded):
    """How a check, a score or a search ended."""

    timing: Timing
    check: NotRequired[Check]
    quality: NotRequired[Quality]
    search: NotRequired[Search]


class Draft(Begun, OwnBegun, Attempt):
    """A record whose measurement has begun; its results are added to it later, or replace it."""

    check: NotRequired[Check]
    quality: NotRequired[Quality]
    search: NotRequired[Search]


# The kinds of records as types, one file per kind, and what is wrong with one. Records stay plain dicts.
#
# Keys that no type names are allowed, and are not read.


KINDS: Mapping[str, Any] = {
    "measured": Measured,
    "reported": Published,
    "checked": Checked,
    "searched": Searched,
    "scored": Scored,
}


class Record(Common, Own, OnlyMeasured, OnlyReported, OnlyChecked, OnlySearched, OnlyScored):
    """A record of any kind, as its readers see it: `kind` tells which keys it has."""


def loaded_of(record: Record) -> StackFacts:
    """The stack's facts after loading; empty if it did not get that far."""
    return record.get("loaded") or StackFacts()


def done_of(record: Record) -> EndFacts:
    """The worker's report at the end; empty if the worker did not get that far."""
    return record.get("done") or EndFacts()


def memory_of(record: Record) -> Memory:
    """The measured memory; empty where no worker ran, and where it was the client of another process."""
    return Memory() if served_elsewhere(record) else record.get("memory") or Memory()


def served_elsewhere(record: Record) -> bool:
    """Whether a server in another process computed, or was to, whose memory is unknown."""
    served = loaded_of(record).get("served")
    return served["elsewhere"] if served else "url" in (record.get("options") or {})


class Numbered(TypedDict):
    schema: Positive


_ERRORS: Mapping[str, Any] = {"measured": measured.error, "checked": checked_error, "scored": scored_error}


def checked(fields: Any) -> Record:
    """The record that these fields are. Raises ValueError with a clause: why readers could not use it."""
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"its kind must be one of {', '.join(KINDS)}")
    if wrong := clause(KINDS[kind], fields) or (kind in _ERRORS and _ERRORS[kind](fields)):
        raise ValueError(wrong)
    record: Record = fields
    return record


def wrong_with(record: Any) -> str | None:
    """Why readers could not use this record, as a clause; null when they can."""
    try:
        checked(record)
    except ValueError as wrong:
        return str(wrong)
    return None


# The JSON Schema of records, docs/record.schema.json.


def json_schema() -> Any:
    """One schema for the five kinds, with `kind` as discriminator; each key has its description."""
    every: Any = Annotated[
        Measured | Checked | Searched | Scored | Published, Field(title="A record of harness")
    ]
    # pydantic reads descriptions from the source, which takes 0.35 s: only here
    described = ConfigDict(use_attribute_docstrings=True)
    schema = TypeAdapter(every, config=described).json_schema()
    for name, kind in KINDS.items():
        properties = schema["$defs"][kind.__name__]["properties"]
        properties["kind"] = {"const": name}
        for part in _parts_of(kind):  # of a class's own keys alone it reads them
            alone = TypeAdapter(list[part], config=described)  # type: ignore[valid-type]
            own = alone.json_schema()["$defs"][part.__name__]
            for key, value in own["properties"].items():
                if description := value.get("description"):
                    properties[key]["description"] = description
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _parts_of(kind: Any) -> Iterator[Any]:
    """The types that a kind takes its keys from, and theirs."""
    for base in get_original_bases(kind):
        if hasattr(base, "__annotations__"):
            yield base
            yield from _parts_of(base)
