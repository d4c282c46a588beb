"""What people type, and what is understood: models, machines, counts of tokens, sizes of memory."""

from __future__ import annotations

import pytest

from harness.config import load
from harness.theory import names
from harness.theory.hf_config import SHAPES
from harness.theory.machines import MACHINES
from harness.theory.names import NotUnderstood
from harness.theory.tensors import QUANTS

GIB = 2**30


# --- models


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("qwen2.5-7b", "qwen2.5-7b"),
        ("Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b-instruct"),
        ("Qwen/Qwen2.5-7B-Instruct-GGUF", "qwen2.5-7b-instruct"),
        ("qwen2.5:7b", "qwen2.5-7b-instruct"),
        ("qwen2.5-3b-instruct", "qwen2.5-3b"),
        ("Qwen1.5-7B-Chat", "qwen1.5-7b"),
        ("Qwen3-8B", "qwen3-8b"),
        ("Qwen3-8B-Base", "qwen3-8b-base"),
        ("llama3.1:8b", "llama-3.1-8b"),
        ("llama3.2:1b", "llama-3.2-1b"),
        ("Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("llama 3.1 8b", "llama-3.1-8b"),
        ("llama-2-7b-chat-hf", "llama-2-7b"),
        ("mistral-nemo", "mistral-nemo-12b"),
        ("Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"),
        ("Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("qwen 110b", "qwen1.5-110b"),
    ],
)
def test_a_model_is_understood_as_the_hub_and_ollama_write_it(typed, name):
    assert names.model(typed).name == name


@pytest.mark.parametrize("name", SHAPES)
def test_every_name_in_the_list_is_itself(name):
    assert names.model(name.upper()) == (name, SHAPES[name])


def test_a_tuned_model_has_the_context_of_its_own_config():
    tuned, base = names.model("qwen2.5:7b").shape, SHAPES["qwen2.5-7b"]
    assert (tuned.context, base.context) == (32_768, 131_072)
    assert names.model("Qwen2.5-7B").shape == base
    assert names.model("Qwen3-8B-Base").shape.context == 32_768
    assert names.model(names.model("qwen2.5:7b").name).shape == tuned


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (
            "mistral-7b",
            "ambiguous model mistral-7b; did you mean mistral-7b-v0.1, mistral-7b-v0.2 or mistral-7",
        ),
        ("llama-3", "ambiguous model llama-3; did you mean llama-3-8b or llama-3-70b?"),
        ("qwen 7b", "ambiguous model qwen 7b; did you mean qwen1.5-7b, qwen2-7b or qwen2.5-7b?"),
        ("qwen", "ambiguous model qwen; 25 are known: see harness theory --list-models"),
        (
            "gemma-3-12b",
            "no Gemma is among the dense models",
        ),
        (
            "gemma3:12b",
            "no Gemma is among the dense models",
        ),
        (
            "phi4",
            "no Phi is among the dense models",
        ),
        (
            "DeepSeek-R1-Distill-Qwen-7B",
            "no DeepSeek is among the dense models",
        ),
        (
            "CodeLlama-7b",
            "no CodeLlama is among the dense models",
        ),
        (
            "tinyllama:1.1b",
            "no TinyLlama is among the dense models",
        ),
        ("Qwen2.5-Coder-7B", 'qwen2.5-7b is known, "coder" is not; give its config.json'),
        ("Qwen2.5-7B-Instruct-1M", 'qwen2.5-7b is known, "1m" is not'),
        ("Qwen2-VL-7B-Instruct", 'qwen2-7b is known, "vl" is not'),
        ("Qwen2.5-7B-Instruct-AWQ", 'qwen2.5-7b is known, "awq" is not'),
        ("Mistral-Small-Instruct-2409", "did you mean mistral-small-24b?"),
        ("qwen3:30b-a3b", "did you mean qwen3-32b?"),
        ("qwen1.5-7", "did you mean qwen1.5-7b?"),
        ("lama-3-8b", "did you mean llama-3-8b?"),
        ("llama3.1:8b-instruct-q4_K_M", "the shape is llama-3.1-8b; q4_k_m is a quantization"),
        ("folder/qwen2.5-7b", "unknown model folder/qwen2.5-7b; see harness theory --list-models"),
        ("7b", "unknown model 7b; see harness theory --list-models"),
        ("nemo", "unknown model nemo; see"),
        ("", "see harness theory --list-models"),
        ("q4_0", "see harness theory --list-models"),
        ("x" * 10_000, "see harness theory --list-models"),
    ],
)
def test_another_model_is_never_taken_for_one_that_is_known(typed, sentence):
    with pytest.raises(NotUnderstood) as refused:
        names.model(typed, otherwise="give its config.json")
    assert sentence in refused.value.sentence("model", typed)


