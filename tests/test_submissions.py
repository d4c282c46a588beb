"""Decode cells in llm-d's benchmark report and as submissions to LocalMaxxing, against the fields of each."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import STUDY, Ran, stored_in
from made_nights import Nights

Harness = Callable[..., Ran]


def closed(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """A schema of an object that may have no other fields."""
    properties = required | optional
    return {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
    }


TEXT, COUNT, AMOUNT, ANY = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "number"}, {}


def statistics_in(units: str) -> dict[str, Any]:
    spread = ("min", "p50", "p90", "p99", "max")
    of_units = {"units": {"const": units}, "mean": AMOUNT}
    return closed(of_units, stddev={"type": "number", "minimum": 0}, **dict.fromkeys(spread, AMOUNT))


# The fields of BenchmarkReportV02 that are used, as in llm-d-benchmark's br_v0_2_json_schema.json at 8bc9f1d.
FIXED = closed({"distribution": {"const": "fixed"}, "value": AMOUNT})
ACCELERATOR = closed({"model": TEXT, "count": COUNT, "parallelism": {"type": "object"}})
ENGINE = closed(
    {
        "kind": {"const": "inference_engine"},
        "tool": TEXT,
        "tool_version": TEXT,
        "role": {"enum": ["replica", "prefill", "decode"]},
        "replicas": COUNT,
        "model": closed({"name": TEXT}),
        "accelerator": ACCELERATOR,
    }
)
GENERIC = {"properties": {"kind": {"const": "generic"}}, "required": ["kind", "tool", "tool_version"]}
COMPONENT = closed(
    {
        "metadata": closed({"label": TEXT, "cfg_id": TEXT}),
        "standardized": {"oneOf": [ENGINE, GENERIC]},
        "native": closed({}, args={"type": "object"}),
    }
)
LOAD = closed(
    {
        "metadata": closed({}),
        "standardized": closed(
            {"tool": TEXT, "tool_version": TEXT, "source": {"enum": ["random", "sampled", "unknown"]}}
            | {"input_seq_len": FIXED},
            output_seq_len=FIXED,
            concurrency={"const": 1},
        ),
        "native": closed({}),
    }
)
LATENCY = closed(
    {},
    time_to_first_token=statistics_in("s"),
    request_latency=statistics_in("s"),
    **{
        f"{name}": statistics_in("s/token")
        for name in ("normalized_time_per_output_token", "time_per_output_token", "inter_token_latency")
    },
)
AGGREGATE = closed(
    {},
    requests=closed(
        {"total": COUNT}, input_length=statistics_in("count"), output_length=statistics_in("count")
    ),
    latency=LATENCY,
    throughput=closed(
        {}, output_token_rate=statistics_in("tokens/s"), total_token_rate=statistics_in("tokens/s")
    ),
)
REPORT = closed(
    {
        "version": {"const": "0.2"},
        "run": closed({"uid": TEXT}, eid=TEXT, time=closed({}, start=TEXT), description=TEXT),
        "results": closed({"request_performance": closed({"aggregate": AGGREGATE})}),
    },
    scenario=closed({"stack": {"type": "array", "items": COMPONENT}, "load": LOAD}),
)

# The body of POST /api/benchmarks, by localmaxxing.com/api-docs.
CPU = closed({"hwClass": {"const": "CPU_ONLY"}}, cpu=TEXT, ramGb=AMOUNT, os=TEXT)
GPU = closed(
    {"hwClass": {"const": "DISCRETE_GPU"}, "gpuName": TEXT, "gpuCount": COUNT, "vramGb": AMOUNT},
    cpu=TEXT,
    ramGb=AMOUNT,
    os=TEXT,
)
SUBMISSION = closed(
    {"hardware": {"oneOf": [CPU, GPU]}, "engineName": TEXT, "quantization": TEXT, "tokSOut": AMOUNT}
    | {"ttftMs": AMOUNT},
    hfId=TEXT,
    engineVersion=TEXT,
    backend=TEXT,
    peakVramGb=AMOUNT,
    promptTokens=COUNT,
    outputTokens=COUNT,
    contextLength=COUNT,
    batchSize=COUNT,
    notes={"type": "string", "maxLength": 2000},
)

UUID = "GPU-5f1c2d3e-aaaa-bbbb-cccc-0123456789ab"
CARD = {"name": "NVIDIA GeForce RTX 4090", "memory_bytes": 24 << 30, "uuid": UUID}
ON_GPU: dict[str, Any] = {"device": UUID, "machine__gpus": [CARD], "asked__device": "cuda"}
LLAMA_CPP: dict[str, Any] = {
    "loaded__versions": {"llama-cpp-python": "0.3.36", "llama.cpp": "b1"},
    "loaded__quant": "f16",
    "model__weights": {"kind": "hub", "repo": "org/model", "file": "m.gguf", "synthetic": False},
}


@pytest.fixture
def grown(run_once: list[Path], tmp_path: Path) -> Nights:
    return Nights(run_once, tmp_path / "results")


def documents(ran: Ran) -> list[dict[str, Any]]:
    assert ran.code == 0, ran.err
    return [json.loads(line) for line in ran.out.splitlines()]


@pytest.mark.parametrize("changed", [{}, ON_GPU], ids=["cpu", "gpu"])
def test_a_report_of_llm_d_has_its_fields_and_the_figures_of_the_tokens(
    grown: Nights, harness: Harness, changed: dict[str, Any]
):
    grown.add(0, **changed)
    found = documents(harness("report", grown.root, "--export", "llm-d"))
    assert [each["run"]["description"] for each in found] == ["tiny-qwen2 fake a", "tiny-qwen2 fake b"]
    for each in found:
        jsonschema.validate(each, REPORT)
        (component,) = each["scenario"]["stack"]
        engine = component["standardized"]
        assert engine["kind"] == ("inference_engine" if changed else "generic")
        assert not changed or engine["accelerator"]["model"] == CARD["name"]
    of_a = [each.times.latency_ns for each in stored_in(grown.root) if each.record["variant"] == "a"]
    requests, latency, throughput = found[0]["results"]["request_performance"]["aggregate"].values()
    assert (requests["total"], requests["input_length"]["mean"]) == (2, 25)
    assert latency["time_to_first_token"]["mean"] == pytest.approx(
        statistics.fmean(ns[0] / 1e9 for ns in of_a)
    )
    assert latency["request_latency"]["max"] == pytest.approx(max(ns.sum() / 1e9 for ns in of_a))
    itl = statistics.fmean(ns / 1e9 for each in of_a for ns in each[1:])
    assert latency["inter_token_latency"]["mean"] == pytest.approx(itl)
    assert 0.001 < itl < 0.002
    rate = statistics.fmean(len(ns) / (ns.sum() / 1e9) for ns in of_a)
    assert throughput["output_token_rate"]["mean"] == pytest.approx(rate)


@pytest.mark.parametrize("changed", [{}, ON_GPU], ids=["cpu", "gpu"])
def test_a_submission_to_localmaxxing_has_its_fields_and_medians(
    grown: Nights, harness: Harness, changed: dict[str, Any]
):
    grown.add(0, **LLAMA_CPP, **changed)
    ran = harness("report", grown.root, "--export", "localmaxxing")
    assert ran.err == ""
    found = documents(ran)
    assert len(found) == 2
    for each in found:
        jsonschema.validate(each, SUBMISSION)
    rows = [r for r in harness("report", grown.root, "--list", "--json").json if r["variant"] == "a"]
    assert found[0]["tokSOut"] == pytest.approx(statistics.median(r["tokens_per_s"] for r in rows))
    assert found[0]["ttftMs"] == pytest.approx(statistics.median(r["ttft_ms"] for r in rows))
    said = {"hfId": "org/model", "engineName": "llama.cpp", "engineVersion": "b1", "quantization": "F16"}
    said |= {"backend": "cuda" if changed else "cpu"}
    assert said.items() <= found[0].items()
    assert found[0]["hardware"]["hwClass"] == ("DISCRETE_GPU" if changed else "CPU_ONLY")
    assert not changed or found[0]["hardware"]["vramGb"] == 24


def test_what_a_submission_lacks_is_said_and_never_invented(grown: Nights, harness: Harness):
    grown.add(0, **LLAMA_CPP | {"model__weights": {"kind": "path", "file": "x.gguf", "synthetic": False}})
    ran = harness("report", grown.root, "--export", "localmaxxing")
    assert ran.err == "harness: hfId is missing in 2 of 2: add the model's name on the Hugging Face hub\n"
    assert all("hfId" not in each and "peakVramGb" not in each for each in documents(ran))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, "4 stack fake is no engine of LocalMaxxing"),
        (
            LLAMA_CPP
            | {"model__weights": {"kind": "synthetic", "file": None, "synthetic": True, "fingerprint": "a"}},
            "4 synthetic weights",
        ),
        (LLAMA_CPP | {"device": "cuda", "machine__gpus": []}, "4 no single GPU known"),
        ({"outcome": "oom", "reason": "out of memory"}, "4 oom"),
    ],
)
def test_what_nobody_can_compare_is_not_submitted(grown: Nights, harness: Harness, changed: Any, why: str):
    grown.add(0, **changed)
    ran = harness("report", grown.root, "--export", "localmaxxing")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"harness: {grown.root}: nothing to export: {why}\n"


@pytest.mark.parametrize("to", ["llm-d", "localmaxxing"])
def test_published_figures_are_no_requests_of_ours(harness: Harness, to: str):
    ran = harness("report", STUDY / "qwen1.5-0.5b", "--export", to)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith("no records of measurements\n")
