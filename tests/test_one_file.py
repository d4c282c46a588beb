"""A new stack is one file in the folder of runners: planned, run, checked and reported like any other."""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import records_below
from small_checkpoints import made
from test_packed import SMALL

from harness.stacks.header import runners_folder, stacks
from harness.theory.decoder import dense
from runners import worker

RUNNER = '''"""A stack of one file: its logits are a rule, its time is virtual. It needs no library."""
# /// script
# requires-python = ">=3.10"
#
# [tool.harness]
# summary = "a rule instead of a model"
# simulated = true
# weights = "hf"
# named = ["dtype"]
# memory = "transformers"
# reference = { skew = 0.0 }
# published = { fp32 = "rule" }
#
# [[tool.harness.limits]]
# covers = "n_ctx"
# refuses = true
# message = "the rule ends here"
#
# [[tool.harness.context]]
# option = "n_ctx"
# granule = 256
# dry = false
#
# [tool.harness.options.dtype]
# type = "string"
# choices = ["bf16", "fp32"]
# default = "bf16"
# help = "rounding of the logits"
#
# [tool.harness.options.skew]
# type = "float"
# default = 0.0
# help = "how wrong the logits are"
#
# [tool.harness.options.n_ctx]
# type = "int"
# default-from = "tokens"
# help = "tokens it may hold"
#
# [tool.harness.env.cpu]
# device = "cpu"
# ///

import math
import random
import time
from array import array

from runners.protocol import Instruments

DOES_NOT_FIT = (MemoryError,)
STEP_NS = 1_000_000
VOCABULARY = 64
now_ns = time.perf_counter_ns()


def instruments(request):
    return Instruments(lambda: now_ns, lambda: 0, lambda: (0, 0))


def load(request):
    return RuleSession(request.options)


class RuleSession:
    chunk = 64

    def __init__(self, options):
        self.options, self.held = options, 0

    def empty(self, tokens):
        self.held = 0

    def feed(self, ids, keep):
        rows = array("f")
        for token in ids:
            rows.extend(self.logit(token, choice) for choice in range(VOCABULARY))
            self.held += 1
        return rows[-keep * VOCABULARY :]

    def logit(self, token, choice):
        rounding = 1e-3 if self.options["dtype"] == "bf16" else 0.0
        right = math.sin(7 * token + 3 * self.held + choice * choice)
        return right * (1 + rounding * math.cos(choice)) + self.options["skew"] * math.sin(choice)

    def generate(self, prompt, new_tokens):
        global now_ns
        self.empty(len(prompt) + new_tokens)
        logits = self.feed(prompt, 1)
        for _ in range(new_tokens):
            now_ns += STEP_NS + random.randrange(1000)
            token = max(range(VOCABULARY), key=logits.__getitem__)
            yield token
            logits = self.feed([token], 1)
        self.held -= 1

    def counters(self):
        return {"evaluated_tokens": self.held}

    def facts(self):
        return {"versions": {"rule": "1"}, "options": self.options, "kernels": {"rule": 1}}

    def close(self):
        pass
'''


ENGINE = (
    RUNNER.replace('# memory = "transformers"\n', "")
    .replace('# named = ["dtype"]\n', '# named = ["dtype"]\n# made = ["dtype", "skew"]\n')
    .replace("# reference = { skew = 0.0 }\n", "")
    .replace("# published", '# cannot = { dequantize = "a rule has no weights" }\n# published')
    .replace(
        "# [[tool.harness.context]]",
        "# [tool.harness.architectures]\n# qwen2 = []\n#\n# [[tool.harness.context]]",
    )
    .replace(
        "def load(request):\n",
        """def convert(request, say):
    target = Path(request.files["target"])
    target.mkdir()
    (target / "half.bin").write_bytes(b"half")
    if request.options["skew"] == 9.0:
        raise MemoryError("the converter needs more memory than there is")
    if request.options["skew"] == 8.0:
        os.kill(os.getpid(), signal.SIGKILL)
    (target / "rule.bin").write_bytes(request.options["dtype"].encode())
    return {}


def load(request):
    assert (Path(request.files["made"]) / "rule.bin").read_text() == request.options["dtype"]
""",
    )
    .replace("import math\n", "import math\nimport os\n")
    .replace("import random\n", "import random\nimport signal\n")
    .replace("from array import array\n", "from array import array\nfrom pathlib import Path\n")
)


@pytest.fixture
def add_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes the runner into a folder with these other stacks and the modules that all share."""

    def add(*others: str, runner: str = RUNNER) -> None:
        folder = tmp_path / "runners"
        (folder / "stacks").mkdir(parents=True)
        for path in runners_folder().iterdir():
            if path.name != "stacks":
                (folder / path.name).symlink_to(path)
        for path in (runners_folder() / "stacks").glob("*.py"):
            if path.stem not in stacks() or path.stem in others:
                (folder / "stacks" / path.name).symlink_to(path)
        (folder / "stacks" / "rule.py").write_text(runner)
        monkeypatch.setenv("HARNESS_RUNNERS", str(folder))

    return add


@pytest.fixture
def write(real_config: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A config of these variants of a small checkpoint."""
    model = {"name": "small", "weights": str(made(tmp_path / "small", SMALL))}
    return lambda *variants: real_config(*variants, model=model)


