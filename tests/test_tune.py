"""`harness tune`: the search on simulated rounds, and the real command on the fake stack."""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import refused, stored_in

from harness.analysis.figures import BY_NAME
from harness.analysis.racing import DEFAULTS, Race, Search, Setting, changed, looks, options_label
from harness.report import tuned as report_tuned
from harness.stacks.header import stacks
from harness.stacks.limits import candidates, without_effect

Truth = Callable[[Mapping[str, object]], float]
OPTIONS = [[{"threads": n} for n in (1, 2, 4, 8)], [{"fa": True}], [{"kv": "q8"}, {"kv": "q8", "fa": True}]]
THREADS = {1: 0.6, 2: 0.0, 4: 0.1, 8: 0.3}  # cost: the logarithm of the time


def played(
    chance: np.random.Generator, truth: Truth, noise: float, start: Mapping[str, object], rough: bool = False
) -> Search:
    """A search on simulated costs: of each setting, of the day that drifts, and noise of each repeat, with
    heavy tails if `rough`."""
    search, day = Search(OPTIONS, start, rounds=16, threshold=0.01), 0.0
    while due := search.due():
        day += chance.normal(0, 0.02)
        errors = chance.standard_t(3, len(due)) if rough else chance.normal(0, 1, len(due))
        costs = (truth(dict(start) | dict(each)) for each in due)
        search.add({s: day + cost + noise * e for s, cost, e in zip(due, costs, errors, strict=True)})
    return search


# The search


@pytest.mark.parametrize("rough", [False, True])
def test_among_equal_settings_at_most_one_search_in_a_hundred_has_a_winner(rough):
    chance = np.random.default_rng(1)
    found = [played(chance, lambda options: 0.0, 0.03, {}, rough).winner for _ in range(1000)]
    assert sum(winner is not None for winner in found) <= 10


def test_the_last_race_alone_has_no_more_false_winners():
    """Whatever was chosen before, and however: its rounds took no part in that."""
    chance, wrong = np.random.default_rng(2), 0
    for _ in range(1000):
        race = Race(DEFAULTS, [(("a", 1),)], looks(8, 32), 0.01)
        while due := race.due():
            race.add({each: chance.normal(0, 0.03) for each in due})
        wrong += race.winner is not None
    assert wrong <= 10


@pytest.mark.parametrize("start", [1, 8])
def test_the_best_thread_count_is_found_from_too_few_and_from_too_many(start):
    chance = np.random.default_rng(start)
    for _ in range(50):
        search = played(chance, lambda options: THREADS[options["threads"]], 0.03, {"threads": start})
        assert search.winner
        assert dict(search.winner)["threads"] == 2


def test_options_are_tried_one_after_the_other_and_the_best_of_them_together():
    def truth(options: Mapping[str, object]) -> float:
        return THREADS[options["threads"]] - 0.05 * bool(options.get("fa"))

    search = played(np.random.default_rng(3), truth, 0.01, {"threads": 1, "fa": False})
    assert search.winner == (("fa", True), ("threads", 2))
    (gain,) = (each for each in search.results() if each.setting == search.winner)
    assert gain.change.ends[0] <= -0.65 <= gain.change.ends[1]


def test_the_interval_of_the_winner_covers_its_gain_as_often_as_it_says():
    chance, covered = np.random.default_rng(4), 0
    for _ in range(300):
        search = played(chance, lambda options: THREADS[options["threads"]], 0.03, {"threads": 8})
        (result,) = (each for each in search.results() if each.setting == search.winner)
        covered += result.change.ends[0] <= -0.3 <= result.change.ends[1]
    assert 0.92 <= covered / 300 <= 0.98


def test_the_worse_half_is_dropped_at_each_look_and_the_defaults_never_are():
    settings: list[Setting] = [(("threads", n),) for n in range(8)]
    race, chance, sizes = Race(DEFAULTS, settings, looks(4, 32), 0.01), np.random.default_rng(5), []
    while due := race.due():
        assert due[0] == DEFAULTS
        sizes.append(len(due) - 1)
        race.add({each: chance.normal(-0.02 * bool(each), 0.05) for each in due})
    assert all(later <= max(1, earlier) for earlier, later in pairwise(sizes))
    counts = Counter(sizes)
    assert counts[8] == 4
    assert max((size for size in counts if size < 8), default=0) <= 4


