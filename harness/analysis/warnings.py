"""Every warning on a measurement, and every reason why one is invalid: cause, effect and next step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, unique

from harness.analysis.columns import Disturbance, FlagRow

ALL = "all"
DISTURBANCES: dict[Disturbance, tuple[str, str]] = {
    "cpu": ("other processes used the CPUs", "close other programs, or lower `threads`"),
    "steal": ("the hypervisor withheld the CPUs", "measure on CPUs of your own, or at another time"),
    "quota": ("a CPU quota throttled its threads", "raise or remove it (--cpus, CPUQuota)"),
    "memory": ("memory was short and pages were read from disk", "close programs that use memory"),
    "heat": ("the device was throttled", "let it cool (protocol.cool_down)"),
    "warmup": ("warm-up never settled", "close other programs"),
    "server": ("others used the server", "keep other clients away from it"),
    "gpu": ("other processes used the GPU", "close them (nvidia-smi lists them), or choose another GPU"),
    "ended": (
        "the model ended its answers early",
        "measure more attempts (protocol.retry_disturbed), or by an API that ignores the end of a text"
        " (llama-server, vLLM)",
    ),
    "suspend": ("the machine was suspended", "keep it awake (systemd-inhibit)"),
}
"""What on the machine, not in the stack, makes a repeat invalid, so that another attempt may be ok: cause and
next step."""

SYNCHRONISE = "wait for the device before each reading of the clock"
OPTIONS = "change the option, or the version of the stack, so that it runs what is requested"
DEVICE = "lower n_ctx or take fewer bits, so that all fits on the device, or request the placement"
WEIGHTS = "fetch or convert the file again, and check that it is of this model and type"
CACHE = "report it to the stack's authors; its speed is of other work than the workload's"
CLOCKS = "report it with the record: one of the two clocks is wrong"


_OTHER_WORK = (
    "other processes used {others:.1f} CPUs while timing ({cores}; its own processes used {own:.1f})"
)


def _note(cause: str, next_step: str) -> tuple[str, str, None]:
    return cause, next_step, None


def _disturbed(by: Disturbance, cause: str) -> tuple[str, str, str, Disturbance]:
    return cause, DISTURBANCES[by][1], ALL, by


_EFFECTS = {"all": "invalid", "W": "no W", "first token": "no TTFT", "speed": "functional", None: "note"}


@unique
class Warnings(Enum):
    """A member's name is the code that rows and `harness fit --fail-on` have. `cause`: a sentence with the
    numbers that it takes. `invalidates`: which figures: `all`, `W`, `first token` or
    `speed`; None: none, a note."""

    # A series, against the hardware and itself. `harness fit` has these too.
    faster_than_limit = "{took}, but reading the weights takes {least:.2f}", SYNCHRONISE
    first_token_faster_than_limit = (
        "the first token took {took:.2f} ms, but reading the weights takes {least:.2f}",
        SYNCHRONISE,
        "first token",
    )
    slope_faster_than_limit = (
        "W is {W:.0f} tokens/ms, but bandwidth allows {most:.0f}",
        "check that steps read the whole KV cache: a window, or a cache in fewer bits, reads less",
        "W",
    )
    first_token_unsynchronised = (
        "the first token took {first:.2f} ms, later steps {later:.2f}: prefill reads all weights too{second}",
        SYNCHRONISE,
        "first token",
    )
    plateau_past_window = (
        "latency rises up to n = {n} and is flat from there: the cache rolled over",
        "raise n_ctx above the length of the run",
    )
    slower_at_new_lengths = _note(
        "a context length is slower the first time: {seen:.2f} ms a token where the warm-up had been,"
        " {new:.2f} at the next {tokens}{why}",
        "a second pass over the same lengths is faster; with cuDNN's attention also cudnn_attention: false",
    )
    identical_series = "equal to the last digit to {others}", "measure again: one of them is a copy"
    own_threads_waited = _note(
        "its threads waited for a CPU {share:.0%} of the time, for each other: the stack runs more than"
        " {threads}",
        "compare it with one thread less",
    )
    early_stop = _note("{tokens} of {expected}", "ignore the end-of-sequence token")
    died = _note("zeros from n = {n} on, treated as the end of the series", "find out why the run ended")
    drift = _note(
        "latency jumps from {before:.2f} to {after:.2f} ms at n = {n:,}: the machine or the kernel changed,"
        " not the workload",
        "measure again; if it jumps at the same n, the stack changes its kernel there",
    )
    halves_differ = _note(
        "the first half gives B {first_B:.2f} ms, the second {second_B:.2f}; latency rises by {first:.3g} and"
        " {second:.3g} ms per 1,000 tokens: noise is slow here, and the intervals allow for it",
        "close other programs and measure more repeats",
    )
    kernel_change = _note(
        "{series} series of this stack change at n = {n:,}: a change of kernel",
        "read B and W of each segment",
    )
    machine_drift = _note(
        "the same tokens took {share:.1%} {longer} after the run: the machine changed; B and W are without"
        " it",
        "let the device cool (protocol.cool_down), or fix its clocks",
    )
    late_second_token = _note(
        "the gap before the second token took {gap:,.0f} ms, later ones {later:.2f}: it belongs to prefill,"
        " and no figure of decode has it",
        SYNCHRONISE,
    )
    spikes_left_out = _note(
        "B and W leave out slow outliers (spikes); with them {line}",
        "close other programs; spikes at a fixed distance are the stack's",
    )
    repeated_blocks = _note(
        "{copies:,} of {tokens:,} latencies repeat earlier ones in blocks: copies give no interval",
        "measure again: latencies were copied",
    )
    repetitions_differ = _note(
        "its repetitions differ by {spread:.0%} (standard deviation)",
        "close other programs, and measure more repetitions",
    )
    bends = _note(
        "latency bends with depth: no line describes it well",
        "read the speed at each depth instead of B and W",
    )
    B_not_identifiable = _note(
        "B, the time of a token at zero context, is not known to 10%: {interval}{tpot}",
        "measure more tokens or repeats, or read TPOT",
    )

    cores_of_several_kinds = _note(
        "{threads} on {cores}: the slowest core that has a thread holds up the others",
        "compare other numbers of threads (harness tune)",
    )

    # Differences between the run and the request.
    other_length = "{tokens} generated, {requested} requested", "report it to the stack's authors"
    server_stopped = (
        "{tokens} generated, {requested} requested: the server stopped early{reason}",
        "read the server's log",
    )
    server_limit = (
        "{tokens} generated, {requested} requested: the server stopped early, at a limit of its own",
        "give it a larger context (llama-server -c, Ollama num_ctx, vLLM --max-model-len), or request fewer"
        " tokens",
    )
    more_than_requested = (
        "{tokens} or more came, {requested} requested",
        "see what the server sends besides its tokens: a piece of its answer is not one token",
    )
    answer_too_short = _disturbed(
        "ended", "the model ended its answer after {tokens} of {requested}: a rate needs {least}"
    )
    answer_ended = _note(
        "the model ended its answer after {tokens} of {requested}: its figures are those of these tokens",
        "read tok/s of contexts up to there, or measure by an API that ignores the end of a text"
        " (llama-server, vLLM)",
    )
    usage_unusable = _note(
        "the server counts {counted} tokens in its answer, and {came} came: its count is not used",
        "read tok/s, which is by what came",
    )
    counted_by_proxy = _note(
        "the answers come through {proxy}, whose counts of tokens need not be the server's and are not used:"
        " TTFT is that of about {requested}",
        "measure the server behind it at its own address",
    )
    other_prefix = (
        "{evaluated} tokens were evaluated, {expected} expected: a prefix was reused or added",
        "turn off prefix caching and added BOS tokens in the stack",
    )
    other_kernel = "kernel {requested} was requested but {ran} ran", OPTIONS
    other_option = "{name} {requested} was requested but {ran} ran", OPTIONS
    not_quantized = "{layers} not quantized as requested: {names}", OPTIONS
    offloaded = "offloaded, not all on the requested device ({parts})", DEVICE
    misplaced = "{tensors} not where requested: {where}", "correct the patterns of the placement"
    operations_on_cpu = (
        "some operations ran on the CPU: llama.cpp's graph has {splits} splits, and {all_on_gpu} if all is on"
        " the GPU",
        "choose a type of weights and cache for which the GPU has kernels",
    )
    short_cache = (
        "its cache holds {holds} tokens of {needed}: past them it discards tokens, so latency stops growing",
        "raise n_ctx above the length of the run",
    )
    other_weights = "{name} is {loaded} in the stack but {stored} in the file's header", WEIGHTS
    other_model = (
        "the server serves {served}, but the config names {named}: {differences}",
        "load the named model in the server, or name the served one in the config (or weights: served)",
    )
    model_unchecked = _note(
        "the server serves {served} and tells nothing that could be compared with {named} of the config",
        "see that they are the same model and type",
    )
    other_type = "weights of type {requested} were requested but {found} were loaded", WEIGHTS
    weights_disagree = "{difference}: it is not the same model", WEIGHTS
    logits_not_finite = "NaN or infinite logits at {where}", "compute in another type (bf16 or f32)"
    cache_not_written = (
        "a pass of {tokens} at depth {depth} did not write its keys and values: the next logits are"
        " {distance:.0%} from the right ones, without the pass {control:.0%}",
        CACHE,
    )
    turn_not_evaluated = "turn {turn}: {what} ({evaluated} tokens evaluated, {given} given)", CACHE
    turn_prefix_reused = "turn {turn}: a prefix was reused ({less}, the first turn took {first})", CACHE
    turn_prefix_lost = (
        "turn {turn}: its prefix was not reused ({ms:.1f} ms, {without:.1f} without a prefix)",
        CACHE,
    )
    not_streamed = (
        "the server sent all {tokens} tokens at once: it does not stream",
        "turn on streaming, also in proxies before it",
    )
    speculated = (
        "the server guessed {drafted} tokens ahead ({accepted} were right), which was not requested",
        "turn speculation off in the server, or set speculation: true",
    )
    guessed_at_depth = (
        "{drafted} tokens were guessed ahead, so steps at a depth are none of single tokens",
        "measure depth without guesses",
    )
    other_prompt = (
        "the server counts {counted} tokens of prompt, {requested} were sent{why}",
        "read TTFT as that of the longer prompt",
        "first token",
    )
    prompt_not_counted = _note(
        "the server does not count the tokens of a prompt, so TTFT is that of about {requested}",
        "compare TTFT with that of an API that counts them, such as llama-server's",
    )
    tokens_at_once = (
        "{tokens} tokens{by} came in {pieces}{most}: it is not known when each was made",
        "measure more tokens, of which one piece is a smaller share, or let the server send each (vLLM:"
        " --stream-interval, by default 1)",
    )
    tokens_in_pieces = _note(
        "{tokens} tokens{by} came in {pieces}{most}: only averages are known, no B and W{accuracy}",
        "read tok/s; B and W need a piece for each token",
    )
    guessed_ahead = _note(
        "{how}: tokens come together, so only averages are known, no B and W",
        "read tok/s against the same cell without guesses",
    )
    synthetic_acceptance = _note(
        "synthetic acceptance of {length:g} tokens a pass: the text is not the model's, and the speed is that"
        " of guesses which are right so often",
        "measure real acceptance with accept: 0",
    )
    ids_compared = _note("{how}", "expect differences by rounding; others are errors of the stack")
    client_too_slow = (
        "the client was at work for {share:.0%} of the time, {delay:.3f} ms a token, and did not wait for the"
        " server",
        "close other programs, or measure on a faster machine",
    )
    prompts_reused = "{cached} of the users' prompts were not evaluated: a prefix was reused", CACHE
    users_faster_than_limit = (
        "{users} at once: {rate:,.0f} tok/s, but reading weights and cache allows {most:,.0f}",
        SYNCHRONISE,
    )
    compiled = "{compilations} while timing", "lengthen the warm-up (protocol.warmup)"

    # How it was timed.
    prefill_faster_than_limit = (
        "faster than its limit: a pass of {passes}: the clock was read before the device was done",
        SYNCHRONISE,
    )
    memory_faster_than_limit = (
        "faster than memory allows: past the CPU's cache it reads {share:.0%} of {measured}",
        "measure the bandwidth again on an idle machine (harness doctor --measure)",
    )
    clocks_differ = "two clocks differ: {clocks}", CLOCKS
    device_clock_incomplete = "the device's clock timed {timed} tokens, but {tokens} were generated", CLOCKS
    device_clock_missing = "its times by the device's clock are missing or damaged", "measure it again"
    device_clocks_differ = "two clocks differ on {differences}", CLOCKS
    clock_too_early = (
        "two clocks differ on {differences}; their totals agree: ours was read before the device was done",
        SYNCHRONISE,
    )
    rows_missing = "its {what} is missing or damaged", "measure it again"
    series_unusable = "its series is unusable: {why}", "measure it again"

    # Disturbances by the machine. A repeat that has no other fault is measured again.
    suspended = _disturbed("suspend", "the machine was suspended for {seconds:.1f} s")
    warmup_unsettled = _disturbed(
        "warmup", "warm-up never settled: the speed still changed between windows of it"
    )
    quota_throttled = _disturbed("quota", "the CPU quota{of} throttled it {throttled}")
    page_faults = _disturbed("memory", "{faults} while timing")
    memory_pressure = _disturbed("memory", "its own cgroup, while timing: {pressure}")
    weights_paged_in = _disturbed("memory", "{megabytes:.0f} MB of its weights were paged in while timing")
    waited_for_cpu = _disturbed(
        "cpu", "its threads waited for a CPU {share:.0%} of the time: other processes were running"
    )
    other_work = _disturbed("cpu", _OTHER_WORK)
    stolen = _disturbed("steal", "the hypervisor withheld {share:.0%} of the CPU time that was asked for")
    too_many_threads = (
        "its threads waited for a CPU {share:.0%} of the time: {threads} of them share {cpus}",
        "lower `threads` to the number of CPUs",
    )
    paused_between_clocks = _disturbed("cpu", "two clocks differ: {clocks}; a pause of a CPU explains it")
    other_requests = _disturbed("server", "the server generated {others} tokens for others meanwhile")
    read_late = _disturbed(
        "cpu",
        "{late} of {pieces} events of the server had arrived before they were read: the client was late, or"
        " something before it collects them",
    )
    first_read_late = _disturbed(
        "cpu", "two clocks differ: {clocks}: the client was late to read the first tokens"
    )
    host_busy = _disturbed(
        "cpu",
        "two clocks differ on {differences}; their totals agree: the device was done before ours was read, on"
        " a busy host",
    )
    gpu_shared = _disturbed("gpu", "other processes used {share:.0%} of the GPU while timing")
    throttled = _disturbed("heat", "throttled while timing: {what}")
    gpu_shared_little = _note(
        "other processes used {share:.0%} of the GPU while timing: alone it may be faster by as much",
        "close them (nvidia-smi lists them), or choose another GPU",
    )
    gpu_memory_of_others = _note(
        "other processes held {megabytes:.0f} MB of the GPU's memory when the worker started; whether they"
        " computed while timing is not known ({why})",
        "close them (nvidia-smi lists them), or choose another GPU",
    )
    machine_under_pressure = _note(
        "the whole machine, while timing: {pressure}", "close programs that use memory or CPUs"
    )
    little_other_work = _note(_OTHER_WORK, "close other programs")
    power_cap = _note(
        "a condition of the device: {what}", "raise the power limit, or compare under the same one"
    )
    thermal_events = _note(
        "{what}: {events} events, {span}, {lasted}", "let it cool (protocol.cool_down) if it comes again"
    )
    emulated = (
        "the machine is emulated ({machine}): its speeds mean nothing",
        "measure on the hardware",
        "speed",
    )

    # Notes on a repeat or a search whose figures hold.
    beyond_trained_context = _note(
        "{reaches} {length} tokens, but the model was trained on at most {trained}",
        "expect nonsense past that length, or shorten the run",
    )
    not_pinned = _note(
        "an adopted interpreter, not pinned: {packages}",
        "install these versions, or build the stack's own environment",
    )
    stack_warning = _note("{message}", "see the stack's documentation")
    two_memories = _note(
        "a step reads from main memory too ({where}): no MBU, which is a share of one memory's bandwidth",
        "read tok/s; harness theory --n-cpu-moe has the limit of both",
    )
    allocator_retries = _note(
        "{times} the allocator had to free memory and try again, at n = {places}",
        "leave more memory free: retries make spikes",
    )
    served_by = _note(
        "{server}: {here:.3f} ms/token as its client saw it{own}; the client itself took {client:.3f}{place}",
        "run the same file with `llamacpp` to see what serving adds",
    )
    model_loaded = (
        "the server loaded the model for {load:,.0f} ms before the first token, by its own clock: TTFT is"
        " left out",
        "keep the model loaded (OLLAMA_KEEP_ALIVE), and other models off the server",
        "first token",
    )
    model_loaded_meanwhile = (
        "the server loaded the model for up to {load:,.0f} ms before a first token, by its own clock",
        "keep the model loaded (OLLAMA_KEEP_ALIVE), and other models off the server",
    )
    on_cpu = _note(
        "the server holds {on_cpu:.0%} of the model on the CPU and {on_gpu:.0%} on GPUs{context}",
        "free GPU memory, or take fewer bits or a shorter context, so that the server places all on the GPU",
    )
    other_form = _note(
        "the server refused a field of the request, which was sent with {forms}",
        "compare it with servers that were sent the same",
    )
    turns_reused = _note(
        "by its own count the server reused {reused:,} of the {held:,} tokens before its later turns",
        "TTFT of later turns is that of this share; another server or cache may keep more",
    )
    reuse_unknown = _note(
        "the server does not say what it reused of a conversation",
        "compare TTFT of later turns with and without the prefix; vLLM says it with"
        " --enable-prompt-tokens-details",
    )
    users_queued = _note(
        "of {users} at once some waited until others had finished, so no tok/s of all at once, and TTFT"
        " contains the wait{slots}",
        "give the server as many slots as users (llama-server --parallel), or fewer users",
    )
    ids_differ = _note(
        "with {users} at once, {alike} greedy ids are those of one user alone, then they differ",
        "sums of a batch are rounded otherwise; another stack or type of the cache shows whether it is more",
    )
    yarn_rounded = _note(
        "llama.cpp rounds YaRN's range, which the model's config.json rules out (truncate: false): rotary"
        " frequencies are up to {off:.0%} off, so it computes another model than transformers, at the same"
        " speed",
        "do not compare its quality with other stacks'",
    )
    synthetic_routing = _note(
        "random routers chose a layer's busiest expert {busiest:.1f} times as often as its mean; trained ones"
        " are less even on real text, which matters where experts are cached or offloaded{fed}",
        "measure trained weights where experts are cached or offloaded",
    )
    pinned_experts = _note(
        "{steps} decode steps were fed {different} different tokens, and used {used:.0f} of {experts} experts"
        " in a layer; an even choice uses {expected:.0f}: repeated tokens keep to the same experts, which may"
        " stay in a CPU's cache",
        "expect a lower speed on text that does not repeat itself",
    )

    def __init__(
        self,
        cause: str,
        next_step: str,
        invalidates: str | None = ALL,
        disturbance: Disturbance | None = None,
    ) -> None:
        self.cause, self.next_step = cause, next_step
        self.invalidates, self.disturbance = invalidates, disturbance

    @property
    def effect(self) -> str:
        """What it does to the figures of a repeat, in a word or two."""
        return "measured again" if self.disturbance else _EFFECTS[self.invalidates]

    @property
    def sentence(self) -> str:
        """The cause, with the names of its numbers in braces."""
        return re.sub(r"{(\w+)[^}]*}", r"{\1}", self.cause)

    def flag(self, **numbers: object) -> Flag:
        """The warning with its numbers."""
        return Flag(self, self.cause.format(**numbers), self.disturbance)


@dataclass(frozen=True)
class Flag:
    """A warning that was raised. `disturbance`: of its repeat; None: the stack or the config caused it."""

    warning: Warnings
    detail: str
    disturbance: Disturbance | None = None

    @property
    def code(self) -> str:
        return self.warning.name

    @property
    def invalidates(self) -> str | None:
        return self.warning.invalidates

    def row(self) -> FlagRow:
        return {"code": self.code, "detail": self.detail}
