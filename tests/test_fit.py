"""`harness fit` on tables of any columns and units, on the logs of other tools, and on what is no log."""

import gzip
import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from conftest import refused
from test_series import drawn

LOGS = Path(__file__).parent / "logs"


def write(path: Path, variants: dict[str, tuple[np.ndarray, np.ndarray]]) -> Path:
    lines = ["variant,n,latency_ms"]
    lines += [
        f'"{name}",{k:.0f},{v:.6f}' for name, (n, ms) in variants.items() for k, v in zip(n, ms, strict=True)
    ]
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_fit_gives_each_variant_of_a_file_with_theory_beside_it(harness, tmp_path):
    log = write(tmp_path / "log.csv.gz", {"q4_0, mine": drawn(staircase=True), "other": drawn(4000, seed=1)})
    asked = ("--model", "qwen1.5-14b", "--machine", "rtx-4090", "--bpw", "q4_0, mine=4.5", "--json")
    mine, other = harness("fit", log, *asked).json
    assert mine["variant"] == "q4_0, mine"
    assert mine["B_ci95_ms"][0] < mine["B_ms"] < mine["B_ci95_ms"][1]
    assert mine["W_ci95"][0] < mine["W_tokens_per_ms"] < mine["W_ci95"][1]
    assert mine["first_token_ms"] == 60
    assert mine["flags"] == []
    active = 13_388_723_200  # without the embedding
    assert mine["B_theory_ms"] == pytest.approx(active * 4.5 / 8 / 1008e9 * 1e3)
    assert mine["B_ratio"] == pytest.approx(mine["B_theory_ms"] / mine["B_ms"])
    assert mine["W_theory"] == pytest.approx(1008e9 / 819_200 / 1e3)
    assert mine["B_as_w16_ms"] == pytest.approx(mine["B_ms"] * 16 / 4.5)
    assert (other["B_theory_ms"], other["B_as_w16_ms"]) == (None, None)  # its bits per weight are not known
    assert [flag["code"] for flag in other["flags"]] == ["early_stop"]
    text = harness("fit", log).out
    assert "staircase" in text
    assert "early_stop: 4000 tokens of 9975" in text


def test_a_segment_that_does_not_rise_is_flat_and_has_no_W(harness, tmp_path):
    n = np.arange(1, 10_000)
    rolled = 5.7 + np.minimum(n, 2048) * 1.4e-3 + np.random.default_rng(4).normal(size=len(n)) * 0.02
    log = write(tmp_path / "log.csv", {"rolled": (n, rolled)})
    lines = harness("fit", log).out.splitlines()
    rising, flat = next(line for line in lines if line.startswith("rolled: mode")).split("; ")
    assert "W 71" in rising
    assert flat.endswith(" ms, flat")
    assert ", flat |" in harness("report", log, "--format", "md").out


def test_a_jump_at_the_same_n_in_two_series_is_a_change_of_kernel_and_no_drift(harness, tmp_path):
    n = np.arange(1, 10_000)
    noise = [np.random.default_rng(seed).normal(size=len(n)) * 0.02 for seed in (0, 1, 2)]
    jumps = (2048, 2048, 5000)
    log = {f"{i}": (n, 12 + n * 1e-3 + 3 * (n > jumps[i]) + noise[i]) for i in range(3)}
    rows = harness("fit", write(tmp_path / "log.csv", log), "--json").json
    codes = [[flag["code"] for flag in row["flags"]] for row in rows]
    no_B = "B_not_identifiable"  # no one line describes them
    assert codes == [["kernel_change", no_B], ["kernel_change", no_B], ["drift", no_B]]


