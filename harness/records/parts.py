"""Parts that several kinds of record share."""

from datetime import datetime
from functools import cache
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
    with_config,
)
from pydantic_core import CoreSchema, core_schema
from typing_extensions import NotRequired, TypedDict

# What single values of a record must be, and the clause that says where one is not.
#
# `MustBe` names a value's type in words; pydantic holds the value against it, without converting anything.


# What is more, or nearer to 0, is damage: no figure comes near, and products and ratios of it would overflow.
_MOST, _LEAST = 2**63, 2**-63


class MustBe:
    """The words for a type, in the place of pydantic's."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        words = f"must be {self.words}"
        return core_schema.custom_error_schema(
            schema, custom_error_type="value", custom_error_message=words.replace("{", "{{")
        )


class OneOf:
    """Text that is one of these."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.texts = texts

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.texts))


def _with_zone(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("no time zone")
    return text


OUTCOMES = ("ok", "oom", "error", "crash", "timeout", "interrupted", "refused", "unavailable")

Text = Annotated[str, MustBe("text")]
# It names folders and pages, so it must not lead out of one.
Slug = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,80}$"), MustBe("1 to 80 of a to z, 0 to 9 and -")]
Count = Annotated[int, Field(ge=0, lt=_MOST), MustBe("a whole number from 0")]
Positive = Annotated[int, Field(gt=0, lt=_MOST), MustBe("a whole number from 1")]
Extent = Annotated[int, Field(gt=0, lt=2**32), MustBe("a whole number from 1 to 4294967295")]
Number = Annotated[float, Field(gt=-_MOST, lt=_MOST, allow_inf_nan=False), MustBe("a number")]
From0 = Annotated[float, Field(ge=0, lt=_MOST, allow_inf_nan=False), MustBe("a number from 0")]
Above0 = Annotated[float, Field(gt=_LEAST, lt=_MOST, allow_inf_nan=False), MustBe("a number above 0")]
Switch = Annotated[bool, MustBe("true or false")]
Time = Annotated[str, AfterValidator(_with_zone), MustBe("a time with its zone")]
Outcome = Annotated[str, OneOf(OUTCOMES), MustBe(f"one of {', '.join(OUTCOMES)}")]
Pairs = Annotated[
    list[Annotated[list[Count], Field(min_length=2, max_length=2)]], MustBe("pairs of whole numbers")
]
Triples = Annotated[
    list[Annotated[list[Count], Field(min_length=3, max_length=3)]], MustBe("triples of whole numbers")
]
Fields = dict[str, Any]
"""A mapping of JSON whose keys have no types."""
Names = Annotated[list[str] | Fields, MustBe("names")]
Placements = Annotated[dict[str, Count] | list[Any], MustBe("counts by device")]

_CLAUSES = {
    "missing": "is missing",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "extra_forbidden": "is no part of a shape",
}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Building one takes up to 0.2 s, so only those that are needed are built."""
    return TypeAdapter(kind)


def clause(kind: Any, value: Any, where: str = "") -> str | None:
    """Where and how a value is not of a type, e.g. `timing.wall_s must be a number`; null where it is."""
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as wrong:
        first = wrong.errors(include_url=False, include_context=False, include_input=False)[0]
        place = where + "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
        return f"{place.removeprefix('.') or 'it'} {_CLAUSES.get(first['type'], first['msg'])}"
    return None


def plain(value: object) -> Any:
    """A value of JSON that comes from outside the records (a worker, the machine, a config): its type is
    checked when its record is finished."""
    return value


# Parts that records of several kinds have: campaign, machine, model, workload, facts of the stack.


# A docstring below a key is its description in docs/record.schema.json.


class Fleet(TypedDict):
    """A machine's place in a fleet, and its clock against that of the machine that started the run."""

    device: Text
    """the name of its Ray resource"""
    clock_ahead_s: NotRequired[Number]
    """seconds; missing in a record of a machine that never answered"""
    unauthenticated: NotRequired[Switch]
    """true where its Ray cluster asked for no token; else missing"""


