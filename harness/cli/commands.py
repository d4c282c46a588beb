"""What each command takes: its arguments and options.

A command is the function with its name. Nothing here imports what a command does, so that help, mistakes and
completion are fast.
"""

from __future__ import annotations

import math
import platform

from harness.base import bounds, data
from harness.cli import values
from harness.cli.argument_parser import (
    Command,
    Option,
    argument,
    flag,
    gone,
    one_of,
    option,
    rare,
    repeatable,
    several,
)
from harness.cli.shared_options import (
    BUSY,
    CHANNELS,
    MODELS,
    ONE_MODEL,
    ONLY,
    OUT,
    RESERVE,
    RESULTS,
    ROUNDS,
    SET,
    TRUST,
    VARIANTS,
    WAIT,
    WIDE,
    as_json,
    results,
    threshold,
    verdict,
)

SHELLS = ("bash", "zsh", "fish")
GOALS = ("balance", "speed", "quality", "context")  # as in harness/recommend/answer.py
STUDY_TOKENS = 9975  # of the published study
PORT = 8000  # of `report --serve`
PNG = "no longer drawn: each figure of the page has the button `save as PNG`"


def run() -> Command:
    return Command(
        argument("models", "MODEL|CONFIG", MODELS, nargs="*"),
        *VARIANTS,
        one_of(
            option("--tokens N", "tokens to decode (default: 128)"),
            flag(
                "--full",
                f"decode {STUDY_TOKENS:,} tokens, as the published study does",
                action="store_const",
                dest="tokens",
                const=str(STUDY_TOKENS),
            ),
        ),
        option("--users N,...", "also measure several users at once, 1,4,8"),
        option("--depth N,...", "also measure behind so many tokens of context, 0,4k"),
        SET,
        OUT,
        ONLY,
        flag("--fresh", "measure every cell again, also those already measured"),
        flag("--retry-failed", "measure again the cells that are not ok"),
        WAIT,
        flag("--busy", "accept disturbed repeats, on a machine that is never quiet, as provisional"),
        flag("--dry-run", "print a forecast per cell (weights, disk, memory, time), and measure nothing"),
        as_json("of records, instead of the table"),
        one_of(
            flag("--max-ctx", "find the longest context that fits: predict, then verify"),
            flag("--quality", "score a text: perplexity, and the divergence from the 16-bit weights"),
            flag("--check-weights", "compare the logits with the 16-bit reference"),
            title="instead of the latency of each token",
        ),
        rare(
            TRUST,
            flag("--skip-known-failures", "skip and list cells known to fail on this machine"),
            RESERVE,
            option(
                "--model NAME_OR_FILE",
                "which model a server has, where it does not report it: a known name, qwen3-8b:q4_k_m, or a "
                "file or folder here",
                dest="served_model",
            ),
            WIDE,
        ),
        rare(
            option(
                "--on FLEET",
                "a file such as fleet.yaml, a Ray address (ray://HOST:10001, HOST:6379, auto), or "
                "local-cluster:N; --json then prints one event per line",
            ),
            flag(
                "--allow-unauthenticated",
                "use a Ray cluster that asks for no token, though others may reach it",
            ),
            title="on a fleet of machines (docs/guide/fleet.md)",
        ),
        rare(
            flag("--no-fill", "only allocate the context; filling it to verify takes time"),
            flag("--past-trained", "search past the context that the model was trained on"),
            title="with --max-ctx",
        ),
        rare(
            one_of(
                option("--export-reference FILE", "write the reference to a file, and score nothing"),
                option("--reference FILE", "compare with an exported reference; none is computed"),
            ),
            title="with --quality",
        ),
        rare(
            option(
                "--seconds S", "time limit per variant; skips depths that would take longer (default: 60)"
            ),
            title="with --check-weights",
        ),
    )


