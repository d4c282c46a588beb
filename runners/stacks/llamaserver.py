"""llama.cpp's own server, started here and measured over HTTP as its clients see it."""
# /// script
# requires-python = ">=3.10"
# dependencies = ["httpx==0.28.1", "xllamacpp==2026.10.11549"]
#
# [tool.harness]
# summary = "llama-server on loopback (xllamacpp's wheels): what serving adds to llama.cpp"
# weights = "gguf"
# several_users = true
# named = ["quant"]
# memory = "llama.cpp"
# jobs_of = "llamacpp"
#
# [tool.harness.cannot]
# logits = "a server gives no logits"
# context = "a server shows no pass over a prompt, only tokens: depth and turns send prompts and time those"
# max_ctx = "a server fills no context step by step: search with llamacpp, which has the same cache"
# ids = "llama.cpp's server makes text of its tokens"
#
# [[tool.harness.context]]
# option = "n_ctx"
# granule = 256
# dry = false
#
# [[tool.harness.limits]]
# when = { flash_attn = false, type_v = ["q8_0", "q5_0", "q5_1", "q4_0", "q4_1"] }
# never = true
# message = "quantized V cache requires flash_attn to be enabled"
#
# [[tool.harness.limits]]
# when = { speculate = "draft", draft = "" }
# never = true
# refuses = true
# message = "speculate: draft needs draft, the path of the draft model's GGUF"
#
# [[tool.harness.limits]]
# when = { speculate = ["none", "ngram", "mtp"] }
# unless = { draft = "" }
# never = true
# refuses = true
# message = "only speculate: draft has a draft model"
#
# [[tool.harness.limits]]
# when = { speculate = "none" }
# unless = { accept = 0.0 }
# never = true
# refuses = true
# message = "accept needs speculate: without it nothing is guessed"
#
# [tool.harness.options.quant]
# type = "string"
# choices = [
#   "f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "q2_k", "q3_k_s", "q3_k_m", "q3_k_l",
#   "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "mxfp4_moe", "q2_k_s", "iq1_s", "iq1_m", "iq2_xxs",
#   "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "iq3_s", "iq3_m", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0",
# ]
# help = "type of the weights, as llama-quantize names it; default: whatever the file holds"
#
# [tool.harness.options.threads]
# type = "int"
# minimum = 1
# maximum = 512  # GGML_MAX_N_THREADS; more is an abort
# default-from = "threads"
# help = "CPU threads, for prompt and decode alike"
#
# [tool.harness.options.n_ctx]
# type = "int"
# minimum = 1
# maximum = 2147483392  # positions are int32
# default-from = "tokens"
# help = "KV cells of all slots together, in multiples of 256 each; default: prompt + new tokens of all users"
#
# [tool.harness.options.n_batch]
# minimum = 1
# default = 512
# help = "most prompt tokens in one llama_decode"
#
# [tool.harness.options.n_ubatch]
# minimum = 1
# default = 512
# help = "most prompt tokens in one pass over the weights"
#
# # As in llamacpp: auto may silently differ between two builds.
# [tool.harness.options.flash_attn]
# default = false
# help = "flash attention, on or off"
#
# [tool.harness.options.type_k]
# choices = ["f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1"]
# default = "f16"
# help = "type of the K cache"
#
# [tool.harness.options.type_v]
# choices = ["f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1"]
# default = "f16"
# help = "type of the V cache; a quantized one needs flash_attn"
#
# [tool.harness.options.mmap]
# default = true
# help = "map the file instead of reading it into memory"
#
# [tool.harness.options.speculate]
# choices = ["none", "draft", "ngram", "mtp"]
# default = "none"
# help = "what guesses tokens ahead: a draft model, the text so far (ngram-simple), or MTP heads in the file"
#
# [tool.harness.options.draft]
# type = "path"
# default = ""
# help = "the draft model's GGUF: absolute, from ~, or relative to the config"
#
# [tool.harness.options.draft_tokens]
# type = "int"
# minimum = 1
# maximum = 512
# help = "most tokens guessed at once; default: llama.cpp's own, 3 (ngram: 48)"
#
# # llama.cpp's synth_len: each guess is right with the probability that gives this mean.
# [tool.harness.options.accept]
# minimum = 0
# default = 0.0
# help = "synthetic acceptance: so many tokens a pass on average, whatever they are; 0: those that are right"
#
# [tool.harness.env.cpu]
# device = "cpu"
# ///

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import xllamacpp

from runners.protocol import Request, Say
from runners.served.client import Client, ServerError
from runners.served.session import ServedSession