# --- machines


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("4090", ["rtx-4090"]),
        ("rtx4090", ["rtx-4090"]),
        ("NVIDIA GeForce RTX 4090", ["rtx-4090"]),
        ("RTX 4090 24GB", ["rtx-4090"]),
        ("RTX 4060 Ti 16GB", ["rtx-4060-ti-16gb"]),
        ("4060ti 8g", ["rtx-4060-ti-8gb"]),
        ("rtx-4060-ti", ["rtx-4060-ti-8gb", "rtx-4060-ti-16gb"]),
        ("NVIDIA GeForce RTX 4060 Ti", ["rtx-4060-ti-8gb", "rtx-4060-ti-16gb"]),
        ("a100", ["a100-40gb", "a100-80gb-pcie", "a100-80gb-sxm"]),
        ("A100 80GB", ["a100-80gb-pcie", "a100-80gb-sxm"]),
        ("NVIDIA A100-SXM4-80GB", ["a100-80gb-sxm"]),
        ("NVIDIA A100 80GB PCIe", ["a100-80gb-pcie"]),
        ("NVIDIA A100-SXM4-40GB", ["a100-40gb"]),
        ("NVIDIA H100 80GB HBM3", ["h100-sxm"]),
        ("h100", ["h100-pcie", "h100-sxm"]),
        ("Tesla T4", ["t4"]),
        ("m2", ["apple-m2-8gb", "apple-m2-16gb", "apple-m2-24gb"]),
        ("m2 16gb", ["apple-m2-16gb"]),
        ("m2 pro", ["apple-m2-pro-16gb", "apple-m2-pro-32gb"]),
        ("Apple M2 Pro 32 GB", ["apple-m2-pro-32gb"]),
        ("MacBook Pro M2 8GB", ["apple-m2-8gb"]),
        ("RTX 4090 Laptop GPU", ["rtx-4090-laptop"]),
        ("3070 laptop", ["rtx-3070-laptop"]),
        ("AD103M / GN21-X11 [GeForce RTX 4090 Laptop GPU] (rev a1)", ["rtx-4090-laptop"]),
        ("NVIDIA Corporation AD107M [GeForce RTX 4060 Mobile] (rev a1)", ["rtx-4060-laptop"]),
        ("rtx 3060 ti", ["rtx-3060-ti-gddr6", "rtx-3060-ti-gddr6x"]),
        ("RTX 6000 Ada", ["rtx-6000-ada"]),
        ("rtx pro 6000", ["rtx-pro-6000"]),
        ("AMD Instinct MI300X", ["mi300x"]),
        ("AMD Radeon RX 7900 XTX", ["rx-7900-xtx"]),
        ("7900xtx", ["rx-7900-xtx"]),
        ("Radeon RX 9070 XT", ["rx-9070-xt"]),
        ("Navi 32 [Radeon RX 7800 XT] (rev c8)", ["rx-7800-xt"]),
        ("Intel(R) Arc(TM) A770 Graphics", ["arc-a770-8gb", "arc-a770-16gb"]),
        ("Battlemage G21 [Arc B580]", ["arc-b580"]),
        ("Intel(R) Core(TM) Ultra 9 285K", ["core-ultra-9-285k"]),
        ("Intel(R) Core(TM) Ultra 7 258V", ["core-ultra-7-258v-16gb", "core-ultra-7-258v-32gb"]),
        ("Intel(R) Core(TM) i9-14900K", ["core-i9-14900k"]),
        ("INTEL(R) XEON(R) 6980P", ["xeon-6980p"]),
        ("AMD EPYC 9654 96-Core Processor", ["epyc-9654"]),
        ("AMD EPYC 9654P 96-Core Processor", ["epyc-9654"]),
        ("AMD RYZEN AI MAX+ 395 w/ Radeon 8060S 128GB", ["ryzen-ai-max-395-128gb"]),
        ("Strix Halo 64GB", ["ryzen-ai-max-395-64gb"]),
        (
            "Snapdragon(R) X Elite - X1E80100 - Qualcomm(R) Oryon(TM) CPU",
            [f"snapdragon-x-elite-{n}gb" for n in (16, 32, 64)],
        ),
        ("DGX Spark", ["dgx-spark"]),
        ("NVIDIA GB10", ["dgx-spark"]),
        ("NVIDIA DGX Spark (GB10)", ["dgx-spark"]),
        ("Orin Nano", ["jetson-orin-nano-4gb", "jetson-orin-nano-8gb"]),
        ("NVIDIA Jetson AGX Orin Developer Kit 64GB", ["jetson-agx-orin-64gb"]),
        ("Apple M4 Max 36GB", ["apple-m4-max-32core"]),
        ("M4 Max 128GB", ["apple-m4-max-40core-128gb"]),
        ("Apple M3 Max 40-core 64GB", ["apple-m3-max-40core-64gb"]),
        ("m3", ["apple-m3-8gb", "apple-m3-16gb", "apple-m3-24gb"]),
        ("Raspberry Pi 3 Model B Plus Rev 1.3", ["rpi-3"]),
        ("pi 5", ["rpi-5-2gb", "rpi-5-4gb", "rpi-5-8gb", "rpi-5-16gb"]),
        ("pi5 8gb", ["rpi-5-8gb"]),
        ("Raspberry Pi 5 Model B Rev 1.0 8GB", ["rpi-5-8gb"]),
        ("AMD Ryzen 9 7950X 16-Core Processor", ["ryzen-7950x"]),
    ],
)
def test_a_machine_is_understood_as_people_and_nvml_write_it(typed, found):
    assert [*names.machines(typed)] == found


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_and_each_of_its_sizes_are_named_by_what_they_print(name):
    for given, machine in names.machines(name).items():
        assert names.machines(given) == {given: machine}
        assert machine.bandwidth == MACHINES[name].bandwidth
        assert (
            machine.memory_bytes == MACHINES[name].memory_bytes
            or f"{machine.memory_bytes / GIB:g}gb" in given
        )


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("rtx 3090 laptop gpu", 'rtx-3090 is known, "laptop" is not'),
        ("4090 D", 'rtx-4090 is known, "d" is not'),
        ("rtx 6000", "did you mean quadro-rtx-6000, rtx-6000-ada"),
        ("rtx-4091", "did you mean rtx-4090?"),
        ("rtx 4090 16gb", "it is sold with 24 GB"),
        ("m2 12gb", "it is sold with 8, 16 and 24 GB"),
        ("m6", "unknown machine m6; see harness theory --list-machines"),
        ("l30s", "see harness theory --list-machines"),
        ("pi", "did you mean rpi-3, rpi-4 or rpi-5?"),
        ("Navi 31 [Radeon RX 7900 XT/7900 XTX]", "see harness theory --list-machines"),
        ("rtx", "see harness theory --list-machines"),
        ("m2 m2", "see harness theory --list-machines"),
        ("16gb", "see harness theory --list-machines"),
        ("", "see harness theory --list-machines"),
        ("1" * 10_000, "see harness theory --list-machines"),
    ],
)
def test_another_machine_is_never_taken_for_one_that_is_known(typed, sentence):
    with pytest.raises(NotUnderstood) as refused:
        names.machines(typed)
    assert sentence in refused.value.sentence("machine", typed)