def ab() -> Command:
    def set_of(side: str) -> Option:
        return repeatable(f"--set-{side} KEY=VALUE", f"override a key of the config of side {side.upper()}")

    def package(side: str) -> Option:
        what = f"use this version of a stack's package on side {side.upper()}, in an environment of its own"
        return repeatable(f"--package-{side} NAME==VERSION", what)

    return Command(
        argument("a", "A", f"side A: {ONE_MODEL}"),
        argument("b", "B", "side B (default: A with --set-b or --package-b)", nargs="?"),
        set_of("b"),
        package("b"),
        *VARIANTS,
        *ROUNDS,
        option(
            "--max-minutes M",
            "begin no round after M minutes",
            type=values.number("a number of minutes above 0", values.TINY, 1e5),
            default=math.inf,
        ),
        OUT,
        ONLY,
        flag("--dry-run", "print the pairs and a forecast of each cell, and measure nothing"),
        *verdict("if B is SLOWER (LARGER) and the whole interval is beyond that", "--output"),
        rare(SET, set_of("a"), package("a"), BUSY, WAIT, TRUST),
        examples="""\
  harness ab before.yaml after.yaml
  harness ab model.gguf --set-b flash_attn=true
  harness ab quickstart --package-b llama-cpp-python==0.3.35""",
        about="""\
The day of the machine, and all that drifts slowly, is in both sides and cancels. So this finds a
change of 1%, which no comparison of two campaigns can show. Each round measures every pair of cells
once on each side, one next to the other, in random order. Rounds are added until the 90% interval of
tok/s of every pair is narrower than half of the threshold, or a limit is met. Every repeat is a
record of the results folder, as with `harness run`.""",
    )


def bisect() -> Command:
    return Command(
        argument("good", "GOOD", "a version of a stack's package, NAME==VERSION; or options"),
        argument("bad", "BAD", "another version of it, older or newer; or options, KEY=VALUE,..."),
        argument("of", "MODEL|CONFIG", "what is measured, one cell: as in `harness ab`"),
        option(
            "--versions VERSION,...",
            "the versions between GOOD and BAD (default: those of the package index)",
        ),
        *VARIANTS,
        SET,
        OUT,
        ONLY,
        *ROUNDS,
        flag("--dry-run", "print what lies between, and measure nothing"),
        as_json("one object per measured pair"),
        rare(BUSY, WAIT, TRUST),
        examples="""\
  harness bisect llama-cpp-python==0.3.33 llama-cpp-python==0.3.36 model.gguf
  harness bisect transformers==5.0.0 transformers==5.3.0 mine.yaml --only '*hf*bf16*'
  harness bisect threads=4,flash_attn=false threads=8,flash_attn=true model.gguf""",
        about="""\
GOOD and BAD are measured against each other first: without a difference there is nothing to find.
Then the version in the middle of those that are left is measured in turns with GOOD, as `harness ab`
does, until a 99% interval decides on which side of half of the difference it lies. A version that
cannot be built, that fails or that stays unclear is skipped, and the answer may be a range.
Environments are built as needed, and kept. Re-run the same command to resume: rounds of the results
folder are used again. Of two sets of options, those that differ are changed one after the other, in
the order of BAD.""",
    )


def tune() -> Command:
    return Command(
        argument("models", "MODEL|CONFIG", MODELS, nargs="+"),
        *VARIANTS,
        repeatable(
            "--option NAME=VALUE,...",
            "try these values of an option (default: threads and those of the stack)",
        ),
        option(
            "--for {decode,prefill}",
            "what is to be fast: decode (tok/s) or prefill (a pass of 512 tokens); default: decode",
            dest="purpose",
            default="decode",
        ),
        SET,
        OUT,
        ONLY,
        threshold("smallest gain that is looked for"),
        flag("--dry-run", "print what is tried, and measure nothing"),
        as_json("one object per setting"),
        rare(
            option(
                "--tokens N",
                "tokens to decode in a repeat (default: 64)",
                type=values.whole(2, 100_000),
                default=64,
            ),
            option(
                "--rounds N",
                "most rounds of an option; twice that to decide at the end (default: 16)",
                type=values.whole(4, 100_000),
                default=16,
            ),
            BUSY,
            WAIT,
            TRUST,
        ),
        examples="""\
  harness tune model.gguf
  harness tune quickstart --only '*q4_0.decode*'
  harness tune mine.yaml --option threads=4,6,8 --option flash_attn=false,true
  harness tune mine.yaml --for prefill""",
        about="""\
There is one model and one variant (or choose with --only): its options are the defaults. One option
at a time, every round measures each remaining value once, next to the defaults, in random order.
After 4, 8 and 16 rounds the worse half of them goes. The best setting is then measured against the
defaults in rounds of their own, which alone decide. A verdict takes minutes on a small model.""",
    )


