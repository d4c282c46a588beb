"""Is a server slow, and why: its speed beside what this machine allows, and causes that it reports itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Ran, stored_in
from stand_in_server import MODEL, Behaviour, serving
from test_server_identity import AWAITED_MS, run  # noqa: F401

from harness.analysis import server_speed
from harness.dataset.study import load_study
from harness.report.page import page

SMALL = ("--model", "smollm2-135m:q4_1", "--set", "measure_bandwidth=true")
ANOTHER = {"name": "llama3.1:8b", "size": 4_700_000_000}


@pytest.fixture
def answer(run: Callable[..., Ran]) -> Callable[..., str]:  # noqa: F811
    """What is printed of a short run against a server that behaves so, on one line."""

    def first(behaviour: Behaviour, *more: str) -> str:
        behaviour.token_ms = max(behaviour.token_ms, AWAITED_MS)
        with serving(behaviour) as address:
            ran = run(address, *more)
        return " ".join(ran.out.split())

    return first


def test_the_speed_of_a_server_is_beside_what_this_machine_allows_for_its_model(answer, tmp_path):
    text = answer(Behaviour("openai", token_ms=20.0), *SMALL)
    found = re.search(
        r"smollm2-135m-q4_1 \(device not reported by the server\): (?P<rate>[\d.]+) tok/s, (?P<share>\d+)%"
        r" of the (?P<allows>[\d.]+) tok/s that this machine allows \(0\.\d+ GB of weights a token from main",
        text,
    )
    assert found, text
    assert float(found["share"]) == pytest.approx(100 * float(found["rate"]) / float(found["allows"]), abs=1)
    assert "tok/s that this machine allows" in page(load_study(stored_in(tmp_path / "results")))


def test_a_speed_that_this_machine_cannot_have_is_said_to_be_one(answer):
    large = ("--model", "llama-3.1-8b:q4_k_m", "--set", "measure_bandwidth=true")
    assert "check that it runs on this machine, and which model it has" in answer(
        Behaviour("openai", token_ms=20.0), *large
    )


@pytest.mark.parametrize(
    ("behaviour", "sentences"),
    [
        (
            Behaviour("ollama", on_gpu=0.45),
            ["(45% on the GPU)", "Why: 55% of the model is on the CPU at num_ctx 512: lower num_ctx or take"],
        ),
        (Behaviour("ollama", on_gpu=1.0), ["(on the GPU)"]),
        (Behaviour("ollama"), ["(device not reported by the server)"]),
        (
            Behaviour("ollama", shown={"details": {"quantization_level": "Q4_K_M"}}),
            ["(q4_k_m, device not reported by the server)", "does not report what a token reads: name the"],
        ),
        (
            Behaviour("ollama", pages={"/api/ps": {"models": [ANOTHER]}}),
            ["Why: another model is loaded too: llama3.1:8b (4.7 GB)"],
        ),
        (
            Behaviour(
                "openai",
                pages={
                    "/api/v0/models": {
                        "data": [
                            {"id": MODEL, "quantization": "Q8_0", "state": "loaded"},
                            {"id": "qwen3-8b", "quantization": "Q4_K_M", "state": "loaded"},
                            {"id": "gemma", "quantization": "Q4_K_M", "state": "not-loaded"},
                        ]
                    }
                },
            ),
            ["(q8_0, device not reported by the server)", "Why: another model is loaded too: qwen3-8b."],
        ),
    ],
)
def test_device_quantization_and_causes_are_those_that_the_server_reports(answer, behaviour, sentences):
    text = answer(behaviour)
    assert all(sentence in text for sentence in sentences), text
    assert "on cpu" not in text
    if not any("Why" in sentence for sentence in sentences):
        assert "Why" not in text


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("no-such-model", "--model no-such-model: no such file, cached repository or known model"),
        ("./none.gguf", "--model ./none.gguf: no such file or folder"),
    ],
)
def test_a_model_that_is_not_known_is_one_sentence_before_anything_is_measured(run, model, reason):  # noqa: F811
    with serving(Behaviour()) as address:
        ran = run(address, "--model", model)
    assert (ran.code, ran.out) == (2, "")
    assert reason in ran.err


def test_the_model_of_a_server_is_refused_for_weights_and_configs(harness):
    ran = harness("run", "quickstart", "--model", "qwen3-8b")
    assert ran.code == 2
    assert "a config has its variants" in ran.err


def test_the_devices_of_a_server_have_one_wording() -> None:
    def of(share: float | None) -> str:
        served: Any = {"gpu_share": share}
        return server_speed.device(served)

    assert [of(None), of(1.0), of(0.45), of(0.0)] == [
        server_speed.NOT_REPORTED,
        "on the GPU",
        "45% on the GPU",
        "on the CPU",
    ]