class Campaign(TypedDict):
    id: Text
    """the time at which it began"""
    order: NotRequired[Text]
    """its place among the campaigns, where the clock was behind that of an earlier one; else missing"""
    name: Text
    config_path: NotRequired[Text]
    config: NotRequired[Any]
    """the config as given, `--set` applied"""
    command_line: NotRequired[list[Text]]
    side: NotRequired[Text]
    """of `harness ab` and `bisect`: A or B"""
    pair: NotRequired[Text]
    """of `harness ab` and `bisect`: the pair of cells, one of each side"""
    round: NotRequired[Positive]
    """of `harness ab` and `bisect`: in which the pair was measured once on each side; of `harness tune`: in
    which every remaining setting was measured once"""
    setting: NotRequired[Text]
    """of `harness tune`: the options that differ from the defaults"""
    fleet: NotRequired[Fleet]
    """of `harness run --on`: where in the fleet it ran"""


class Finding(TypedDict):
    """What `harness doctor` found on the machine before the campaign (docs/reference/doctor.md)."""

    level: Text
    what: Text
    found: Text
    effect: NotRequired[Text | None]
    fix: NotRequired[Text | None]


class Gpu(TypedDict):
    name: Text | None
    memory_bytes: Count | None
    uuid: NotRequired[Text | None]
    driver: NotRequired[Text | None]
    compute_capability: NotRequired[Text | None]


class CoreKind(TypedDict):
    name: Text
    """`performance`, or `efficiency` for the slowest kind"""
    cores: Positive
    max_khz: Count | None
    """by cpufreq"""


class Machine(TypedDict):
    """Properties that do not change; never the host's name."""

    slug: Slug
    """names the machine's folder"""
    cpu: Text | None
    physical_cores: Count | None
    """that the harness may use, by its affinity and quota"""
    all_cores: NotRequired[Positive]
    """physical cores of the whole machine; missing in older records"""
    core_kinds: NotRequired[list[CoreKind]]
    """the usable cores by kind, the fastest first; empty: one kind, or not known; missing in older records"""
    memory_bytes: Count | None
    usable_cpus: NotRequired[Count | None]
    last_level_cache_bytes: Count | None
    page_bytes: NotRequired[Positive | None]
    """size of a memory page; missing in older records"""
    emulated: NotRequired[Text | None]
    """how it shows that an emulator runs the machine's programs: their speeds mean nothing, and what would be
    `ok` is `functional`"""
    gpus: list[Gpu]


@with_config(ConfigDict(extra="forbid"))
class ShapeFields(TypedDict):
    """A dense model: the arguments of `dense` (harness/theory/decoder.py)."""

    arch: Text
    vocab_size: Extent
    hidden_size: Extent
    layers: Extent
    intermediate_size: Extent
    heads: Extent
    kv_heads: Extent
    head_dim: Extent
    tied: NotRequired[Switch]
    qkv_bias: NotRequired[Switch]
    o_bias: NotRequired[Switch]
    mlp_bias: NotRequired[Switch]
    qk_norm: NotRequired[Switch]
    rope_theta: NotRequired[Above0]
    norm_eps: NotRequired[Above0]
    context: NotRequired[Extent]
    window: NotRequired[Extent | None]


class Header(TypedDict):
    """Exact bytes by the header of the weights' files."""

    model_bytes: Count
    parameters: Count
    input_embedding_bytes: Count
    tied: Switch
    expert_bytes: NotRequired[Count]
    """of all experts"""
    table_bytes: NotRequired[Count]
    """of other tables with a row for each token"""
    draft_bytes: NotRequired[Count]
    """of layers that only draft tokens, which plain decode does not read"""
    bytes_by_type: NotRequired[dict[str, Count]]
    """of GPTQ and AWQ by `qweight`, `qzeros`, `scales`, `g_idx` and the types of the rest"""


class Kept(TypedDict):
    """What layers of one kind keep of earlier tokens (harness/theory/layer_parts.py, Cache)."""

    layers: Count
    k: Count
    v: Count
    products: Count
    window: Extent | None
    chunked: Switch
    borrowed: Switch
    expanded: Count
    state: Count


