"""The runners' work for a GPU, tested on a CPU: a stand-in plays the card."""

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Ran, told
from test_hf import request_of, said
from test_llamacpp import request_of as of_llamacpp

from harness.stacks import build
from harness.stacks.header import stacks
from runners.protocol import Done, Loaded, Request

CONVERTS = (
    "no FlashAttention vector kernel compiled for K/V types q8_0-f16, converting K and V to f16 instead"
)
GRAPH = (
    "sched_reserve: graph (pp bs=512, tg bs=1): nodes = 900 / 890, splits = 50 / 26, input objects = 5 / 5"
)


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({}, "expandable_segments:False"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
    ],
)
def test_importing_gptqmodel_changes_no_setting_of_the_allocator(gptqm_interpreter, variables, settings):
    code = f"""
import os
os.environ.update({variables})
import runners.stacks.gptqm
print(os.environ["PYTORCH_ALLOC_CONF"])
"""
    assert told(gptqm_interpreter, code)[-1] == settings


def test_a_probe_that_measures_compiles_no_kernel(worker, gptqm_interpreter):
    options = {"measure": ["read"], "threads": 1, "working_set_bytes": 64 << 20}
    request = Request("probe", "gptqm", "cpu", {"name": "none", "path": None, "shape": None}, options)
    done = worker(request, gptqm_interpreter)[-1]
    assert isinstance(done, Done), done
    assert "kernels" in done.facts["read"]
    assert "kernels" not in done.facts


def test_a_kernel_that_needs_a_download_is_reported_so_and_nothing_is_downloaded(gptqm_interpreter):
    code = """
import os, tempfile, urllib.request
os.environ["GPTQMODEL_CACHE_DIR"] = tempfile.mkdtemp()
urllib.request.urlopen = print
from runners.stacks import gptqm
from gptqmodel.utils.machete import _ensure_cutlass_source

class OnHopper(gptqm.BaseQuantLinear):
    @classmethod
    def validate(cls, **settings):
        return True, _ensure_cutlass_source()

print(gptqm._refusal(OnHopper, gptqm.torch.device("cpu")))
"""
    assert told(gptqm_interpreter, code)[-1].startswith("needs a download, CUTLASS, and no worker downloads")


def test_memory_that_runs_out_where_the_device_is_waited_for_is_a_memory_error(hf_interpreter):
    code = """
from runners.hf import device as torch_device
from runners.hf.session import HfSession

class Late:
    def __getitem__(self, place):
        return self
    def max(self, dim):
        raise RuntimeError("CUDA error: out of memory\\nCUDA kernel errors might be reported later")

session = HfSession.__new__(HfSession)
session._clock = session._allocator = session._stepping = session._fixed = None
session._logits = Late()
try:
    next(session._steps(25, 2))
except MemoryError as failure:
    print(failure)
"""
    assert told(hf_interpreter, code) == ["CUDA error: out of memory"]


def test_transformers_takes_steps_at_each_doubling_and_at_the_last_position(
    checkpoint, hf_interpreter, tmp_path
):
    code = f"""
from pathlib import Path
from runners.stacks import hf
from runners.protocol import Request

session = hf.load(Request.read(Path({str(tmp_path / "request.json")!r})))
model, before = session.model, []

def step(**inputs):
    before.append(session.held())
    return model(**inputs)

session.empty(0)
session._forward(model, session._tensor([7]), 1)
session._stepping = step
session.rehearse()
print(before, session.held())
keys, _ = session._context.keep()[0]
print(bool((keys[:, :, 1:99] == keys[:, :, :1]).all()))
"""
    request_of(checkpoint("tiny-llama"), n_ctx=100).write(tmp_path / "request.json")
    assert told(hf_interpreter, code)[-2:] == ["[32, 64, 99] 100", "True"]


@pytest.mark.parametrize(("job", "positions"), [("generate", [32, 64, 99]), ("fit", [])])
def test_llama_cpp_takes_steps_at_each_doubling_and_at_the_last_position(
    harness, llamacpp_interpreter, tmp_path, job, positions
):
    code = f"""
from pathlib import Path
from runners.stacks import llamacpp
from runners.llamacpp.lib import lib
from runners.protocol import Request

lib.llama_supports_gpu_offload = lambda: True
decode, positions = lib.llama_decode, []

def noted(context, batch):
    positions.extend([batch.pos[0]] if batch.n_tokens == 1 else [])
    return decode(context, batch)

lib.llama_decode = noted
session = llamacpp.load(Request.read(Path({str(tmp_path / "request.json")!r})))
print(positions, session.held(), session.evaluated())
"""
    path = Path(harness("env", "synth", "tiny-qwen2", "--quant", "q8_0").out.strip())
    replace(of_llamacpp(path, job, n_ctx=100), device="GPU-stand-in").write(tmp_path / "request.json")
    assert told(llamacpp_interpreter, code) == [f"{positions} 0 0"]