def test_a_setting_that_never_runs_is_given_up_and_the_others_go_on():
    search = Search([[{"a": 1}, {"a": 2}]], {}, rounds=4, threshold=0.01)
    broken, rounds = (("a", 1),), Counter()
    chance = np.random.default_rng(6)
    while due := search.due():
        rounds.update(due)
        costs = {each: -0.3 * len(each) + chance.normal(0, 0.001) for each in due}
        search.add(costs | {broken: None}, {broken})
    assert rounds[broken] == 2
    assert search.winner == (("a", 2),)


def test_a_round_without_a_figure_is_made_up_for():
    race = Race(DEFAULTS, [(("a", 1),)], looks(4, 4), 0.01)
    for number in range(5):
        assert not race.over
        race.add({DEFAULTS: 0.0 if number else None, (("a", 1),): -0.5 + number / 1e4})
    assert race.winner == (("a", 1),)


def test_a_setting_that_the_machine_disturbs_each_time_is_tried_longer_and_has_no_verdict():
    search, rounds = Search([[{"a": 1}]], {}, rounds=4, threshold=0.01), 0
    while search.due():
        search.add({DEFAULTS: 0.0})
        rounds += 1
    assert rounds == 8
    assert search.winner is None
    assert search.results()[1].cost is None


def test_a_setting_that_is_often_disturbed_stays_until_its_interval_is_known():
    race, rounds = Race(DEFAULTS, [(("a", 1),)], looks(4, 16), 0.01), 0
    while race.due():
        rounds += 1
        race.add({DEFAULTS: rounds / 1e4, (("a", 1),): -0.5 if rounds % 6 == 0 else None})
    assert rounds == 32  # of which five have both figures
    assert race.winner == (("a", 1),)


@pytest.mark.parametrize("rounds", [[0.4], [0.4, -2.9], [3.0, -2.9, 2.5, -2.8]])
def test_a_gain_of_too_few_or_too_different_rounds_is_provisional_and_not_a_figure(rounds):
    search = Search([[{"fast": True}]], {}, rounds=4, threshold=0.01)
    for at in range(8):
        gain = rounds[at] if at < len(rounds) else None
        if due := search.due():
            search.add({DEFAULTS: 0.0, due[-1]: None if gain is None else -gain})
    assert not search.due()
    metric = BY_NAME["tokens_per_s"]
    found = report_tuned.Found(search.results(), search.winner, None, metric, 0.01, {})
    (row,) = (each for each in report_tuned.rows(found) if each["name"] == "fast=true")
    assert row["provisional"]
    assert (row["gain"], row["gain_ci95"]) == (None, None)
    assert not found.decided
    assert report_tuned.verdict(found).startswith("provisional: 1 of 1 setting could not be compared")


def test_nothing_is_tried_where_the_defaults_do_not_run():
    search = Search([[{"a": 1}], [{"b": 1}]], {}, rounds=16, threshold=0.01)
    count = 0
    while search.due():
        search.add({}, {DEFAULTS})
        count += 1
    assert count == 2
    assert search.winner is None


def test_values_of_the_defaults_are_no_change():
    assert changed((("a", 2),), {"a": 1, "b": True}, {"a": 1}) == (("b", True),)
    assert Search([[{"a": 1}]], {"a": 1}, rounds=16, threshold=0.01).due() == []
    assert options_label((("b", True), ("c", "x"))) == "b=true c=x"
    assert options_label(DEFAULTS) == "defaults"
    assert looks(4, 16) == [4, 8, 16]
    assert looks(8, 5) == [5]


# What is tried, and how it is spelt


def test_what_is_tried_is_threads_by_halves_and_what_the_header_names_for_the_device():
    header = stacks()["llamacpp"]
    threads, *others = candidates(header, "cpu", "decode", cores=6, logical=12)
    assert [each["threads"] for each in threads] == [1, 3, 6, 12]
    names = [sorted({name for each in group for name in each}) for group in others]
    assert names == [["flash_attn"], ["flash_attn", "type_k", "type_v"], ["repack"], ["mmap"]]
    on_a_gpu = candidates(header, "cuda", "prefill", cores=6, logical=12)
    assert {name for group in on_a_gpu for each in group for name in each} == {
        *("flash_attn", "type_k", "type_v", "n_batch", "n_ubatch", "gpu_layers"),
    }
    pinned = candidates(header, "cpu", "decode", cores=2, logical=2, cpus="0-1")
    assert pinned[1] == [{"cpus": "0-1"}]
    assert without_effect(header, "gpu_layers", "cpu")
    assert not without_effect(header, "gpu_layers", "cuda")
    assert not without_effect(header, "threads", "cpu")