class DecoderFacts(TypedDict):
    """The parts of a model that a token reads, if the model is not dense."""

    architecture: Text
    experts: Count
    experts_used: Count
    """by a token, in a layer"""
    layer_params: Count
    """that a token is computed with"""
    lm_head_params: Count
    caches: list[Kept]


class Attention(TypedDict):
    layers: Count
    kv_heads: Count
    head_dim: Count


class EngineFiles(TypedDict):
    """Files of an engine's own format that were made of the checkpoint."""

    bytes: Count
    digest: Text
    """of a sample of their content"""


class Weights(TypedDict):
    kind: Text
    """`synthetic`, `file`, `hub`"""
    synthetic: NotRequired[Switch]
    file: NotRequired[Text | None]
    file_bytes: NotRequired[Count | None]
    """of all shards"""
    header: NotRequired[Header | None]
    attention: NotRequired[Attention | None]
    decoder: NotRequired[DecoderFacts | None]
    """null for a dense model"""
    fingerprint: NotRequired[Any]
    architecture: NotRequired[Any]
    format: NotRequired[Any]
    quant: NotRequired[Any]
    revision: NotRequired[Any]
    """the commit on the hub that the requested branch or tag stood for"""
    shards: NotRequired[Any]
    """number of files"""
    yarn_difference: NotRequired[From0]
    """of a GGUF with YaRN, the largest share by which llama.cpp's rotary frequencies are off the model's;
    missing where they are not"""
    made: NotRequired[EngineFiles]
    packing: NotRequired[Any]
    """of GPTQ and AWQ: `method`, `bits`, `group_size` (-1: a whole column), `symmetric`, `act_order`,
    `layout`; else null"""


class Model(TypedDict):
    name: Text
    shape: NotRequired[ShapeFields | None]
    config: NotRequired[Any]
    """config.json of a model that is not dense, where the config names one as its shape"""
    weights: Weights


class Workload(TypedDict):
    kind: Text
    """`decode`, `grow`, `max_ctx`, `prefill`, `depth`, `turns`, `batch` or `quality`"""
    prompt_tokens: Count
    new_tokens: Count
    prompt: NotRequired[list[Count]]
    """ids of its tokens"""
    prompt_source: NotRequired[Text]
    concurrency: NotRequired[list[Count]]
    """of `batch`: users at once, each number in `rounds` rounds"""
    rounds: NotRequired[Count]
    turns: NotRequired[Count]
    prefix_cache: NotRequired[list[Switch]]
    """of `turns`: a conversation without its prefix kept, and one with it"""
    bos: NotRequired[Switch]
    """of `quality`: false: no BOS was put in front; missing: where the tokenizer asks for one"""
    past_trained: NotRequired[Switch]
    """of `max_ctx`: searched past the trained context; missing: not, but for older records"""


class LoadedOptions(TypedDict):
    n_ctx: NotRequired[Count | None]
    threads: NotRequired[Count | None]


class Allocator(TypedDict):
    """CUDA's caching allocator."""

    allocated_bytes: NotRequired[Count | None]
    reserved_bytes: NotRequired[Count | None]


class Misplaced(TypedDict):
    tensor: Text
    asked: Text
    found: Text | None
    """null: the stack does not report it"""


class Placed(TypedDict):
    """Tensors that `n_cpu_moe` and `override_tensor` of llama.cpp match, by its log."""

    tensors: NotRequired[dict[str, Count]]
    """how many are in each type of buffer"""
    bytes: NotRequired[dict[str, Count]]
    misplaced: list[Misplaced]


class LoadedModel(TypedDict):
    """A model in a server's memory."""

    name: Text
    bytes: Count | None


