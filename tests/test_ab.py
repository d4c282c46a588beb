"""`harness ab`: two sides of one campaign by the real command, on the fake stack."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import refused, stored_in

from harness import config as configs
from harness.analysis import paired
from harness.config import plan
from harness.stacks.header import project_of, stacks

# By the fake's virtual clock and with a wide threshold: a busy machine can neither hide nor make a change.
CELL = {"B_ms": 3.0, "clock": "virtual"}
SLOW = ("--set-b", "variants.0.B_ms=6.0", "--threshold", "60%")


def of_campaign(folder: Path) -> Counter[tuple[str, str, int]]:
    """Records by pair, side and round."""
    found = (each.record["campaign"] for each in stored_in(folder))
    return Counter((of["pair"], of["side"], of["round"]) for of in found)


def test_a_slower_side_is_slower_and_both_sides_are_one_campaign(harness, config, tmp_path):
    cells = config(CELL, CELL | {"B_ms": 2.0})
    ran = harness("ab", cells, *SLOW, "--fail-on", "slower:20%", "--format", "json")
    assert ran.code == 3, ran.err
    verdicts = {(row["name"], row["metric"]): row for row in ran.json}
    slow = verdicts["tiny-qwen2 fake v0", "tokens_per_s"]
    assert (slow["verdict"], slow["fails"]) == ("SLOWER", True)
    assert slow["change"] < -0.3
    assert verdicts["tiny-qwen2 fake v1", "tokens_per_s"]["verdict"] == "SAME"
    records = stored_in(tmp_path / "results")
    assert len({record.record["campaign"]["id"] for record in records}) == 1
    rounds = of_campaign(tmp_path / "results")
    assert set(rounds.values()) == {1}
    of_a, of_b = ({(pair, at) for pair, side, at in rounds if side == each} for each in "AB")
    assert of_a == of_b
    assert slow["base_repeats"] == slow["new_repeats"] >= paired.FEWEST_ROUNDS


def test_a_config_against_itself_is_the_same_and_other_commands_read_its_records(harness, config, tmp_path):
    cells = config(CELL)
    ran = harness("ab", cells, "--max-rounds", "3", "--threshold", "60%")
    assert ran.code == 0, ran.err
    assert "SAME" in ran.out
    assert "\ntiny-qwen2 fake v0: no change of 60% in tok/s, " in ran.out
    assert ", 3 rounds counted\n" in ran.out
    assert "ended by the limit of 3 rounds" in ran.err
    # One cell in one version: every repeat has a unique number, so that none hides another.
    assert sorted(each.record["repeat"] for each in stored_in(tmp_path / "results")) == [1, 2, 3, 4, 5, 6]
    assert "ok 6/6" in harness("report", "--list", "results").out
    assert harness("report", "results").code == 0


def test_two_configs_are_paired_by_what_they_have_in_common(harness, config, tmp_path):
    before, after = config(CELL, name="before"), config(CELL | {"B_ms": 6.0}, name="after")
    ran = harness("ab", before, after, "--max-rounds", "3", "--threshold", "60%")
    assert ran.code == 0, ran.err
    assert "A: before.yaml -> B: after.yaml" in ran.out
    assert "SLOWER" in ran.out
    assert "option B ms" in ran.out  # what differs stands before the figures
    paths = {each.record["campaign"]["config_path"] for each in stored_in(tmp_path / "results")}
    assert paths == {str(before), str(after)}


def test_what_was_measured_before_is_not_reused(harness, config, tmp_path):
    cells = config(CELL, repeats=2)
    assert harness("run", cells).code == 0
    assert harness("ab", cells, "--max-rounds", "2", "--threshold", "60%").code == 0
    assert len(stored_in(tmp_path / "results")) == 2 + 4


def test_a_cell_that_fails_on_one_side_is_not_compared(harness, config):
    cells = config(CELL, CELL)
    given = ("--set-b", "variants.0.die_at_token=5", "--max-rounds", "8", "--threshold", "60%")
    ran = harness("ab", cells, *given)
    assert ran.code == 1
    assert "on side B 2 of 2 repeats: crash" in ran.out
    assert "some cells were not compared" in ran.err


def test_a_dry_run_measures_nothing(harness, config, tmp_path):
    ran = harness("ab", config(CELL), *SLOW, "--dry-run")
    assert ran.code == 0
    assert "tiny-qwen2 fake v0: tiny-qwen2.fake.v0" in ran.out
    assert f"; {paired.FEWEST_ROUNDS} to 100 rounds, until the intervals are narrow" in ran.err
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threshold", "one"], "--threshold: one: must be a percentage, as in 1%"),
        (["--max-rounds", "1"], "--max-rounds: 1 is not a whole number from 2 to"),
        (["--max-minutes", "0"], "0 is not a number of minutes above 0"),
        (["--fail-on", "slower:2"], "must be a percentage"),
        (["--set-b", "models.0.shape=tiny-llama"], "without a partner on the other side"),
        (["--set-b", "B_mss=1.0"], "--set-b B_mss=1.0: B_mss: unknown key"),
        (["--busy", "--fail-on", "slower:2%"], "--fail-on needs a verdict that counts"),
        (["--set-b", "device=cuda"], "both sides must use the same device"),
        (["--package-b", "torch==2.0"], "side B has no such package"),
        (["--only", "nothing*"], "matches none of"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_measured(harness, config, tmp_path, options, message):
    refused(harness("ab", config(CELL), *options), message)
    assert not (tmp_path / "results").exists()


def cells_of(tmp_path: Path, *variants: dict) -> list[plan.Cell]:
    data = {"models": [{"shape": "tiny-qwen2"}], "variants": variants}
    (tmp_path / "c.yaml").write_text(json.dumps(data))
    return plan.cells(configs.load(tmp_path / "c.yaml"))


def test_cells_are_paired_by_id_then_by_quantization_then_by_model(tmp_path):
    q8, q4 = {"stack": "llamacpp", "quant": "q8_0"}, {"stack": "llamacpp", "quant": "q4_0"}
    a = cells_of(tmp_path, q8, q4)
    b = cells_of(tmp_path, q4 | {"flash_attn": True}, q8)
    pairs, alone = plan.pairs(a, b)
    assert [(left.quant, right.quant) for left, right in pairs] == [("q8_0", "q8_0"), ("q4_0", "q4_0")]
    assert alone == []
    ((left, right),), _ = plan.pairs(a[:1], cells_of(tmp_path, q4))
    assert (left.quant, right.quant) == ("q8_0", "q4_0")
    assert plan.pairs(a, cells_of(tmp_path, {"stack": "hf"}))[0] == []


def test_both_orders_of_the_sides_and_of_the_pairs_occur():
    rounds = [plan.turns(3, 1, number) for number in range(1, 60)]
    orders = Counter(order for turns in rounds for _, order in turns)
    assert min(orders["A", "B"], orders["B", "A"]) > 50
    assert len({tuple(number for number, _ in turns) for turns in rounds}) == 6
    assert plan.turns(3, 1, 5) == rounds[4]


def test_another_version_of_a_package_is_another_environment():
    environment = stacks()["llamacpp"].environments["cpu"]
    other = environment.with_packages(["llama_cpp_python==0.3.35", "torch==2.0"])
    assert "llama_cpp_python==0.3.35" in other.dependencies
    assert len(other.dependencies) == len(environment.dependencies)
    assert not any("torch" in dependency for dependency in other.dependencies)
    assert project_of("Llama.cpp_python @ git+https://x/y@abc") == "llama-cpp-python"


def test_on_a_busy_machine_what_was_disturbed_counts_and_is_provisional(
    harness, config, tmp_path, monkeypatch
):
    (tmp_path / "disturbed").write_text("99")
    monkeypatch.setenv("HARNESS_FAKE_DISTURBED", str(tmp_path / "disturbed"))
    given = (config(CELL), *SLOW, "--max-rounds", "4", "--format", "json")
    quiet = harness("ab", *given)
    assert "nothing was compared" in quiet.err
    ran = harness("ab", *given, "--busy")
    assert ran.code == 1
    (speed,) = (row for row in ran.json if row["metric"] == "tokens_per_s")
    assert speed["verdict"] == "SLOWER"
    assert speed["reason"] == "provisional: 8 of 8 repeats disturbed"
    assert "on side B 4 of 4 repeats: invalid" in speed["lost"]


# The statistics of a pair


def test_a_change_of_one_percent_is_found_and_none_is_not():
    chance = np.random.default_rng(7)
    found = wrong = 0
    for _ in range(20):
        rounds = {str(n): chance.normal(0, 0.0141, 90) + 0.01 * (n == 0) for n in range(6)}
        changes = paired.changes({name: values.tolist() for name, values in rounds.items()})
        directions = {name: paired.direction(change, 0.00995) for name, change in changes.items()}
        found += directions.pop("0") == 1 and changes["0"].p < 0.001
        wrong += sum(changes[name].p < 0.001 and abs(sign) for name, sign in directions.items())
    assert (found, wrong) == (20, 0)


def test_what_drifts_in_both_sides_alike_is_not_in_the_interval():
    drift = np.linspace(0, 0.3, 20)
    noise = np.random.default_rng(8).normal(0, 0.001, (2, 20))
    a, b = drift + noise[0], drift + noise[1]
    change = paired.changes({"x": (b - a).tolist()})["x"]
    assert not paired.wide(change, 0.01)
    assert paired.direction(change, 0.01) == 0


def test_one_slow_process_does_not_make_a_side_slower():
    change = paired.changes({"x": [0.0, 0.001, -0.001, 0.0, 0.001, 0.2, 0.0, -0.001]})["x"]
    assert change.cost > 0.02
    assert paired.direction(change, 0.01) == 0


def test_rounds_go_on_until_the_interval_is_narrow():
    few, many = ([0.01, -0.01] * count for count in (2, 200))
    assert paired.wide(paired.changes({"x": few})["x"], 0.01)
    assert not paired.wide(paired.changes({"x": many})["x"], 0.01)
    assert paired.wide(paired.changes({"x": [0.0]})["x"], 0.01)  # one round has no spread


def test_compare_judges_the_records_again(harness, config):
    cells = config(CELL)
    first = harness("ab", cells, *SLOW, "--max-rounds", "3", "--format", "json")
    again = harness("compare", "results", "--ab", "--threshold", "60%", "--format", "json")
    assert again.code == first.code == 0
    figures = ("name", "metric", "change", "change_ci90", "verdict")
    judged, before = ([[row[key] for key in figures] for row in ran.json] for ran in (again, first))
    assert judged == before
    failed = harness("compare", "results", "--ab", "--threshold", "60%", "--fail-on", "slower:20%")
    assert failed.code == 3


def test_a_folder_without_such_a_campaign_is_one_sentence(harness, config):
    assert harness("run", config(CELL)).code == 0
    refused(harness("compare", "--ab"), "results: no campaign of `harness ab`")
