"""What people type, and what is understood: models, machines, counts of tokens, sizes of memory."""

import pytest
from csv_tables import of_each, rows

from harness.base.text import alike
from harness.config import load
from harness.theory import machine_names, names, quantities
from harness.theory.ggml_quants import QUANTS
from harness.theory.hf_config import SHAPES
from harness.theory.machines import MACHINES
from harness.theory.names import NotUnderstood

GIB = 2**30


@pytest.mark.parametrize("typed", ["rtx9999", "rtx-9999-ti", "zzz"])
def test_nothing_is_suggested_that_is_not_like_what_was_typed(harness, typed):
    for asked in (("theory", "qwen3-8b", "--machine", typed), ("recommend", "--machine", typed)):
        ran = harness(*asked)
        assert (ran.code, "did you mean" in ran.err) == (2, False), ran.err
    assert alike("rtx-4091", ["rtx-4090", "titan-rtx"]) == ["rtx-4090"]


# --- models


@of_each(("typed", "name"), rows("typed_models"))
def test_a_model_is_understood_as_the_hub_and_ollama_write_it(typed, name):
    assert names.named(typed).name == name


@of_each("name", SHAPES)
def test_every_name_in_the_list_is_itself(name):
    assert names.named(name.upper()) == (name, SHAPES[name], "")


def test_a_tuned_model_has_the_context_of_its_own_config():
    tuned, base = names.named("qwen2.5:7b").made, SHAPES["qwen2.5-7b"]
    assert (tuned.context, base.context) == (32_768, 131_072)
    assert names.named("Qwen2.5-7B").made == base
    assert names.named("Qwen3-8B-Base").made.context == 32_768
    assert names.named(names.named("qwen2.5:7b").name).made == tuned


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
        ("gemma-3-12b", "no Gemma is among the dense models"),
        ("gemma3:12b", "no Gemma is among the dense models"),
        ("phi4", "no Phi is among the dense models"),
        ("DeepSeek-R1-Distill-Qwen-7B", "no DeepSeek is among the dense models"),
        ("CodeLlama-7b", "no CodeLlama is among the dense models"),
        ("tinyllama:1.1b", "no TinyLlama is among the dense models"),
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
        names.named(typed, otherwise="give its config.json")
    assert sentence in refused.value.sentence("model", typed)


# --- machines


@of_each(("typed", "found"), rows("typed_machines"))
def test_a_machine_is_understood_as_people_and_nvml_write_it(typed, found):
    assert [*machine_names.machines(typed)] == found.split()


@of_each("name", MACHINES)
def test_a_machine_and_each_of_its_sizes_are_named_by_what_they_print(name):
    for given, machine in machine_names.machines(name).items():
        assert machine_names.machines(given) == {given: machine}
        assert machine.bandwidth == MACHINES[name].bandwidth
        same_size = machine.memory_bytes == MACHINES[name].memory_bytes
        assert same_size or f"{machine.memory_bytes / GIB:g}gb" in given


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
        ("2x 3091", "did you mean rtx-3090?"),
        ("9x 3090", "2 to 8 of a known GPU can be one machine, typed as in 2x-rtx-3090"),
        ("4090x", 'rtx-4090 is known, "x" is not'),
        ("40900", "did you mean rtx-4090?"),
        ("2x m2", "only GPUs with memory of their own can be several in a computer"),
        ("orange pi 5 max", 'rpi-5 is known, "max orange" is not'),
        ("", "see harness theory --list-machines"),
        ("1" * 10_000, "see harness theory --list-machines"),
    ],
)
def test_another_machine_is_never_taken_for_one_that_is_known(typed, sentence):
    with pytest.raises(NotUnderstood) as refused:
        machine_names.machines(typed)
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
    sized = machine_names.machines(typed, memory=gib)
    assert {name: machine.memory_bytes / GIB for name, machine in sized.items()} == found


def test_a_memory_that_no_size_has_needs_one_machine():
    with pytest.raises(NotUnderstood, match="name one of a100-40gb, a100-80gb-pcie and a100-80gb-sxm"):
        machine_names.machines("a100", memory=60)


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
            return bool(machine_names.machines(name))
        except NotUnderstood:
            return False

    assert machine_names.joined(words, is_machine) == found


# --- numbers


@pytest.mark.parametrize(
    ("typed", "count"),
    [("32k", 32_768), ("128K", 131_072), ("1.5k", 1536), ("1M", 1_048_576), ("8 k", 8192)],
)
def test_k_is_1024_tokens(typed, count):
    assert quantities.token_count(typed) == count