def recommend() -> Command:
    return Command(
        argument(
            "model",
            "MODEL",
            "a name (harness theory --list-models), a hub repository, a .gguf, a folder, a config.json",
            nargs="?",
        ),
        option(
            "--context TOKENS",
            "tokens of context, e.g. 16k (default: 8k, or the trained context if that is less)",
        ),
        option(
            "--machine NAME",
            "a known one (harness theory --list-machines), this (default), or all that reach --tok-s",
            default="this",
        ),
        option(
            "--tok-s N",
            "tokens per second to reach at the context (without a model, or of all machines: 10)",
            type=values.number("a number of tokens per second above 0 and under 1e9", values.TINY, 1e9 - 1),
        ),
        several("--models GLOB", "without a model: only these, e.g. 'qwen3*'"),
        option(
            f"--for {{{','.join(GOALS)}}}",
            "what to rank by (default: balance)",
            dest="goal",
            default=GOALS[0],
        ),
        option(
            "--memory SIZE",
            "memory to use, as sold: 16GB is 16 times 2^30 bytes; of a named machine, its size",
        ),
        several("--stacks STACK", "only these stacks"),
        option(
            "--most N",
            "rows to print (default: 5; of all machines 15; without a model 1 a size)",
            type=values.one_or_more,
        ),
        flag("--all", "print every row, also variants that do not fit"),
        option("--prove N", "measure the first N on this machine, and rank again", type=values.one_or_more),
        option("--results DIR", "own records (default: results)", default=RESULTS),
        flag("--json", "print one JSON object: the ranking, and every prediction"),
        rare(
            option("--bandwidth GB/S", "its read bandwidth; needs --memory"),
            option(
                "--memory-speed KIND",
                "of a CPU, e.g. ddr5-5600: in place of --bandwidth, or of a known one's fastest",
            ),
            CHANNELS,
            option(
                "--kind {gpu,cpu,arm,risc-v,no-avx2}",
                "what it is: cpu is x86 with AVX2, no-avx2 an older one (default: a GPU from 150 GB/s on)",
            ),
            option(
                "--vendor {nvidia,amd,apple,intel}", "of its GPU (default: unknown, with wider intervals)"
            ),
            RESERVE,
            title="a machine that is not known",
        ),
        rare(
            option(
                "--host-memory SIZE",
                "main memory of the GPU's host, for layers or experts that do not fit the GPU",
            ),
            option("--host-bandwidth GB/S", "its read bandwidth (default: that of a usual one)"),
            WIDE,
        ),
    )