def test_llama_cpp_reports_the_splits_of_its_graph(worker, harness, llamacpp_interpreter):
    path = Path(harness("env", "synth", "tiny-qwen2", "--quant", "q8_0").out.strip())
    events = worker(of_llamacpp(path), llamacpp_interpreter)
    facts = next(event.facts for event in events if isinstance(event, Loaded))
    assert (facts["graph_splits"], facts["warnings"]) == ({"prompt": 1, "step": 1}, [])


def test_what_cuda_s_flash_attention_converts_is_in_the_record(llamacpp_interpreter):
    code = f"""
from runners.llamacpp.lib import LOG
for level, line in ((2, {GRAPH!r}), (3, "ggml_cuda_flash_attn_ext_vec: " + {CONVERTS!r})):
    LOG._hear(level, line.encode() + b"\\n", None)
print(LOG.splits)
print(*LOG.warnings)
"""
    splits, warning = told(llamacpp_interpreter, code)
    assert splits == "{'prompt': 50, 'step': 26}"
    types = "K of type q8_0 with V of type f16"
    assert warning == f"no FlashAttention kernel for {types}: each step converts both to f16"


def test_cuda_graphs_that_are_left_out_are_counted_and_a_warning(checkpoint, hf_interpreter, tmp_path):
    code = f"""
from pathlib import Path
from runners.stacks import hf
from runners.hf import device as torch_device
from runners.protocol import Request

torch_device.compile_mode = lambda device, static: torch_device.GRAPHS  # a CPU has none: all are left out
session = hf.load(Request.read(Path({str(tmp_path / "request.json")!r})))
for fed in range(2):
    facts = session.facts()
    print(facts["settings"]["cudagraph_skips"], *facts["warnings"])
    session.feed([fed], 1)
"""
    request_of(checkpoint("tiny-qwen2"), cache="static", compile=True).write(tmp_path / "request.json")
    before, after = told(hf_interpreter, code)[-2:]
    assert before == "0"
    assert after.startswith("1 torch.compile left out CUDA graphs")


def test_without_cuda_graphs_none_is_counted(worker, checkpoint, hf_interpreter):
    loaded, _, _ = said(worker(request_of(checkpoint("tiny-qwen2")), hf_interpreter))
    assert (loaded["settings"]["cudagraph_skips"], loaded["warnings"]) == (None, [])


@pytest.mark.parametrize(
    ("stack", "environment", "python", "chosen"),
    [
        ("hf", "cpu", "3.10.14", ">=3.11,<3.14"),
        ("hf", "cuda", "3.14.0", ">=3.11,<3.14"),
        ("bnb", "cuda", "3.14.0", ">=3.11,<3.14"),
        ("gptqm", "cuda", "3.14.0", ">=3.11,<3.14"),
        ("gptq", "cuda", "3.12.3", ">=3.10,<3.12"),
        ("autoawq", "cuda", "3.13.1", ">=3.10,<3.13"),
        ("autoawq", "cuda", "3.12.3", None),
        ("hf", "cuda", "3.13.1", None),
    ],
)
def test_another_python_is_looked_for_where_a_stack_s_packages_have_none_for_ours(
    monkeypatch, stack, environment, python, chosen
):
    monkeypatch.setattr("platform.python_version", lambda: python)
    found = build._python_for(stacks()[stack].environments[environment])
    assert found == chosen or (chosen is None and Path(found).exists())


def test_a_card_newer_than_a_stack_was_compiled_for_is_known_before_it_runs(harness, real_config, tmp_path):
    variants = [{"stack": "gptq", "kernel": "torch"}, {"stack": "autoawq"}, {"stack": "gptqm"}]
    too_new = ["compute capability 12.0; less than 10.0 is needed"]
    for gpu, reasons in (("RTX 5090", too_new), ("RTX 4090", [])):
        path = real_config(*variants, model={"shape": "qwen1.5-4b"}, device="cuda", gpu=gpu)
        lines: Ran = harness("run", path, "--dry-run", "--json", HARNESS_CACHE=str(tmp_path / "empty"))
        assert [line["will_fail"] for line in lines.json] == [reasons, reasons, []]
