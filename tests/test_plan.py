"""Which cells, under which ids, in which order, and what is done already."""

from pathlib import Path

import pytest

from harness import config
from harness.config import plan
from harness.theory.decoder import kv_elements_per_token, parameters
from harness.theory.hf_config import SHAPES

CONFIGS = Path(__file__).parent.parent / "configs"


def quickstart(*settings: str) -> list[plan.Cell]:
    return plan.cells(config.load(CONFIGS / "quickstart.yaml", settings))


def test_ids_are_readable_unique_and_the_same_every_time():
    first, second = quickstart(), quickstart()
    assert [c.id for c in first] == [c.id for c in second]
    assert len({c.id for c in first}) == len(first)
    assert first[0].id.startswith("qwen1.5-0.5b.llamacpp.q8_0.decode.")


def test_an_id_names_what_was_asked_and_not_how_often_or_in_which_order():
    ids = [c.id for c in quickstart()]
    for setting in ("protocol.repeats=7", "protocol.order_seed=3", "protocol.threads=1", "name=other"):
        assert [c.id for c in quickstart(setting)] == ids
    assert not {c.id for c in quickstart("protocol.prompt_tokens=9")} & set(ids)
    # A pass or a window decodes no new tokens of the protocol's.
    changed = {c.workload.kind for c in quickstart("protocol.new_tokens=99") if c.id not in ids}
    assert changed == {"decode"}


def test_options_are_resolved_for_the_machine_and_the_workload():
    options = quickstart()[0].options(threads=6)
    assert options["threads"] == 6
    assert options["n_ctx"] == 25 + 256
    assert options["quant"] == "q8_0"
    assert options["mmap"] is True


def test_every_round_has_every_cell_once_and_the_seed_decides_the_order():
    cells = [cell for cell in quickstart() if cell.workload.kind == "decode"]
    order = plan.order(cells, 3, seed=0)
    assert order == plan.order(cells, 3, seed=0)
    for start in (0, 3, 6):
        assert sorted(c.id for c, _ in order[start : start + 3]) == sorted(c.id for c in cells)
    assert len({tuple(c.id for c, _ in plan.order(cells, 1, seed)) for seed in range(20)}) > 1


@pytest.mark.parametrize(
    ("latest", "fresh", "retry_failed", "done"),
    [
        (None, False, False, False),
        ("ok", False, False, True),
        ("ok", False, True, True),
        ("functional", False, True, True),
        ("ok", True, False, False),
        ("oom", False, False, True),
        ("oom", False, True, False),
        ("invalid", False, True, False),
        ("interrupted", False, False, False),
        ("interrupted", False, True, False),
    ],
)
def test_what_is_done_stays_done_unless_asked(latest, fresh, retry_failed, done):
    assert plan.is_done(latest, fresh, retry_failed) is done


def test_a_content_key_changes_with_all_that_a_figure_depends_on():
    cell = quickstart()[0]
    asked = {
        "options": cell.options(2),
        "stack": ["cpu", "a==1"],
        "fingerprint": "weights",
        "machine": "here",
        "device": "cpu",
    }
    changes = [
        {},
        {"options": cell.options(1)},
        {"stack": ["cpu", "a==2"]},
        {"stack": ["cuda", "a==1"]},
        {"fingerprint": "other"},
        {"machine": "there"},
        {"device": "GPU-1"},
    ]
    keys = [plan.content_key(cell, **(asked | change)) for change in changes]
    assert len(set(keys)) == len(changes)
    assert plan.content_key(cell, **asked) == keys[0]


def test_the_shape_of_the_study_has_its_published_counts():
    shape = SHAPES["qwen1.5-0.5b"]
    assert parameters(shape) == 619_570_176
    assert (
        2 * kv_elements_per_token(shape) == 2 * 48 * 2**20 / 1024
    )  # 48 Mi elements per 1024 tokens, 2 bytes each