def theory() -> Command:
    from harness.theory.memory_choices import KV_TYPES, USUAL_KV

    return Command(
        argument(
            "models",
            "MODEL",
            "a name (--list-models, or of the hub or Ollama), a .gguf, a folder, or a config.json",
            nargs="*",
        ),
        option(
            "--machine NAME",
            "names (--list-machines), or `this`: the CPU here, with bandwidth and rate measured once",
            nargs="+",
            action="extend",
            default=[],
        ),
        option(
            "--memory SIZE",
            "memory of the machines, as sold: selects a variant, or sets another size; 16GB is 16 times "
            "2^30 bytes. Without a machine: which weights and KV types fit",
        ),
        several("--quant TYPE", "quantization types of llama.cpp, e.g. q4_k_m q8_0; or all"),
        several("--bpw BITS", "bits per weight, e.g. 4.85"),
        option(
            "--kv TYPE",
            f"type of the KV cache in llama.cpp: {', '.join(KV_TYPES)} (default: f16; with --memory and no "
            f"machine: {', '.join(USUAL_KV)})",
            type=str.lower,
            choices=KV_TYPES,
        ),
        option(
            "--context TOKENS", "also show decode at this position, e.g. 32k (default: 10000)", default=10_000
        ),
        option("--prompt TOKENS", "prompt tokens (default: 25)", default=25),
        one_of(
            flag("--list-models", "list the known models"),
            flag("--list-machines", "list the known machines, with the source of each figure"),
            option("--published TABLE", "recompute a table of the published study; or `all`"),
        ),
        WIDE,
        one_of(
            flag("--csv", "print the rows as CSV"), flag("--json", "print one JSON array, one object per row")
        ),
        rare(
            RESERVE,
            option(
                "--bandwidth GB/S",
                "with --memory and no machine: its read bandwidth, for the most tokens per second",
            ),
            option("--memory-speed KIND", "of a CPU, e.g. ddr5-5600: in place of a known one's fastest"),
            CHANNELS,
            option("--rate NAME", "compute rate of the machine to use, e.g. fp16-tensor"),
            option(
                "--units {si,published}",
                "published: binary units, as in the published RTX 4090 study (default: si)",
                default="si",
            ),
            option("--from FILE", "YAML file with your own shapes and machines", dest="own"),
            title="the machine",
        ),
        rare(
            flag("--tied", "the lm_head shares its weights with the input embedding"),
            flag("--tensors", "also list every tensor: type, bytes, bytes read per step"),
            title="the weights",
        ),
        rare(
            option(
                "--kv-read {grows,padded256,full,copied,window}",
                "what a decode step reads: grows, the tokens so far (default); padded256, up to a multiple of"
                " 256; full, all of a static cache; copied, the tokens twice, and a write; window, the last",
                default="grows",
            ),
            option("--length TOKENS", "tokens of a static cache (full) or of the window (window)"),
            several("--chunk TOKENS", "also show prefill in chunks of N tokens"),
            option(
                "--kv-block TOKENS",
                "prefill tokens that share one read of the KV cache (default: a chunk; 1: as in the published"
                " RTX 4090 study)",
            ),
            title="KV cache and prompt",
        ),
        rare(
            option(
                "--n-cpu-moe LAYERS",
                "the experts of the first N layers (of all, if there are fewer) are read by the CPU, all else"
                " by the machine's GPU",
            ),
            option(
                "--cpu-bandwidth GB/S",
                "what that CPU reads from its memory; without it only the memory is printed",
            ),
            option("--host-memory SIZE", "its main memory, in which they must fit"),
            title="experts on a GPU's host CPU, as in llama.cpp",
        ),
        rare(
            option("--acceptance P", "acceptance rate of a drafted token, 0 to 1", type=values.zero_to_one),
            option("--draft-length TOKENS", "drafted tokens per round (default: 4)"),
            option(
                "--draft-cost C",
                "time of a draft step over the time of a decode step (default: 0)",
                type=values.zero_to_one,
            ),
            title="speculative decoding",
        ),
    )