def test_the_command_line_of_llama_cpp_has_the_options_by_its_own_names():
    header = stacks()["llamacpp"]
    options = {name: option.default for name, option in header.options.items()}
    options |= {"threads": 2, "n_ctx": 89, "flash_attn": True, "mmap": False, "quant": "q4_0"}
    assert report_tuned.command(header, options, "/models/my model.gguf") == (
        "llama-server --model '/models/my model.gguf' --threads 2 --batch-size 512 --ubatch-size 512 "
        "--flash-attn on --cache-type-k f16 --cache-type-v f16 --no-mmap"
    )
    assert "--gpu-layers 7" in report_tuned.command(header, options | {"gpu_layers": 7}, "m.gguf")
    assert report_tuned.command(stacks()["hf"], {"threads": 2}, "m") is None
    row = report_tuned.config_row("hf", {"dtype": "bf16", "compile": True, "threads": 2})
    assert row == "{stack: hf, dtype: bf16, compile: true, threads: 2}"


# The command. By the fake's virtual clock: a busy machine can neither hide nor make a difference.
CELL = {"B_ms": 3.0, "clock": "virtual"}


def stored(folder: Path) -> list[dict]:
    return [each.record for each in stored_in(folder)]


def test_the_fastest_setting_is_found_with_its_gain_and_how_to_run_it(harness, config, tmp_path):
    ran = harness("tune", config(CELL), "--option", "B_ms=2.0,4.0", "--rounds", "4")
    assert ran.code == 0, ran.err
    assert "B_ms=2.0 is significantly faster than the defaults: +50.0% tok/s, 95% CI" in ran.out
    assert "config row: {stack: fake, B_ms: 2.0, clock: virtual}" in ran.out
    assert "command:" not in ran.out  # the fake has no separate program
    of = [each["campaign"] for each in stored(tmp_path / "results")]
    assert len({each["id"] for each in of}) == 1
    assert {each["name"] for each in of} == {"fake-tune"}
    # 4 rounds of all, then 4 of the best and the defaults, each once a round
    assert Counter(each["setting"] for each in of) == {"defaults": 8, "B_ms=2.0": 8, "B_ms=4.0": 4}
    assert set(Counter((each["setting"], each["round"]) for each in of).values()) == {1}
    assert harness("report", "--list", "results").code == 0


def test_among_settings_that_are_alike_there_is_no_winner(harness, config):
    ran = harness("tune", config(CELL), "--option", "spike_ms=4.0,6.0", "--rounds", "4", "--json")
    assert ran.code == 0, ran.err
    assert [row["name"] for row in ran.json] == ["defaults", "spike_ms=4.0", "spike_ms=6.0"]
    assert not any(row["winner"] or row["command"] for row in ran.json)
    assert ran.json[0]["gain"] is None
    assert ran.json[1]["gain"] == pytest.approx(0, abs=0.01)
    assert "no setting is significantly faster than the defaults" in ran.err


def test_prefill_is_tuned_by_a_pass_of_512_tokens(harness, config):
    cells = config(CELL | {"prompt_token_ms": 0.5})
    ran = harness(
        "tune", cells, "--for", "prefill", "--option", "prompt_token_ms=0.25", "--rounds", "4", "--json"
    )
    assert ran.code == 0, ran.err
    (winner,) = (row for row in ran.json if row["winner"])
    assert winner["metric"] == "pp512"
    assert winner["gain"] == pytest.approx(1.0, abs=0.05)


def test_a_setting_that_crashes_is_named_with_the_reason(harness, config):
    ran = harness("tune", config(CELL), "--option", "die_at_token=5", "--rounds", "4")
    assert ran.code == 0, ran.err
    assert "crash: " in next(line for line in ran.out.splitlines() if line.startswith("die_at_token=5"))
    assert "no setting is significantly faster" in ran.out


def test_defaults_that_crash_end_it(harness, config):
    ran = harness("tune", config(CELL | {"die_at_token": 5}), "--option", "B_ms=2.0", "--rounds", "4")
    assert ran.code == 1
    assert "the defaults could not be measured: crash: " in ran.out