def test_a_variant_that_is_no_series_is_told_and_the_rest_is_analysed(harness, tmp_path):
    n, ms = drawn(600)
    dead = np.concatenate([ms[:500], np.zeros(100)])
    series = {"good": ms, "dead": dead, "odd": -ms, "none": ms * 0}
    log = write(tmp_path / "log.csv", {name: (n, each) for name, each in series.items()})
    with log.open("a") as file:
        file.write("words,1,fast\n")
    ran = harness("fit", log, "--json")
    assert ran.code == 0
    good, died, odd, none, words = ran.json
    assert good["unusable"] is None
    assert died["n_tokens"] == 500
    assert {"died", "early_stop"} <= {flag["code"] for flag in died["flags"]}
    assert "is -60 ms" in odd["unusable"]
    assert "is 0 ms" in none["unusable"]
    assert "not a number" in words["unusable"]
    assert "odd: unusable: the latency at n = 26 is -60 ms" in harness("fit", log).out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "qwen1.5-7b"], "--model and --machine go together"),
        (["--bpw", "b=4"], "unknown variant b; there are a"),
        (["--bpw", "4"], "expected VARIANT=BITS"),
        (["--model", "qwen1.5-7", "--machine", "rtx-4090"], "did you mean qwen1.5-7b"),
        (
            ["--latency-column", "took"],
            "--latency-column took: no such column; it has variant, n, latency_ms",
        ),
        (["--time-column", "t"], "--time-column t: no such column"),
        (["--group-column", "g"], "--group-column g: no such column"),
        (["--time-column", "n", "--latency-column", "n"], "not allowed with argument"),
    ],
)
def test_a_mistake_of_the_command_line_is_one_sentence_and_ends_with_2(harness, tmp_path, arguments, said):
    log = tmp_path / "log.csv"
    log.write_text("variant,n,latency_ms\na,1,2\na,2,2\na,3,2\n")
    ran = harness("fit", log, *arguments)
    assert ran.code == 2
    assert said in ran.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"variant,n,ms\na,1,2\n", "it has no column latency_ms, but variant, n, ms; name one with"),
        (b"variant,n,latency_ms\n", "it has no rows"),
        (bytes(range(256)), "it is not a text file"),
        (b"\x1f\x8b damaged", "it is a damaged gzip file"),
        (b"n,latency_ms\n1,2,3,4\n1,2,3,4,5\n", "it is not a CSV file"),
        (b"n,latency_ms\n1,60,7\n2,12,7\n", "it has lines with more cells than its header"),
        pytest.param(b"n,latency_ms\n" + b"1," * 20_000 + b"\n", "its table is too large", id="long"),
        pytest.param(b"n,latency_ms" + b",x" * 1000 + b"\n1,60\n", "its table is too large", id="wide"),
        (b'{"a": [1, 2', "it is not JSON"),
        (b'{"n": 1, "latency_ms": 1}\n{"n": 2', "line 2 is damaged"),
        (b"[1, 2]", "it is JSON, but not objects"),
        (b"latency_ms\n12\n", "only 1 token; a line needs 3"),
        (b"n,latency_ms\n1,60\n\n2,12\n3,fast\n", "latency_ms in line 5 is 'fast', not a number"),
        (b"n,latency_ms\n1,60\n2,nan\n3,12\n", "latency_ms in line 3 is 'nan', not a number"),
        (b"n,latency_ms\n1,60\n2,\n3,12\n", "latency_ms in line 3 is empty"),
        (b"n,latency_ms\n1,60\n2,-3\n3,12\n", "the latency at n = 2 is -3 ms"),
        (b"n,latency_ms\n1,60\n2,12\n2,12\n", "n does not increase after 2 (line 4); --group-column"),
    ],
)
def test_a_log_that_cannot_be_used_is_one_sentence_and_ends_with_1(harness, tmp_path, content, said):
    log = tmp_path / "log.csv"
    log.write_bytes(content)
    ran = harness("fit", log)
    assert ran.code == 1
    assert said in ran.out + ran.err
    ran = harness("report", log)
    assert (ran.code, ran.out) == (1, "")
    assert said in ran.err
    assert ("--" in ran.err) == ("with `harness fit`" in ran.err)  # options that a report has not


def test_what_is_no_file_is_one_sentence(harness, tmp_path):
    ran = harness("fit", tmp_path)
    assert (ran.code, ran.err) == (1, f"harness: {tmp_path}: it is a folder, not a file\n")
    assert harness("fit", tmp_path / "none.csv").err.endswith("no such file\n")