def report() -> Command:
    return Command(
        argument(
            "dir",
            "DIR",
            "results folders, bundles, published/NAME, or one log as of `harness fit` (default: results)",
            nargs="*",
            type=data.results,
        ),
        one_of(
            flag("--list", "print the table of cells instead of a page"),
            flag("--memory", "print the memory use of each cell, part by part"),
            flag("--history", "every cell over time, and step changes of its figures, as a page and a table"),
            option(
                "--export {csv,parquet}",
                "print the ok repeats for other tools (csv: a line per repeat; parquet: every token)",
                type=values.export_format,
            ),
            option(
                "--serve PORT",
                f"show the page to browsers of this machine, renewed as records come (port: {PORT})",
                nargs="?",
                const=PORT,
            ),
            option("--format {md,csv,json}", "print the tables of the page"),
        ),
        option(
            "-o --output FILE", "write the page, or what is printed, to FILE (default: a page in reports/)"
        ),
        option("--baseline DIR", "records or a bundle to compare with, cell by cell", type=data.results),
        option(
            "--campaign TIME",
            "of a page or --list, these campaigns alone: latest, or a time or day in UTC (2026-11-27T02:00)",
        ),
        option(
            "--price PER_KWH",
            "price of a kWh, 0.30, for that of the measured energy of a million tokens",
            type=values.number(
                "the price of a kWh, above 0 and below a million, as 0.30", values.TINY, 1e6 - 1
            ),
        ),
        option(
            "--power-log FILE",
            "energy by a wall meter: a CSV with time (2026-11-27T10:00:00+01:00, or Unix) and watts",
        ),
        gone("--png", PNG),
        flag("--open", "show the page in the browser (without DIR: the newest page)"),
        flag("--json", "of --list, --memory and --history: print one JSON array"),
        WIDE,
    )


def compare() -> Command:
    return Command(
        argument("of", "BASE NEW", "each a results folder, or a day (YYYY-MM-DD) of --results", nargs="*"),
        option(
            "--baseline last:N",
            "compare the latest campaign of one folder (default: --results) with N before it",
        ),
        option(
            "--campaign ID", "with --baseline or --ab: the campaign to judge, by its id (default: the latest)"
        ),
        flag("--ab", "judge again the latest campaign of `harness ab` in one folder (default: --results)"),
        threshold("with --ab: the smallest change to be found"),
        option(
            "--results DIR", "results folder in which days are looked up (default: results)", default=RESULTS
        ),
        *verdict("if a figure is SLOWER (LARGER, COSTLIER, SHORTER, WORSE) by more", "-o --output"),
    )


def sql() -> Command:
    return Command(
        argument(
            "query", "QUERY", "a SELECT from cells, repeats, nights, tokens, memory (docs/guide/sql.md)"
        ),
        results("a results folder"),
        one_of(
            as_json("an object for each row"),
            flag("--csv", "print CSV"),
            option("--parquet FILE", "write a Parquet file"),
        ),
        option(
            "--timeout S",
            f"end a query after so many seconds (default: {bounds.QUERY_S:.0f})",
            default=bounds.QUERY_S,
        ),
        WIDE,
    )


def fit() -> Command:
    return Command(
        argument(
            "log",
            "LOG",
            "CSV or JSON, one row per token, or a log of vLLM, SGLang, llama.cpp, Ollama or others (see "
            "docs/guide/fit.md); also gzipped",
        ),
        one_of(
            option("--latency-column NAME", "column with latencies (default: latency_ms)"),
            option("--time-column NAME", "column with timestamps; latencies are their differences"),
        ),
        option("--group-column NAME", "one series per value of this column (default: variant, if present)"),
        option(
            "--unit {s,ms,us,ns}", "unit of the latencies or times (default: at the end of the column's name)"
        ),
        option("-o --output FILE", "also write an HTML page"),
        gone("--png", PNG),
        option(
            "--model NAME", "known model or config.json; with --machine: compare with the hardware's limits"
        ),
        option("--machine NAME", "machine for --model"),
        several("--bpw VARIANT=X", "bits per weight, e.g. q4_0.gguf=4.62"),
        repeatable(
            "--fail-on FLAG", "exit with 3 if a series has this flag, e.g. drift (docs/reference/warnings.md)"
        ),
        as_json("one object per variant"),
        WIDE,
    )


def explain() -> Command:
    what = "as rows, pages and --fail-on have it: page_faults (default: all)"
    return Command(argument("code", "CODE", what, nargs="*"))


