"""`harness bisect`: the version or the option that made the difference, by the real command on the fake
stack; its search on figures made here."""

import functools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from conftest import Ran, refused, stored_in
from packaging.version import Version
from test_env_build import wheel

from harness.analysis import bisection
from harness.analysis.bisection import BETWEEN, CHANGED, FAILED, SAME, UNCLEAR, Found, Pair
from harness.base import bounds
from harness.stacks import versions

ROOT = Path(__file__).parent.parent
VERSIONS = [f"1.{minor}" for minor in range(12)]
# The fake's clock is virtual: two rounds tell 20% from none on any machine.
QUICK = ("--max-rounds", "2", "--threshold", "10%")


# The search, on figures made here.


class Made:
    """Versions with these costs, measured with normal noise of this standard deviation. `broken`: those that
    fail. `rounds`: of the pairs that were measured."""

    def __init__(self, costs: list[float], noise: float = 0.005, broken: tuple[int, ...] = ()) -> None:
        self.costs, self.noise, self.broken = costs, noise, broken
        self.rounds: dict[tuple[int, int], int] = {}
        self.kept: dict[tuple[int, int], list[float]] = {}
        self.chance = np.random.default_rng(11)

    def measure(self, base: int, new: int, enough: bisection.Enough) -> Pair:
        if {base, new} & {*self.broken}:
            return Pair(base, new, (), "crash")
        differences = self.kept.setdefault((base, new), [])
        while not (differences and enough(differences)) and len(differences) < 100:
            change = self.costs[new] - self.costs[base]
            differences.append(change + float(self.chance.normal(0, self.noise * 2**0.5)))
        self.rounds[base, new] = len(differences)
        return Pair(base, new, differences)

    def search(self) -> Found:
        return bisection.search(len(self.costs) - 1, self.measure, 0.01, 100)


def places(found: Found) -> tuple[int, int]:
    assert found.answer is not None
    return found.answer.base, found.answer.new


@pytest.mark.parametrize("size", [0.08, -0.08, 0.02])
@pytest.mark.parametrize("at", range(1, 12))
def test_a_change_is_found_at_each_of_twelve_versions(at, size):
    made = Made([0.0] * at + [size] * (12 - at))
    found = made.search()
    assert places(found) == (at - 1, at)
    assert found.answer.verdict == CHANGED
    assert found.answer.change().cost == pytest.approx(size, abs=abs(size) / 4)
    assert found.rest is None
    assert len(made.rounds) <= 6  # the ends, four to halve eleven places, and the step


def test_without_a_difference_of_the_ends_nothing_between_is_measured():
    made = Made([0.0, 0.5, 0.5, 0.0])
    found = made.search()
    assert (found.answer, found.pairs[0].verdict) == (None, SAME)
    assert [*made.rounds] == [(0, 3)]


def test_ends_that_noise_hides_are_unclear_and_not_bisected():
    found = Made([0.0, 0.02, 0.02], noise=0.2).search()
    assert (found.answer, found.pairs[0].verdict) == (None, UNCLEAR)
    assert len(found.pairs) == 1


def test_a_version_near_half_is_measured_longer_than_one_that_is_clear():
    made = Made([0.0, 0.0, 0.0, 0.065, 0.1, 0.1], noise=0.02)
    assert places(made.search()) == (2, 3)
    assert made.rounds[0, 3] > made.rounds[0, 2] >= 8


@pytest.mark.parametrize("at", range(1, 12))
def test_versions_that_fail_are_passed_over_and_the_answer_may_be_a_range(at):
    found = Made([0.0] * at + [0.08] * (12 - at), broken=(5, 6)).search()
    low, high = places(found)
    assert (low, high) == {5: (4, 7), 6: (4, 7), 7: (4, 7)}.get(at, (at - 1, at))
    if at in (5, 6, 7):
        assert {pair.new for pair in found.pairs if pair.verdict == FAILED} == {5, 6}


