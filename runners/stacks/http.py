"""Any OpenAI-compatible server, or llama-server or Ollama by their own API, as its client sees it."""
# /// script
# requires-python = ">=3.10"
# dependencies = ["httpx==0.28.1"]
#
# [tool.harness]
# summary = "a server that runs already: llama-server, Ollama, vLLM or another OpenAI-compatible one"
# weights = "served"
# several_users = true
# jobs_of = "llamacpp"
# secret = "key"
#
# [tool.harness.cannot]
# logits = "a server gives no logits"
# context = "a server shows no pass over a prompt, only tokens: depth and turns send prompts and time those"
# max_ctx = "a server's context is set when it starts: its own log or /props has it"
# memory = "a server's memory is not that of its client"
#
# [tool.harness.options.url]
# type = "url"
# default = "http://127.0.0.1:8080"
# help = "address of the server, with or without /v1"
#
# [tool.harness.options.model]
# type = "string"
# help = "the model to ask for, by the server's name; default: the only one it has"
#
# [tool.harness.options.api]
# choices = ["auto", "openai", "llama-server", "ollama", "vllm"]
# default = "auto"
# help = "what to speak to it; auto: what its own addresses show"
#
# [tool.harness.options.key]
# default = "HARNESS_API_KEY"
# help = "the environment variable with its API key; the key itself is kept nowhere"
#
# [tool.harness.options.speculation]
# default = false
# help = "it may guess tokens ahead; false: a run in which it does is invalid"
#
# [tool.harness.env.cpu]
# device = "cpu"
#
# [tool.harness.env.cuda]
# device = "cuda"
# ///

from __future__ import annotations

from runners.answers import api_key
from runners.protocol import Request
from runners.served.client import Client
from runners.served.session import ServedSession

DOES_NOT_FIT: tuple[type[BaseException], ...] = ()


def load(request: Request) -> ServedSession:
    """Connect to the server; it has its model. Raises ServerError, also for a context that is too short,
    and ValueError for what is no key."""
    client = Client(request.options["url"], api_key(request.options["key"]))
    session = ServedSession(client, request.options, prompt_is_here=request.model["path"] is not None)
    session.check_context(request.workloads)
    return session