def test_extra_columns_are_told_and_not_used(harness, tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("variant,when,n,latency_ms\na,x,1,2\na,y,2,3\na,z,3,3\n")
    ran = harness("fit", log, "--json")
    assert ran.json[0]["n_tokens"] == 3
    assert "columns not used: when" in ran.err


# --- columns and units


def table(path: Path, names: str, *columns: object) -> Path:
    rows = zip(*columns, strict=True)  # type: ignore[call-overload]
    path.write_text("\n".join([names, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def figures(ran) -> tuple[float, float]:
    (row,) = ran.json
    return row["B_ms"], row["W_tokens_per_ms"]


MIDNIGHT = datetime(2026, 1, 1, tzinfo=timezone.utc)
TRUTH = (pytest.approx(20, rel=0.01), pytest.approx(1000, rel=0.02))


def test_a_slope_in_too_few_tokens_is_called_too_short(harness, tmp_path):
    rows = [f"{n},{20 + n / 500 + (n % 7) / 100}" for n in range(1, 301)]
    (tmp_path / "log.csv").write_text("\n".join(["n,latency_ms", *rows]))
    out = harness("fit", "log.csv").out
    assert "too short: W needs 2,049 tokens" in out
    assert "W 4" not in out  # nor from a robust line
    assert "not identifiable" not in out


def test_columns_of_any_name_in_any_unit(harness, tmp_path):
    n, ms = drawn()
    for unit, scale in (("s", 1e-3), ("us", 1e3), ("ns", 1e6)):
        named = table(tmp_path / "named.csv", f"n,itl_{unit}", n, ms * scale)
        assert figures(harness("fit", named, "--json")) == TRUTH
        other = table(tmp_path / "other.csv", "n,took", n, ms * scale)
        asked = ("--latency-column", "took", "--unit", unit, "--json")
        ran = harness("fit", other, *asked)
        assert figures(ran) == TRUTH
        assert f"took is in {unit}, as given" in ran.err


@pytest.mark.parametrize(
    ("name", "form", "option"),
    [
        ("at_s", lambda ms: ms / 1e3, []),
        ("at (us)", lambda ms: ms * 1e3, []),
        ("at", lambda ms: 1.7e18 + ms * 1e6, ["--unit", "ns"]),
        ("at", lambda ms: [(MIDNIGHT + timedelta(milliseconds=t)).isoformat() for t in ms], []),
    ],
)
def test_gaps_are_formed_of_timestamps_in_the_unit_that_is_stated(harness, tmp_path, name, form, option):
    n, ms = drawn()
    log = table(tmp_path / "log.csv", f"n,{name}", n, form(np.cumsum(ms)))
    ran = harness("fit", log, "--time-column", name, *option, "--json")
    assert figures(ran) == TRUTH
    assert ran.json[0]["first_token_ms"] is None  # a timestamp does not tell when the request began
    assert ran.json[0]["n_tokens"] == len(n)
    assert ("at is in ns, as given" in ran.err) == bool(option)


@pytest.mark.parametrize("option", ["--time-column", "--latency-column"])
def test_a_unit_that_nothing_states_ends_with_2(harness, tmp_path, option):
    log = table(tmp_path / "log.csv", "at", [1000, 1020, 1040, 1060])
    refused(
        harness("fit", log, option, "at"), "which unit is at in? Its name has none: give --unit s, ms, us"
    )


def test_timestamps_that_go_back_are_no_series(harness, tmp_path):
    log = table(tmp_path / "log.csv", "at", [1000, 1020, 1010, 1030])
    ran = harness("fit", log, "--time-column", "at", "--unit", "ms")
    assert ran.code == 1
    assert "at goes back from 1020 to 1010 in line 4" in ran.out


def test_of_thousands_of_groups_the_first_are_printed_and_the_others_counted(harness, tmp_path):
    names, ms = [f"r{n // 5}" for n in range(5_000)], np.tile([10.0, 11.0, 12.0, 13.0, 14.0], 1_000)
    log = table(tmp_path / "log.csv", "who,latency_ms", names, ms)
    lines = harness("fit", log, "--group-column", "who").out.splitlines()
    assert len(lines) < 400
    assert lines[1].startswith("r0 ")
    assert re.fullmatch(r"960 more variants, 0 unusable, \d+ with warnings: --json has all", lines[-1])


def test_groups_and_tables_of_other_forms(harness, tmp_path):
    n, ms = drawn(600)
    log = table(tmp_path / "log.csv", "who,n,latency_ms", ["a", "b"] * 600, n.repeat(2), ms.repeat(2))
    groups = harness("fit", log, "--group-column", "who", "--json").json
    assert [row["variant"] for row in groups] == ["a", "b"]
    expected = figures(harness("fit", table(log, "n,latency_ms", n, ms), "--json"))
    text = log.read_text()
    rows = [json.dumps({"n": k, "latency_ms": v}) for k, v in zip(n, ms, strict=True)]
    for content in (
        text.replace(",", ";").encode(),
        text.encode("utf-16"),
        gzip.compress(text.encode("utf-8-sig")),
        "\n".join(rows).encode(),
        f"[{','.join(rows)}]".encode(),
        json.dumps({"tool": "mine", "n": [*n], "latency_ms": [*ms]}).encode(),
    ):
        log.write_bytes(content)
        assert figures(harness("fit", log, "--json")) == expected
    (row,) = harness("fit", table(log, "latency_ms", ms), "--json").json
    assert row["last_n"] == len(ms)


# --- logs of other tools


@pytest.mark.parametrize(
    "content",
    [
        '{"itls": 3, "ttfts": null}',
        '{"benchmarks": [{"requests": [1]}]}',
        '{"timings": {}}',
        '{"timings": {"prompt_ms": {}, "predicted_n": 35, "predicted_ms": 700.0}}',
        '{"timings": {"prompt_ms": NaN, "predicted_n": 35, "predicted_ms": 700.0}}',
        pytest.param('{"a": ' + "9" * 5000 + "}", id="digits"),
        pytest.param("data: " + "[" * 100_000, id="nested"),
        pytest.param('[{"\\ud800": "\\udc00"}, {"\\ud800": 2}]', id="half a surrogate pair"),
    ],
)
def test_a_log_that_is_not_as_documented_is_one_sentence(harness, tmp_path, content):
    log = tmp_path / "log.json"
    log.write_text(content)
    ran = harness("fit", log)
    assert ran.code == 1
    assert "Error" not in ran.err
    assert "object" not in ran.err
    assert ran.err.count("\n") == 1


# --- figures that are shown


def table_of(n: list[float], ms: list[float]) -> list[dict[str, float]]:
    return [{"n": at, "latency_ms": each} for at, each in zip(n, ms, strict=True)]


def test_a_position_before_the_first_is_no_point(harness, tmp_path):
    (tmp_path / "log.json").write_text(json.dumps(table_of([-1, 4096, 8192], [4.5, 5, 5.4])))
    (found,) = harness("fit", "log.json", "--json").json
    assert found["unusable"] == "n = -1 is before the first token"
    assert found["B_ms"] is None


def test_a_segment_has_no_b_where_the_b_of_its_series_is_not_known(harness, tmp_path):
    steps = [0.0132 + 0.0001 * (at % 3) for at in range(127)]
    run = {"ttfts": [0.35], "itls": [steps], "input_lens": [8000], "output_lens": [128]}
    (tmp_path / "log.json").write_text(json.dumps(run))
    (found,) = harness("fit", "log.json", "--json").json
    assert found["B_ms"] is None
    (segment,) = found["segments"]
    assert (segment["B_ms"], segment["W_tokens_per_ms"]) == (None, None)


@pytest.mark.parametrize(
    ("unit", "W"),
    [("ms", r" 2\d\d \(2\d\d to 2\d\d\)"), ("s", r" 0\.2\d\d \(0\.2\d\d to 0\.2\d\d\)")],
)
def test_w_has_three_significant_digits_in_any_unit(harness, tmp_path, unit, W):
    n = [64 + 512 * at for at in range(16)]
    ms = [24 + at / 249 + 0.02 * (-1) ** k for k, at in enumerate(n)]
    (tmp_path / "log.json").write_text(json.dumps(table_of(n, ms)))
    ran = harness("fit", "log.json", "--unit", unit)
    assert re.search(W, ran.out)


# --- the page


def test_a_log_becomes_a_page(harness, tmp_path):
    n, ms = drawn()
    log = write(tmp_path / "my log.csv", {"<b>q4</b>": (n, ms), "dead": (n, -ms)})
    assert harness("fit", log, "-o", tmp_path / "page.html").out.endswith(f"{tmp_path / 'page.html'}\n")
    page = (tmp_path / "page.html").read_text()
    assert "Latency against position" in page
    assert "&lt;b&gt;q4" in page
    assert "<b>q4" not in page
    assert "the latency at n = 26 is -60 ms" in page
    ran = harness("report", log)
    assert ran.out == f"{tmp_path / 'reports' / 'my log.html'}\n"
    assert (tmp_path / "reports" / "my log.html").read_text() == page
    assert "1,00" in harness("report", log, "--format", "md").out
    assert harness("report", log, tmp_path).code == 2
    table(log, "latency_ms", ms * 1e-3)
    refused(harness("report", log), "give --unit, with `harness fit`")


def test_what_cannot_be_drawn_is_one_sentence(harness, tmp_path):
    refused(harness("fit", LOGS / "vllm.json", "--png", "figure.png"), "no longer drawn")
    ran = harness("fit", LOGS / "vllm.json", "-o", tmp_path)
    assert ran.code == 1
    assert "cannot be written" in ran.err