@pytest.mark.parametrize(
    ("typed", "gib", "found"),
    [
        ("m2", 8, {"apple-m2-8gb": 8}),
        ("m2 24gb", 8, {"apple-m2-8gb": 8}),
        ("rpi-5", 16, {"rpi-5-16gb": 16}),
        ("rtx-4060-ti", 16, {"rtx-4060-ti-16gb": 16}),
        ("rtx-4060-ti", 12, {"rtx-4060-ti-12gb": 12}),
        ("rtx-4060-ti-8gb", 16, {"rtx-4060-ti-16gb": 16}),
        ("a100", 80, {"a100-80gb-pcie": 80, "a100-80gb-sxm": 80}),
        ("a100-80gb-sxm", 96, {"a100-sxm-96gb": 96}),
        ("rtx-4090", 24, {"rtx-4090": 24}),
        ("rtx-4090", 48, {"rtx-4090-48gb": 48}),
    ],
)
def test_memory_chooses_a_size_or_sets_another(typed, gib, found):
    sized = names.machines(typed, memory=gib)
    assert {name: machine.memory_bytes / GIB for name, machine in sized.items()} == found


def test_a_memory_that_no_size_has_needs_one_machine():
    with pytest.raises(NotUnderstood, match="name one of a100-40gb, a100-80gb-pcie and a100-80gb-sxm"):
        names.machines("a100", memory=60)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["RTX", "4060", "Ti", "16GB", "a100"], ["RTX 4060 Ti 16GB", "a100"]),
        (["m2", "pro", "m2"], ["m2 pro", "m2"]),
        (["m2 pro", "16gb", "4090"], ["m2 pro 16gb", "4090"]),
        (["rtx-4090", "llama-7b", "pi", "5"], ["rtx-4090", "llama-7b", "pi 5"]),
        ([*MACHINES], [*MACHINES]),
    ],
)
def test_words_that_the_shell_has_split_are_joined_and_names_are_not(words, found):
    def is_machine(name: str) -> bool:
        try:
            return bool(names.machines(name))
        except NotUnderstood:
            return False

    assert names.joined(words, is_machine) == found