class Served(TypedDict):
    """The server that was measured over HTTP."""

    api: Text
    path: Text
    """address of its requests"""
    model: Text
    """by its own name"""
    file: NotRequired[Text | None]
    """of its weights, or their folder or repository, where the server says it"""
    sends_ids: Switch
    """false: ids in the series stand for the texts of tokens"""
    template: Switch
    """it puts a chat template around the prompt"""
    elsewhere: Switch
    """it is another process, whose memory is unknown"""
    slots: NotRequired[Count | None]
    """requests that it can serve at once"""
    speculation: NotRequired[Text]
    """what guesses tokens ahead, by the server's own name; none"""
    num_ctx: NotRequired[Count | None]
    """context length that was requested of Ollama"""
    gpu_share: NotRequired[Number | None]
    """of the memory that the model takes, where the server reports it"""
    loaded_too: NotRequired[list[LoadedModel]]
    """other models that it had in memory, where it reports them (Ollama, LM Studio)"""
    file_bytes: NotRequired[Count | None]
    """of the weights, where it lists them (Ollama)"""
    parameter_size: NotRequired[Text | None]
    """parameters in its own words, as 8.2B"""
    experts: NotRequired[Count | None]
    """in a layer; 0: a dense model; null: not reported"""
    other_forms: NotRequired[list[Text]]
    """of fields that the server refused: what was sent instead"""


class StackFacts(TypedDict):
    """Facts that the stack reports, after loading and again after the run."""

    model_bytes: NotRequired[Count | None]
    """as the stack counts; with `tied`, exact bytes as loaded, packed weights with their scales: they
    take precedence over the file's header"""
    parameters: NotRequired[Count | None]
    vocab_size: NotRequired[Count | None]
    input_embedding_bytes: NotRequired[Count | None]
    tied: NotRequired[Switch]
    expert_bytes: NotRequired[Count]
    table_bytes: NotRequired[Count]
    draft_bytes: NotRequired[Count]
    versions: NotRequired[dict[str, Text]]
    """exact versions"""
    quant: NotRequired[Text | None]
    """type of the weights"""
    kernels: NotRequired[Names]
    """kernels or layer classes that run, with counts"""
    kernel_asked: NotRequired[Text | None]
    """the requested kernel"""
    leftovers: NotRequired[list[Text] | None]
    """layers that should have been quantized and are not"""
    devices: NotRequired[dict[str, Placements] | None]
    """by part and device: how many tensors or layers; `present`: the devices of this machine"""
    placement: NotRequired[Placed | None]
    """null: no tensor was to be elsewhere than its layer"""
    graph_splits: NotRequired[dict[str, Count] | None]
    """parts of llama.cpp's graph of a prompt and of a step, each on one device"""
    options: NotRequired[LoadedOptions | None]
    """as the stack resolved them"""
    settings: NotRequired[Any]
    """other settings that change speed or values"""
    kv_read: NotRequired[Text | None]
    """how a step reads its cache: `grows`, `padded256`, `full`, `copied`, `window` (concepts/theory.md)"""
    kv_bytes_per_token: NotRequired[Count | None]
    window: NotRequired[Count | None]
    """tokens of a sliding window"""
    trained_context: NotRequired[Count | None]
    warnings: NotRequired[list[Text] | None]
    """of the stack, in sentences"""
    memory: NotRequired[dict[str, dict[str, Count]] | None]
    """bytes by part and device; torch's weights on a CPU that are used in place from the mapped file are
    `cpu mapped`"""
    heap_free_bytes: NotRequired[Count | None]
    """free bytes in malloc's heap (glibc 2.33 and newer, else null)"""
    allocator: NotRequired[Allocator | None]
    holds_tokens: NotRequired[Any]
    """tokens that the cache can hold, where that is less than the context"""
    served: NotRequired[Served | None]
    draft_model_bytes: NotRequired[Count]
    """of the file of another model that guesses tokens ahead"""
    functional: NotRequired[Any]
    """why the speed of this stack means nothing on this device; null elsewhere"""


class MemoryBudget(TypedDict):
    bytes: Positive
    means: Text
    """what enforced it: `cgroup v2`, `cgroup v1` or `RLIMIT_DATA`"""


# The keys that records of every kind have, and those of the kinds that a campaign makes.