def test_a_stack_of_one_file_is_planned_run_checked_and_reported(harness, add_stack, write):
    add_stack()
    right, wrong, short = {"dtype": ["bf16", "fp32"]}, {"name": "wrong", "skew": 5.0}, {"n_ctx": 8}
    path = write(*({"stack": "rule"} | options for options in (right, wrong, short)))
    too_short = "n_ctx 8 does not cover the 65 tokens of prompt and decode"

    plan = harness("run", path, "--dry-run", "--json").json
    assert [row["cell"].split(".")[1:3] for row in plan][:3] == [
        ["rule", n] for n in ("bf16", "fp32", "wrong")
    ]
    assert [row["will_be_refused"] for row in plan] == [[], [], [], [too_short]]
    assert all(row["memory_bytes"] > 285e6 for row in plan)  # of which 272 MiB as for any stack on torch

    ran = harness("run", path, "--json")
    assert ran.code == 1  # for the refused one
    assert [row["status"] for row in ran.json] == ["ok", "ok", "ok", "refused"]
    assert ran.json[0]["B_ms"] == pytest.approx(1.0, abs=0.01)

    checks = harness("run", "--check-weights", path, "--json").json
    verdicts = {check["variant"]: check["verdict"] for check in checks}
    assert verdicts == {"bf16": "agrees", "fp32": "agrees", "wrong": "wrong", "bf16-n_ctx=8": "failed"}
    assert {check["reference"] for check in checks if check["reference"]} == {"rule fp32"}

    rows = harness("report", "results", "--format", "json").json
    latest = {(row["stack"], row["variant"]): row["status"] for row in rows}
    known = {"bf16": "ok", "fp32": "ok", "wrong": "invalid", "bf16-n_ctx=8": "refused"}
    assert latest == {("rule", variant): status for variant, status in known.items()}


def test_a_stack_beside_the_others_changes_nothing_of_theirs(harness, add_stack, write):
    variants = [{"stack": "hf", "cache": "static"}, {"stack": "bnb"}, {"stack": "llamacpp", "quant": "q4_0"}]
    known, before = stacks(), harness("run", "--dry-run", "--json", write(*variants)).json
    add_stack(*known)
    assert {name: header for name, header in stacks().items() if name != "rule"} == known
    after = harness("run", "--dry-run", "--json", write(*variants, {"stack": "rule"})).json
    assert [each["cell"] for each in after[:-1]] == [each["cell"] for each in before]
    assert after[-1]["cell"].startswith("small.rule.bf16.decode.")


def test_an_engines_own_files_are_made_once_of_the_checkpoint_and_hashed(
    harness, add_stack, write, cache, tmp_path
):
    add_stack(runner=ENGINE)
    path = write({"stack": "rule", "dtype": ["bf16", "fp32"]})
    plan = harness("run", path, "--dry-run", "--json").json
    assert ["convert for rule" in each["weights"] for each in plan] == [True, True]
    assert [(each["memory_bytes"], each["seconds"] is None) for each in plan] == [(None, False)] * 2
    ran = harness("run", path, "--json")
    assert (ran.code, [row["status"] for row in ran.json]) == (0, ["ok", "ok"])
    assert ran.err.count("convert small for rule") == 1
    made = [record["model"]["weights"]["made"] for record in records_below(tmp_path / "results")]
    assert {each["bytes"] for each in made} == {8}
    assert len({each["digest"] for each in made}) == 2  # one a type
    assert "convert for rule" not in harness("run", path, "--dry-run", "--wide").out


def test_a_conversion_that_is_cut_off_leaves_nothing_and_files_that_are_damaged_are_made_again(
    harness, add_stack, write, cache, tmp_path
):
    add_stack(runner=ENGINE)
    before = set(cache.glob("weights/*/rule"))
    full, cut = {"name": "full", "skew": 9.0}, {"name": "cut", "skew": 8.0}
    ran = harness("run", write(*({"stack": "rule"} | each for each in ({}, full, cut))), "--json")
    assert [row["status"] for row in ran.json] == ["ok", "error", "error"]
    reasons = {record["variant"]: record.get("reason") for record in records_below(tmp_path / "results")}
    assert "the converter needs more memory than there is" in reasons["full"]
    assert "killed" in reasons["cut"]
    (rule,) = set(cache.glob("weights/*/rule")) - before
    assert not [*cache.glob("weights/*/*partial*")]
    (rule / "rule.bin").write_bytes(b"b")  # cut
    path = write({"stack": "rule"})
    ran = harness("run", path, "--fresh", "--json")
    assert (ran.code, (rule / "rule.bin").read_bytes()) == (0, b"bf16")


def resident(path: Path) -> float:
    """The share of a file's pages that are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        failed = libc.mincore(ctypes.byref(first), ctypes.c_size_t(len(mapped)), pages)
        del first
    assert failed == 0
    return sum(page & 1 for page in pages) / len(pages)


@pytest.mark.skipif(sys.platform != "linux", reason="mincore and fadvise as Linux has them")
def test_files_that_an_engine_maps_are_in_memory_before_tokens_are_timed(tmp_path):
    (file := tmp_path / "weights" / "part").parent.mkdir()
    with file.open("wb") as out:
        out.write(b"x" * (1 << 22))
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(file) == 1:
        pytest.skip("this file system keeps its files in memory")
    worker.read_through(tmp_path)
    assert resident(file) == 1


def test_a_model_that_an_engine_does_not_run_is_said_before_anything_is_made(
    harness, add_stack, real_config, tmp_path
):
    add_stack(runner=ENGINE)
    llama = made(tmp_path / "small", dense("llama", 64, 64, 1, 96, 2, 1, 32))
    path = real_config({"stack": "rule"}, model={"name": "small", "weights": str(llama)})
    why = f"{llama}: is llama, which stack rule does not run; it runs qwen2"
    assert why in harness("run", path, "--dry-run").words
    harness("run", path)
    (record,) = records_below(tmp_path / "results")
    assert (record["outcome"], record["reason"]) == ("unavailable", why)