# --- numbers


@pytest.mark.parametrize(
    ("typed", "count"),
    [("32k", 32_768), ("128K", 131_072), ("1.5k", 1536), ("1M", 1_048_576), ("8 k", 8192)],
)
def test_k_is_1024_tokens(typed, count):
    assert names.token_count(typed) == count


@pytest.mark.parametrize("typed", ["32", "k", "1.3k", "-1k", "32kb", "1e3k", "", "٣k", "0k"])
def test_what_is_no_count_with_a_k_is_none(typed):
    assert not names.token_count(typed)


@pytest.mark.parametrize(
    ("typed", "gib"), [("16GB", 16), ("16 GiB", 16), ("16g", 16), ("7.5GB", 7.5), ("1TB", 1024)]
)
def test_memory_is_binary_as_sold(typed, gib):
    assert names.memory_gib(typed) == gib


@pytest.mark.parametrize("typed", ["16", "16MB", "-1GB", "GB", "0GB", "", "16 gigs"])
def test_what_is_no_memory_is_none(typed):
    assert not names.memory_gib(typed)


# --- everywhere a name or a count is given


def test_theory_takes_what_people_type_and_the_shell_has_split(harness):
    machines = ["RTX", "4060", "Ti", "m2", "pro"]
    asked = ("--machine", *machines, "--memory", "16GB", "--context", "8k", "--json")
    ran = harness("theory", "llama3.1:8b", *asked)
    assert {(row["model"], row["machine"], row["context"]) for row in ran.json} == {
        ("llama-3.1-8b", "rtx-4060-ti-16gb", 8192),
        ("llama-3.1-8b", "apple-m2-pro-16gb", 8192),
    }
    assert ran.err == ""
    ran = harness("theory", "--machine", "4090", "meta-llama/Llama-3.1-8B", "--prompt", "2k", "--json")
    assert {(row["model"], row["prompt_tokens"]) for row in ran.json} == {("llama-3.1-8b", 2048)}


def test_theory_has_a_row_for_each_size_and_says_so_once(harness):
    ran = harness("theory", "qwen3-8b", "--machine", "m2", "--bpw", "4", "--json")
    assert [row["memory_bytes"] / GIB for row in ran.json] == [8, 16, 24]
    assert ran.err == (
        "harness: m2 is sold as apple-m2-8gb, apple-m2-16gb and apple-m2-24gb: a row for each; "
        "--memory chooses a size\n"
    )