class Begun(TypedDict):
    """Keys that are known before anything is measured."""

    schema: NotRequired[Positive]
    """1"""
    kind: Text
    """`measured`, `checked`, `searched`, `scored` or `reported`"""
    cell: Text
    """the cell's id"""
    repeat: Positive
    content_key: Text
    """hash of cell, resolved options, stack build and versions, weights, machine and device"""
    campaign: Campaign
    """id, name, config, its path, and its command line"""
    started_utc: Time
    stack: Text
    variant: Text
    machine: Machine
    model: Model
    """shape, and weights: source, file, exact bytes"""
    workload: Workload
    doctor: NotRequired[list[Finding]]
    """findings on the machine before the campaign; missing in older records, and if the device is missing"""
    device: NotRequired[Text]
    """NVML's UUID of a GPU, `cpu`, the name of another device, or `server`: another process computed, on
    what loaded.served reports"""


class Ended(TypedDict):
    """Keys that tell how it ended."""

    outcome: Outcome
    """how it ended"""
    reason: NotRequired[Text | None]
    """why it ended so"""
    tokens: Count
    """generated; 0 without a series"""


class Common(Begun, Ended):
    """Keys of every kind."""


class Asked(TypedDict):
    device: Text
    options: NotRequired[Any]
    gpu: NotRequired[Any]


class Version(TypedDict):
    version: Text
    git_commit: Text | None
    """with `+` if files differ from it"""


class CpuTime(TypedDict):
    """How much CPU time was used while timing, in seconds over all CPUs."""

    elapsed_s: Above0
    """time between the two readings"""
    machine_s: Number
    """by all processes of the machine, also those outside a container; without steal"""
    harness_s: Number
    """by the harness: its controller, the worker, and what these started"""


class Conditions(TypedDict):
    """Variable properties of the machine (governor, load, swap), and how much counters rose while timing."""

    cpu_quota: NotRequired[Number | None]
    """in CPUs, the lowest of the harness's cgroups; null: none, or not known"""
    pressure: NotRequired[dict[str, Number]]
    """of the whole machine: paging, stalls, steal; and throttling by quotas, of the harness's cgroups"""
    worker_pressure: NotRequired[dict[str, Number]]
    """of the worker's own cgroup, empty without one"""
    cpu_time: NotRequired[CpuTime]
    """missing in older records, where nothing was timed, and of simulated time"""


class Adopted(TypedDict):
    """The user's own interpreter, where it ran the stack; its path is not recorded."""

    python: NotRequired[Text | None]
    pins_not_met: NotRequired[list[Text] | None]


class Environment(TypedDict):
    """The Python environment of the stack."""

    name: NotRequired[Text | None]
    key: NotRequired[Text | None]
    """hash of all that it was built from; missing where `adopted` is there"""
    variables: NotRequired[Fields | None]
    """build flags"""
    toolkit: NotRequired[Text | None]
    """version of the CUDA toolkit that compiled it"""
    lock: NotRequired[list[Text] | None]
    """exact versions"""
    runner: NotRequired[Text | None]
    """hash of the runner's source"""
    adopted: NotRequired[Adopted | None]


class OwnBegun(TypedDict):
    """Keys of a campaign's records that are known before any measurement."""

    asked: Asked
    """the requested options and device"""
    options: NotRequired[Fields]
    """all options, as resolved"""
    threads: NotRequired[Positive]
    harness: NotRequired[Version]
    protocol: NotRequired[Any]
    """as resolved"""
    environment: NotRequired[Environment | None]
    variables: NotRequired[Fields | None]
    """environment variables that change speed"""
    conditions: NotRequired[Conditions | None]
    place_in_order: NotRequired[Any]
    """this run's place among those of the campaign, and their number when it began"""
    known_failure: NotRequired[list[Text]]
    """known reasons to fail, before the run, a sentence each; missing if none"""


class OwnEnded(TypedDict):
    """Keys of a campaign's records for how a measurement ended."""

    phase: NotRequired[Any]
    """where it ended"""
    exit_status: NotRequired[Any]
    log_tail: NotRequired[Any]
    """the last lines of the worker's log"""
    loaded: NotRequired[StackFacts | None]
    """the stack's facts after loading"""
    memory_budget: NotRequired[MemoryBudget]
    """missing without a budget; a search on a CPU also has it without a stated budget: the limit of its
    probes"""


class Own(OwnBegun, OwnEnded):
    """Keys of the kinds that a campaign makes."""