DOES_NOT_FIT: tuple[type[BaseException], ...] = (MemoryError,)
LOOPBACK = "127.0.0.1"
CONTEXT = 256  # of a server that only tokenizes; llama.cpp allocates no less
# What the server calls each choice of `speculate`.
SPECULATIONS = {"none": "none", "draft": "draft-simple", "ngram": "ngram-simple", "mtp": "draft-mtp"}


class OwnServer(ServedSession):
    """A session of a server in this process, which ends with it. Its threads, memory and page faults are this
    process's; the client is one more thread of it."""

    elsewhere = False

    def __init__(self, request: Request) -> None:
        self._server = xllamacpp.Server(_params(request))
        options = {**request.options, "api": "llama-server"}
        super().__init__(Client(self._server.listening_address), options, prompt_is_here=True)

    def facts(self) -> dict[str, Any]:
        found = super().facts()
        found["versions"]["xllamacpp"] = importlib.metadata.version("xllamacpp")
        ran = found["served"]["speculation"]
        found["options"]["n_ctx"] = found["holds_tokens"] * found["served"]["slots"]
        found["options"]["speculate"] = {SPECULATIONS[each]: each for each in SPECULATIONS}.get(ran, ran)
        if draft := self._options["draft"]:
            found["draft_model_bytes"] = Path(draft).stat().st_size
        return found


def load(request: Request) -> OwnServer:
    """Start the server, and wait until it has loaded the model. Raises RuntimeError with its reason."""
    return OwnServer(request)


def tokenize(request: Request, say: Say) -> dict[str, Any]:
    """The ids of workloads[0]["text"], nothing added, and the BOS that the vocabulary puts in front of a text
    (None: none). Raises ServerError for a model without a vocabulary."""
    params = _quiet_params(request)
    params.n_ctx, params.n_parallel = CONTEXT, 1
    params.warmup, params.no_extra_bufts = False, True  # the weights are mapped, never read or repacked
    server = xllamacpp.Server(params)
    client = Client(server.listening_address)

    def ids(**special: bool) -> list[int]:
        answer = client.found("/tokenize", {"content": request.workloads[0]["text"], **special})
        if not answer or not answer.get("tokens"):
            raise ServerError("the server returns no ids for a text")
        return [int(each) for each in answer["tokens"]]

    alone, whole = ids(add_special=False), ids(add_special=True)
    return {"ids": alone, "bos": whole[0] if whole[1 : 1 + len(alone)] == alone else None}


def _quiet_params(request: Request) -> xllamacpp.CommonParams:
    """Of any server: on loopback, and without what would change the request."""
    params = xllamacpp.CommonParams()
    params.model.path = request.model["path"]
    params.hostnames, params.port = [LOOPBACK], 0
    params.cache_ram_mib = 0  # prompts are kept for later ones otherwise
    params.fit_params = False  # or it would change what is asked for to what fits
    return params


def _params(request: Request) -> xllamacpp.CommonParams:
    options, params = request.options, _quiet_params(request)
    params.n_parallel = request.users  # slots, which share n_ctx in equal parts
    params.n_ctx, params.n_batch, params.n_ubatch = (
        options[each] for each in ("n_ctx", "n_batch", "n_ubatch")
    )
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    on = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = (
        on.LLAMA_FLASH_ATTN_TYPE_ENABLED if options["flash_attn"] else on.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    for name in ("type_k", "type_v"):
        setattr(params, f"cache_{name}", getattr(xllamacpp.ggml_type, f"GGML_TYPE_{options[name].upper()}"))
    modes = xllamacpp.llama_load_mode
    params.load_mode = modes.LLAMA_LOAD_MODE_MMAP if options["mmap"] else modes.LLAMA_LOAD_MODE_NONE
    params.endpoint_metrics = True
    if options["speculate"] != "none":
        _speculate(params.speculative, options)
    return params


def _speculate(speculative: Any, options: dict[str, Any]) -> None:
    kind = SPECULATIONS[options["speculate"]].upper().replace("-", "_")
    speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    draft = speculative.draft
    draft.mparams.path = options["draft"]
    draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = options["threads"]
    if most := options["draft_tokens"]:
        draft.n_max = speculative.ngram_simple.size_m = most
    if accept := options["accept"]:
        longest = (speculative.ngram_simple.size_m if options["speculate"] == "ngram" else draft.n_max) + 1
        if not 1 <= accept <= longest:
            raise ValueError(f"accept: {accept} tokens a pass; 1 to {longest} are possible")
        speculative.synth_len = accept