def test_all_is_every_type_of_llama_cpp(harness):
    rows = harness("theory", "qwen1.5-0.5b", "--quant", "all", "--json").json
    assert [row["weights"] for row in rows] == list(QUANTS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pythia-12b"], "Pythia is not known yet; give its config.json or --from\n"),
        (["no/qwen2.5-7b"], "no/qwen2.5-7b: no such file"),
        (["qwen2.5"], "ambiguous model (and no file) qwen2.5; did you mean qwen2.5-0.5b, "),
        (["qwen3-8b", "--machine", "m6"], "unknown machine m6; see harness theory --list-machines"),
        (["qwen3-8b", "--memory", "8GB", "--bpw", "4"], "--bpw needs a --machine, also with --memory"),
        (["qwen3-8b", "--bandwidth", "8"], "--bandwidth goes with --memory, and without a machine"),
        (["--memory", "8GB"], "name a model: harness theory qwen3-30b-a3b --memory 16GB --context 32k"),
        (["qwen3-8b", "--machine", "m2", "--memory", "8"], "8 is not a size of memory such as 16GB"),
        (["qwen3-8b", "--context", "2M"], "2M is not a whole number between 1 and 1,048,576"),
        (["qwen3-8b", "--context", "1.3k"], "1.3k is not a number"),
    ],
)
def test_theory_says_what_it_does_not_understand(harness, arguments, sentence):
    ran = harness("theory", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in ran.err


def test_fit_takes_the_same_names(harness, tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("variant,n,latency_ms\n" + "".join(f"a,{n},{10 + n / 100}\n" for n in range(1, 50)))
    asked = ("--bpw", "a=4", "--json")
    typed = harness("fit", log, "--model", "llama3.1:8b", "--machine", "4060 Ti", *asked).json
    plain = harness("fit", log, "--model", "llama-3.1-8b", "--machine", "rtx-4060-ti-8gb", *asked).json
    assert typed == plain
    ran = harness("fit", log, "--model", "llama3.1:8b", "--machine", "a100")
    assert "ambiguous machine a100; did you mean a100-40gb, a100-80gb-pcie or a100-80gb-sxm?" in ran.err
    assert (
        'ambiguous shape "gemma2"; did you mean gemma-2-27b, gemma-2-2b or gemma-2-9b?'
        in harness("fit", log, "--model", "gemma2", "--machine", "4090").err
    )


def test_a_config_takes_the_same_names_and_counts(tmp_path):
    path = tmp_path / "typed.yaml"
    path.write_text(
        "protocol: {new_tokens: 10k, prompt_tokens: 0.5k}\n"
        "models:\n  - shape: Qwen/Qwen2.5-7B-Instruct\n"
        "variants:\n  - {stack: llamacpp, n_ctx: [32k, 65536]}\n"
        "exclude:\n  - {n_ctx: 64k}\n"
        "workloads:\n  - kind: decode\n  - {kind: grow, target: 20k}\n"
    )
    experiment = load(path, ["repeats=1"])
    (model,) = experiment.models
    assert (model.name, model.shape) == names.model("qwen2.5:7b")
    assert (experiment.protocol.new_tokens, experiment.protocol.prompt_tokens) == (10_240, 512)
    assert {variant.options["n_ctx"] for _, variant, _ in experiment.combinations()} == {32_768}
    assert [workload.new_tokens for _, _, workload in experiment.combinations()] == [10_240, 20_480 - 512]
    assert load(path, ["new_tokens=2k"]).protocol.new_tokens == 2048


def test_an_own_machine_is_like_a_known_one(harness, tmp_path):
    own = tmp_path / "own.yaml"

    def rows(machine: str) -> tuple[float, float, str]:
        half = "{like: 'qwen2.5:7b', layers: 14, context: 4k}"
        own.write_text(f"machines:\n  mine: {machine}\nshapes:\n  half: {half}\n")
        (row,) = harness("theory", "half", "--machine", "mine", "--from", own, "--bpw", "4", "--json").json
        return row["memory_bytes"] / GIB, row["bytes_per_s"] / 1e9, row["rate"]

    assert rows("{like: rtx 4090, memory_gib: 48}") == (48, 1008, "int8")
    assert rows("{like: m2, memory_gib: 12, tflops: 3.6}") == (12, 100, "own")
    assert rows("{like: pi 5 8gb, bandwidth_gb_per_s: 10}") == (8, 10, "int8")


@pytest.mark.parametrize(
    ("machine", "sentence"),
    [
        (
            "{like: m2}",
            'machines.mine.like: ambiguous machine "m2"; did you mean apple-m2-8gb, apple-m2-16gb or',
        ),
        ("{like: a100, memory_gib: 80}", "did you mean a100-80gb-pcie or a100-80gb-sxm?"),
        ("{like: m9}", 'machines.mine.like: unknown machine "m9"'),
        ("{like: 4090}", "machines.mine.like: expected text, got 4090 (put it in quotes)"),
        ("{memory_gib: 8, tflops: 1}", "machines.mine.bandwidth_gb_per_s: is missing"),
    ],
)
def test_an_own_machine_that_is_like_none_is_a_sentence(harness, tmp_path, machine, sentence):
    own = tmp_path / "own.yaml"
    own.write_text(f"machines:\n  mine: {machine}\n")
    ran = harness("theory", "qwen3-8b", "--machine", "mine", "--from", own)
    assert ran.code == 2
    assert sentence in ran.err