@pytest.mark.parametrize("typed", ["32", "k", "1.3k", "-1k", "32kb", "1e3k", "", "٣k", "0k"])
def test_what_is_no_count_with_a_k_is_none(typed):
    assert not quantities.token_count(typed)


@pytest.mark.parametrize(
    ("typed", "gib"), [("16GB", 16), ("16 GiB", 16), ("16g", 16), ("7.5GB", 7.5), ("1TB", 1024)]
)
def test_memory_is_binary_as_sold(typed, gib):
    assert quantities.memory_gib(typed) == gib


@pytest.mark.parametrize("typed", ["16", "16MB", "-1GB", "GB", "0GB", "", "16 gigs"])
def test_what_is_no_memory_is_none(typed):
    assert not quantities.memory_gib(typed)


# --- everywhere a name or a count is given


def test_theory_takes_what_people_type_and_the_shell_has_split(harness):
    machines = ["RTX", "4060", "Ti", "m2", "pro"]
    asked = ("--machine", *machines, "--memory", "16GB", "--context", "8k", "--json")
    ran = harness("theory", "llama3.1:8b", *asked)
    assert {(row["model"], row["context"]) for row in ran.json} == {("llama-3.1-8b", 8192)}
    assert {row["machine"] for row in ran.json} == {"rtx-4060-ti-16gb", "apple-m2-pro-16gb"}
    assert ran.err == ""
    ran = harness("theory", "--machine", "4090", "meta-llama/Llama-3.1-8B", "--prompt", "2k", "--json")
    assert {(row["model"], row["prompt_tokens"]) for row in ran.json} == {("llama-3.1-8b", 2048)}


@pytest.mark.parametrize(
    ("typed", "machine", "sentence"),
    [
        (
            "m2",
            "apple-m2-8gb",
            "apple-m2-8gb, apple-m2-16gb or apple-m2-24gb; the smallest, apple-m2-8gb, is taken: "
            "name another to change that",
        ),
        (
            "4070",
            "rtx-4070-gddr6",
            "rtx-4070-gddr6 or rtx-4070-gddr6x; the slowest, rtx-4070-gddr6, is taken: name another to"
            " change that",
        ),
    ],
)
def test_of_a_name_of_several_machines_theory_and_recommend_take_the_slowest(
    harness, typed, machine, sentence
):
    ran = harness("theory", "qwen3-8b", "--machine", typed, "--bpw", "4", "--json")
    assert [row["machine"] for row in ran.json] == [machine]
    assert ran.err == f"harness: {typed} is {sentence}\n"
    ran = harness("recommend", "tiny-qwen2", "--machine", typed)
    assert f"{typed} is {sentence}\n" in ran.err


def test_all_is_every_type_of_llama_cpp(harness):
    rows = harness("theory", "qwen1.5-0.5b", "--quant", "all", "--json").json
    assert [row["weights"] for row in rows] == list(QUANTS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pythia-12b"], "Pythia is not known yet; give its config.json or --from\n"),
        (["./no/qwen2.5-7b"], "no/qwen2.5-7b: no such file"),
        (["qwen2.5"], "ambiguous model (and no file) qwen2.5; did you mean qwen2.5-0.5b, "),
        (["qwen3-8b", "--machine", "m6"], "unknown machine m6; see harness theory --list-machines"),
        (["qwen3-8b", "--memory", "8GB", "--bpw", "4"], "--bpw needs a --machine, also with --memory"),
        (["qwen3-8b", "--bandwidth", "8"], "--bandwidth goes with --memory, and without a machine"),
        (["--memory", "8GB"], "name a model: harness theory qwen3-30b-a3b --memory 16GB --context 32k"),
        (["qwen3-8b", "--machine", "m2", "--memory", "8"], "8 is not a size of memory such as 16GB"),
        (["qwen3-8b", "--context", "2M"], "2M is not a count from 1 to 1,048,576, as 4096 or 16k"),
        (["qwen3-8b", "--context", "1.3k"], "1.3k is not a count"),
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
    assert "the slowest, a100-40gb, is taken: name another to change that" in ran.err
    ran = harness("fit", log, "--model", "gemma2", "--machine", "4090")
    assert 'ambiguous shape "gemma2"; did you mean gemma-2-27b, gemma-2-2b or gemma-2-9b?' in ran.err


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
    assert (model.name, model.made, "") == names.named("qwen2.5:7b")
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
            'machines.mine.like: ambiguous machine "m2"; did you mean apple-m2-8gb, apple-m2-16gb',
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