def test_more_threads_than_cpus_are_measured_as_what_they_are(harness, config, tmp_path):
    """Threads that wait for each other are no disturbance, but a cost of the setting."""
    count = tmp_path / "disturbed"
    count.write_text("1000")
    cells = config(CELL | {"threads": 4096, "B_ms": 6.0})
    ran = harness("tune", cells, "--option", "B_ms=3.0", "--rounds", "4", HARNESS_FAKE_DISTURBED=str(count))
    assert ran.code == 0, ran.err
    assert "B_ms=3.0 is significantly faster than the defaults: +100.0%" in ran.out


def test_disturbed_repeats_count_only_where_the_machine_is_said_to_be_busy(harness, config, tmp_path):
    count = tmp_path / "disturbed"
    cells, try_one = config(CELL | {"threads": 1}), ("--option", "B_ms=2.0", "--rounds", "4")
    for more, code in ((), 1), (("--busy",), 0):
        count.write_text("1000")
        ran = harness("tune", cells, *try_one, *more, HARNESS_FAKE_DISTURBED=str(count))
        assert ran.code == code, ran.err
    assert "B_ms=2.0 is significantly faster" in ran.out


def test_a_search_that_the_machine_disturbed_has_no_verdict_and_is_not_ok(harness, config, tmp_path):
    count = tmp_path / "disturbed"
    count.write_text("14")  # of 16 repeats: one round of both is left
    ran = harness(
        *("tune", config(CELL | {"threads": 1}), "--option", "B_ms=2.0", "--rounds", "4"),
        HARNESS_FAKE_DISTURBED=str(count),
    )
    assert ran.code == 1
    (line,) = (each for each in ran.out.splitlines() if each.startswith("B_ms=2.0"))
    assert "provisional: compared in 1 round of at least 4; invalid: its threads waited" in line
    assert "%" not in line.partition("provisional")[0]
    assert "provisional: 1 of 1 setting could not be compared with the defaults" in ran.out
    assert "no setting is" not in ran.out


def test_a_dry_run_names_what_is_tried_and_measures_nothing(harness, config, tmp_path):
    ran = harness("tune", config(CELL), "--option", "B_ms=2.0,4.0", "--dry-run")
    assert (ran.code, ran.err) == (0, "")
    assert "tried: B_ms=2.0, B_ms=4.0" in ran.out
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--option", "treads=1,2"], "unknown option of fake; did you mean threads?"),
        (["--option", "threads"], "must be NAME=VALUE,..., as in threads=1,2,4"),
        (["--option", "threads=0,1"], "must be at least 1, got 0"),
        (["--option", "B_ms=fast"], 'expected a number, got "fast"'),
        (["--option", "die_by=error"], "--option die_by=error: the fake failed, as asked"),
        (["--option", "quant=q4_0"], "gives other weights, which are another model"),
        (["--option", "B_ms=3.0"], "there is nothing to try here but the defaults"),
        (["--rounds", "3"], "--rounds: 3 is not a whole number from 4 to"),
        (["--tokens", "1"], "--tokens: 1 is not a whole number from 2 to 100,000"),
        (["--threshold", "much"], "must be a percentage"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_measured(harness, config, tmp_path, options, message):
    refused(harness("tune", config(CELL), *options), message)
    assert not (tmp_path / "results").exists()


def test_one_model_and_one_variant_are_tuned(harness, config):
    cells = config(CELL, CELL)
    told = "fake.yaml has 2 variants: fake v0, fake v1; tune takes one: choose with --only"
    refused(harness("tune", cells, "--option", "B_ms=2.0"), told)
    ran = harness("tune", cells, "--option", "B_ms=2.0", "--only", "*.v1.*", "--dry-run")
    assert ran.code == 0, ran.err


def test_a_device_decides_what_can_be_tried(harness, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("models: [{shape: tiny-qwen2}]\nvariants: [{stack: llamacpp, quant: q4_0, threads: 1}]\n")
    ran = harness("tune", path, "--option", "gpu_layers=1,2")
    refused(ran, "gpu_layers has no effect on the device cpu")
    ran = harness("tune", path, "--option", "type_v=q8_0")
    refused(ran, "--option type_v=q8_0: quantized V cache requires flash_attn to be enabled")
    ran = harness("tune", path, "--dry-run")
    assert ran.code == 0, ran.err
    assert "gpu_layers" not in ran.out