def test_a_version_that_stays_unclear_is_not_guessed():
    noisy = Made([0.0, 0.0, 0.0, 0.1, 0.1])
    plain = noisy.measure

    def measure(base: int, new: int, enough: bisection.Enough) -> Pair:
        if (base, new) != (0, 2):
            return plain(base, new, enough)
        assert not enough([0.3, -0.2] * 32)  # as wide as can be: another round is due
        return Pair(base, new, [0.3, -0.2] * 32)

    found = bisection.search(4, measure, 0.01, 100)
    assert places(found) == (1, 3)
    assert [pair.new for pair in found.pairs if pair.verdict == UNCLEAR] == [2]


@pytest.mark.parametrize(
    ("costs", "step", "rest"),
    [
        ([0.0, 0.0, 0.07, 0.07, 0.07, 0.1, 0.1], (1, 2), 0.03),
        ([0.0, 0.0, 0.05, 0.05, 0.05, 0.1, 0.1], (1, 2), 0.05),  # half of it: BETWEEN, which is measured
        ([0.0, 0.0, 0.15, 0.15, 0.15, 0.1, 0.1], (1, 2), -0.05),
    ],
)
def test_a_difference_of_several_steps_is_not_reported_as_one(costs, step, rest):
    found = Made(costs, noise=0.003).search()
    assert places(found) == step
    assert found.rest == pytest.approx(rest, abs=0.01)
    assert any(pair.verdict == BETWEEN for pair in found.pairs) == (rest == 0.05)


def test_a_version_at_half_of_the_change_is_seldom_taken_for_an_end():
    verdicts = []
    for seed in range(60):
        made = Made([0.0, 0.05, 0.1], noise=0.04)
        made.chance = np.random.default_rng(seed)
        verdicts.append(made.search().pairs[1].verdict)
    assert sum(verdict in (bisection.GOOD, bisection.BAD) for verdict in verdicts) <= 3  # of 99% intervals


# The versions of an index.


def test_versions_come_from_wheels_and_sources_without_yanked_ones(tmp_path, monkeypatch):
    wheel(tmp_path, "tiny_speed", {}, "2.0rc1")
    wheel(tmp_path, "tiny_speed_more", {}, "9.0")
    page = {
        "files": [
            {"filename": "tiny_speed-1.10.tar.gz"},
            {"filename": "tiny_speed-1.9-py3-none-any.whl", "yanked": False},
            {"filename": "tiny_speed-1.8-py3-none-any.whl", "yanked": "broken"},
            {"filename": "no version"},
        ]
    }
    html = '<a href="x">tiny_speed-1.7.tar.gz</a> <A data-yanked="" href="y">tiny_speed-1.6.tar.gz</A>'
    answers = {"/a/tiny-speed/": (json.dumps(page), "application/vnd.pypi.simple.v1+json")}
    answers["/b/tiny-speed/"] = html, "text/html"

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text, kind = answers.get(self.path, ("", ""))
            allowed = self.headers["Authorization"] == "Basic bmFtZTp3b3Jk" or self.path[:2] != "/b"
            self.send_response(200 if text and allowed else 404)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(Index) as address:
        private = address.replace("//", "//name:word@")
        variables = {"UV_FIND_LINKS": str(tmp_path), "UV_DEFAULT_INDEX": f"{address}/none"}
        variables |= {"UV_INDEX": f"own={address}/a", "UV_EXTRA_INDEX_URL": f"{private}/b/"}
        found = versions.offered("tiny-speed", variables)
    assert found == [Version(each) for each in ("1.7", "1.9", "1.10", "2.0rc1")]


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of an HTTP server of this handler."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


# The command, on a stack of its own: the fake, as slow as its package tiny-speed says.


