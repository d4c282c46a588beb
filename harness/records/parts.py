"""Parts that records of several kinds have: campaign, machine, model, workload, facts of the stack.

A docstring below a key is its description in docs/record.schema.json.
"""

from typing import Any

from pydantic import (
    ConfigDict,
    with_config,
)
from typing_extensions import NotRequired, TypedDict

from harness.records.values import (
    Above0,
    Count,
    Extent,
    From0,
    Names,
    Number,
    Placements,
    Positive,
    Slug,
    Switch,
    Text,
)


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