def share() -> Command:
    return Command(
        results(),
        one_of(
            option("--svg FILE", "write the card as a picture, instead of Markdown"),
            option("--bundle FILE", "put the results into a new file, named *.tar.zst"),
            option(
                "--verify BUNDLE", "check a bundle: recompute every figure, refuse what contradicts itself"
            ),
        ),
        repeatable(
            "--only GLOB",
            "of the card: only cells whose id, or machine/id, matches (default: the newest campaign's model)",
        ),
        repeatable(
            "--hide TEXT",
            "take TEXT out as well, such as another machine's name; this machine's and user's names, paths, "
            "addresses, serial numbers and UUIDs go without it",
        ),
        several("--beside BUNDLE", "other bundles, accepted before: a record that one of them has is a copy"),
        flag("--json", "of --verify: print one object: accepted, reasons, notes, records"),
    )


def doctor() -> Command:
    what = "check only the device of this config; exit with 2 if this machine lacks it"
    return Command(
        argument("config", "CONFIG", what, nargs="?", type=data.config),
        flag("--measure", "measure read bandwidth and matrix multiplication rate"),
        flag("--json", "print one object: devices and findings"),
    )


def env() -> Command:
    def built(devices: str) -> list[Option]:
        device = option("--device FAMILY", f"cpu, cuda, metal, vulkan or hip (default: {devices})")
        return [
            argument("stack", "STACK", "stacks (default: all)", nargs="*"),
            device,
            as_json("one object per environment"),
        ]

    stack = argument("stack", "STACK", "a stack")
    device = option("--device FAMILY", "cpu, cuda, metal, vulkan or hip (default: cpu)", default="cpu")
    here = ".".join(platform.python_version_tuple()[:2])
    packed = [
        argument("folder", "DIR", "a new folder, to copy to the machine"),
        argument("stack", "STACK", "stacks (default: all that can be packed)", nargs="*"),
        option("--python VERSION", "its Python (default: as here)", default=here),
        option(
            "--platform TAG",
            "its processor and glibc, or an older one (default: manylinux_2_28_x86_64, or what is here)",
            default=f"manylinux_2_28_{platform.machine()}",
        ),
        option("--device {cpu,cuda}", "what its stacks run on (default: cpu)", default="cpu"),
        option("--have FILE", "what its Python has, as `pip freeze` prints it: not packed"),
    ]
    synth = [
        argument("shape", "SHAPE", "name of a model, e.g. qwen1.5-0.5b, or a config.json"),
        option(
            "--format {gguf,hf,gptq,awq}",
            "hf: a checkpoint folder; gptq, awq: such a folder, rounded and packed (default: gguf)",
            default="gguf",
        ),
        option("--bits {4,8}", "bits of GPTQ weights (default: 4)", type=int, choices=[4, 8]),
        option("--quant TYPE", "GGUF types, e.g. q4_k_m (default: f16)", nargs="+"),
        option("--seed N", "random seed (default: 0)", type=values.whole(0, 2**63 - 1), default=0),
        as_json("one object per file"),
    ]
    interpreter = argument("python", "FILE", "the interpreter; nothing is installed into it")
    return Command(
        actions={
            "list": ("list the environments of the stacks, and where they are", built("all")),
            "create": ("build environments that are missing", built("cpu")),
            "check": ("start each environment that is there and probe it", built("all")),
            "use": (
                "run a stack in an interpreter that is there (conda, a container, a cluster's module)",
                [stack, interpreter, device],
            ),
            "forget": (
                "give up an adopted interpreter; the stack is built again when it is next needed",
                [stack, device],
            ),
            "pack": ("gather what a machine without a network needs in one folder", packed),
            "synth": ("make random weights with the exact shape of a model, and print their path", synth),
        }
    )


def init() -> Command:
    what = "the file to write (default: harness.yaml), or a GGUF or a server's address to write one for"
    return Command(argument("file", "FILE", what, nargs="?", default="harness.yaml", type=str))


def completion() -> Command:
    return Command(argument("shell", "SHELL", "the shell that reads the script", choices=SHELLS))