class Folders(SimpleHTTPRequestHandler):
    """A folder for each project is an index: what http.server lists is a page of PEP 503."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of tiny-speed in an index, and the stack `tiny` that needs it."""
    for name, folder in (("HARNESS_CACHE", "cache"), ("HARNESS_RUNNERS", "runners"), ("UV_CACHE_DIR", "uv")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    shutil.copytree(ROOT / "runners", tmp_path / "runners", ignore=shutil.ignore_patterns("__pycache__"))
    text = (tmp_path / "runners" / "stacks" / "fake.py").read_text()
    text = text.replace("# dependencies = []", '# dependencies = ["tiny-speed==1.0"]')
    text = text.replace("\nimport ctypes\n", "\nimport ctypes\n\nimport tiny_speed\n", 1)
    text = text.replace('float(os.environ.get("HARNESS_FAKE_SLOWER", "1"))', "tiny_speed.SLOWER")
    (tmp_path / "runners" / "stacks" / "tiny.py").write_text(text)
    (folder := tmp_path / "index" / "tiny-speed").mkdir(parents=True)
    with serving(functools.partial(Folders, directory=folder.parent)) as address:
        for name, value in (("UV_DEFAULT_INDEX", address), ("UV_FIND_LINKS", ""), ("NO_PROXY", "127.0.0.1")):
            monkeypatch.setenv(name, value)
        yield folder


def offer(folder: Path, **slower: float | None) -> None:
    """Put 12 versions into the index, as slow as the latest of `v1_7=1.2` before them; null: one whose
    wheel is no wheel."""
    speed = 1.0
    for version in VERSIONS:
        given = slower.get(f"v{version.replace('.', '_')}", speed)
        speed = speed if given is None else given
        made = wheel(folder, "tiny_speed", {"tiny_speed.py": f"SLOWER = {speed}\n"}, version)
        if given is None:
            made.write_bytes(b"no wheel")


@pytest.fixture
def bisect(harness, real_config, index) -> Callable[..., Ran]:
    cells = real_config({"stack": "tiny"}, new_tokens=20, warmup={"at_least_s": 0})

    def run(good: str, bad: str, *more: str) -> Ran:
        return harness("bisect", f"tiny-speed=={good}", f"tiny-speed=={bad}", cells, *more)

    return run


def answer_of(ran: Ran) -> dict:
    (found,) = (row for row in ran.json if row["answer"])
    return found


def test_the_version_is_named_with_its_change_and_every_repeat_is_a_record(bisect, index, tmp_path):
    offer(index, v1_7=1.25)
    wheel(index, "tiny_speed", {"tiny_speed.py": "SLOWER = 9"}, "1.7rc1")
    ran = bisect("1.0", "1.11", *QUICK)
    assert ran.code == 0, ran.err
    *pairs, answer = ran.out.splitlines()
    assert answer.startswith("slower since 1.7: tok/s -20.")
    assert answer.endswith(", 2 rounds counted, between 1.6 and 1.7")
    assert [line.partition(":")[0] for line in pairs][:2] == ["1.0 -> 1.11", "1.0 -> 1.5"]
    stored = [each.record for each in stored_in(tmp_path / "results")]
    assert len(stored) == 4 * len(pairs)
    locks = {(result["campaign"]["side"], *result["environment"]["lock"]) for result in stored}
    assert {("A", "tiny-speed==1.0"), ("A", "tiny-speed==1.6"), ("B", "tiny-speed==1.7")} <= locks
    assert not any("rc" in lock for _, lock in locks)
    # The same again takes what is measured, and no more.
    again = bisect("1.0", "1.11", *QUICK)
    assert again.out == ran.out
    assert len(stored_in(tmp_path / "results")) == len(stored)


def test_the_newer_version_may_be_the_good_one_and_other_packages_that_differ_are_named(bisect, index):
    offer(index, v1_7=0.8)
    (index.parent / "tiny-deep").mkdir()
    wheel(index.parent / "tiny-deep", "tiny_deep", {}, "3.0")
    wheel(index, "tiny_speed", {"tiny_speed.py": "SLOWER = 0.8\n"}, "1.7", "Requires-Dist: tiny-deep\n")
    ran = bisect("1.11", "1.0", *QUICK, "--versions", "1.6,1.7", "--json")
    assert ran.code == 0, ran.err
    answer = answer_of(ran)
    assert (answer["base"], answer["new"], answer["verdict"]) == ("1.7", "1.6", "CHANGED")
    assert answer["change"] == pytest.approx(-0.2, abs=0.01)
    assert "slower since 1.6: " in ran.err
    assert ", between 1.7 and 1.6; other packages differ too: tiny-deep 3.0 -> -\n" in ran.err


def test_a_version_that_cannot_be_built_makes_the_answer_a_range_with_the_reason(bisect, index):
    offer(index, v1_7=None, v1_8=1.25)
    ran = bisect("1.5", "1.9", *QUICK)
    assert ran.code == 1, ran.err
    answer = ran.out.splitlines()[-1]
    assert answer.startswith("slower between 1.6 and 1.8, not known where: tok/s -20.")
    assert "; 1.7: not measured: with 1.7 2 of 2 repeats: unavailable (environment tiny/cpu could" in answer
    offer(index, v1_8=1.25)
    again = bisect("1.5", "1.9", *QUICK)
    assert again.code == 0, again.err
    assert again.out.splitlines()[-1].endswith(", between 1.7 and 1.8")


def test_versions_that_are_equally_fast_end_the_search(bisect, index, tmp_path):
    offer(index)
    ran = bisect("1.0", "1.11", *QUICK)
    assert (ran.code, ran.out.count("\n")) == (0, 2)
    assert "nothing to find: no change of 10%: tok/s " in ran.out
    assert len(stored_in(tmp_path / "results")) == 4


def test_a_version_that_is_not_the_one_named_is_refused(bisect, index, harness, tmp_path):
    offer(index, v1_7=1.25)
    assert bisect("1.0", "1.7", "--dry-run").out.split() == VERSIONS[:8]
    assert harness("env", "create", "tiny").code == 0
    (found,) = (tmp_path / "cache" / "envs").glob("tiny-cpu-*/complete.json")
    found.write_text(found.read_text().replace("tiny-speed==1.0", "tiny-speed==1.3"))
    ran = bisect("1.0", "1.7", *QUICK)
    assert ran.code == 1
    assert "tiny-speed==1.0 was to be measured, and 1.3 ran: " in ran.err


@pytest.mark.parametrize(
    ("good", "bad", "options", "message"),
    [
        ("tiny-speed==1.0", "tiny-speed==1.0.0", [], "GOOD and BAD are the same version, 1.0"),
        (
            "tiny-speed==1.0",
            "tiny-speed==1.99",
            [],
            "tiny-speed has no version 1.99; there are 12, the newest 1.11",
        ),
        ("tiny-speed==1.0", "tiny-speed==new", [], "new: is no version, as 1.2.3 is"),
        ("tiny-speed==1.0", "tiny==1.1", [], "GOOD is of tiny-speed and BAD of tiny: name one package"),
        ("torch==1.0", "torch==1.1", [], "torch==1.0: the cell has no such package; it has tiny-speed"),
        ("tiny-speed==1.0", "threads=4", [], "GOOD and BAD must both be versions"),
        ("tiny-speed", "tiny-speed==1.0", [], "GOOD and BAD must both be versions"),
        ("tiny-speed", "1.0", [], "tiny-speed: must be NAME==VERSION, or options as in threads=4"),
        ("threads=4", "threads=4", [], "GOOD and BAD are the same options"),
        ("threads=4", "thread=2", [], "thread=2: thread: unknown key; did you mean threads?"),
        ("threads=4", "threads=2", ["--versions", "1.0"], "--versions is for versions"),
        ("tiny-speed==1.0", "tiny-speed==1.4", ["--versions", "1.2,1.5"], "--versions 1.5: does not lie be"),
        ("tiny-speed==1.0", "tiny-speed==1.4", ["--set", "variants.0.quant=[f16, q8_0]"], "2 cells; bisect"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_measured(
    harness, real_config, index, tmp_path, good, bad, options, message
):
    offer(index)
    refused(harness("bisect", good, bad, real_config({"stack": "tiny"}), *options), message)
    assert not (tmp_path / "results").exists()


def test_an_index_that_does_not_answer_is_one_sentence(bisect, index, monkeypatch):
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://name:word@127.0.0.1:9/simple")
    refused(bisect("1.0", "1.7"), "the index cannot be read: http://***@127.0.0.1:9/simple/tiny-speed/: ")


def test_a_page_of_an_index_has_bytes_at_most(index, monkeypatch):
    monkeypatch.setattr(bounds, "PACKAGES_BYTES", 20)
    with pytest.raises(versions.NotListed, match=r"cannot be read: .*it sends more than 0 MB"):
        versions.offered("tiny-speed", {"UV_DEFAULT_INDEX": os.environ["UV_DEFAULT_INDEX"]})


def test_of_options_the_one_that_made_the_difference_is_named(harness, config, tmp_path):
    good = "variants.0.prefill_ms=1.0,variants.0.B_ms=3.0,variants.0.spike_every=0"
    bad = "variants.0.prefill_ms=1.1,variants.0.B_ms=4.0,variants.0.spike_every=0,variants.0.load_ms=1"
    ran = harness("bisect", good, bad, config({"clock": "virtual"}), *QUICK)
    assert ran.code == 0, ran.err
    answer = ran.out.splitlines()[-1]
    assert answer.startswith("slower since variants.0.B_ms=4.0: tok/s -2")
    assert "between variants.0.prefill_ms=1.1 variants.0.B_ms=3.0 and variants.0.prefill_ms=1.1 " in answer


def test_the_same_command_goes_on_where_it_ended(harness, config, tmp_path):
    given = ("bisect", "B_ms=3.0", "B_ms=4.0", config({"clock": "virtual"}), "--threshold", "10%")
    for most, rounds in ((2, 2), (3, 3), (2, 3)):
        assert harness(*given, "--max-rounds", str(most)).code == 0
        stored = stored_in(tmp_path / "results")
        placed = [
            (result.record["campaign"]["side"], result.record["campaign"]["round"]) for result in stored
        ]
        assert sorted(placed) == [(side, at) for side in "AB" for at in range(1, rounds + 1)]


def test_an_end_that_fails_is_named_with_the_reason_and_tried_again(harness, config, tmp_path):
    for records in (4, 8):
        ran = harness("bisect", "B_ms=3.0", "die_at_token=5", config({"clock": "virtual"}), *QUICK)
        assert ran.code == 1
        assert "not measured: with die_at_token=5 2 of 2 repeats: crash" in ran.out
        assert ran.out.endswith("GOOD and BAD are not compared: no round of both counts\n")
        assert len(stored_in(tmp_path / "results")) == records


def test_disturbed_repeats_give_a_provisional_answer_where_they_count(harness, config, tmp_path, monkeypatch):
    (tmp_path / "disturbed").write_text("99")
    monkeypatch.setenv("HARNESS_FAKE_DISTURBED", str(tmp_path / "disturbed"))
    given = ("bisect", "B_ms=3.0", "B_ms=4.0", config({"clock": "virtual"}), *QUICK)
    quiet = harness(*given)
    assert (
        quiet.code,
        "GOOD and BAD are not compared: no round of both counts; harness doctor" in quiet.out,
    ) == (1, True)
    ran = harness(*given, "--busy")
    assert ran.code == 1
    assert ran.out.splitlines()[-1].startswith("provisional: slower since B_ms=4.0: tok/s -2")
