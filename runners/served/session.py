"""A session of a server: tokens as its client gets them, and what the server says of them."""

from __future__ import annotations

import platform
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from runners.answers import NO_MODEL, WrongAnswer, part
from runners.protocol import Answer
from runners.served.apis import CHAT, Json, Prompt, metric, with_context
from runners.served.client import Client, ServerError, Stream, api_of

clock = time.perf_counter_ns
TEXT = (
    "The harbour was quiet in the morning. Boats lay side by side, and men carried boxes over the wet stones "
    "while gulls waited on the roofs. A woman sold bread from a cart and talked with everyone who came by. "
)
TRIES = 12  # requests to find a text of as many tokens as asked for
# A token each in the vocabularies of all common models.
WORDS = " the of and to in is that for it as was with be by on not he his but at are this have from"
LENGTH_OFF = 0.02  # of a conversation in words, by the server's count of its tokens
UNKNOWN = -1  # id of a token that came without one
KEPT_NOWHERE = 1 << 62  # bytes of a copy that a server does not give
OLLAMA_SPEAKS = ("ollama", "openai")
MOST_LOADED = 16  # models in a server's memory that are listed
CONTEXT_STEP = 256  # of Ollama's num_ctx; one more step for texts that have some tokens more than wanted


class ServedSession:
    """One model of a server; see runners.protocol.Session. It generates, for one user or several.

    What is fed is sent as the prompt of the next steps. How much of it is evaluated is the server's choice,
    but for the first prompt after empty(), which is new to it.
    """

    chunk = 1
    elsewhere = True  # the server is another process

    def __init__(self, client: Client, options: Json, prompt_is_here: bool) -> None:
        """`prompt_is_here`: the ids of the request are of the served model's own vocabulary. Raises
        ServerError."""
        self._client, self._options = client, options
        listed = client.models()
        self._model = _model_of([*listed], options.get("model"))
        self._listed = listed.get(self._model) or listed.get(f"{self._model}:latest", {})
        self._props = client.props(self._model)
        owner = self._listed.get("owned_by") or ""
        self._api = api_of(client, options["api"], self._model, owner, self._props)
        if self._api.name != "llama-server":
            self._props = {}
        self._num_ctx: int | None = None
        self._running: Json = {}  # the model, as Ollama lists it among the loaded ones
        self._loaded_too: list[Json] = []  # other models, by name and bytes
        self._shown: Json = {}  # the model, as Ollama describes it
        self._studio_quant = ""  # the model's, as LM Studio lists it
        self._speculation = self._speculates()
        self._prompt_is_here = prompt_is_here and self._api.takes_ids
        self._texts: dict[int, str] = {}
        self._stream: Stream | None = None
        self._generated_before: float | None = None
        self._ended_ns = self._began_ns = self._client_ns = 0
        self._totals: Counter[str] = Counter()
        self._proxy: str | None = None
        self._prompt_counts: list[int | None] = []
        self._prompt_length = 0
        self._vocabulary: Sequence[int | str] = ()
        self._context: list[int | str] = []
        self._last: int | str | None = None  # token of the answer before: in the text, not in the cache
        self._is_new = True
        self._begun = 0  # prompts
        self._evaluated: int | None = 0

    def check_context(self, workloads: list[Json]) -> None:
        """Raises ServerError where the server's context is known, and too short for one of these."""
        of_one_user = (
            len(each["prompt"]) + each["new_tokens"] if "concurrency" in each else each["holds"]
            for each in workloads
        )
        needed = max(of_one_user)
        if self._api.name == "ollama":
            self._load(needed)
        settings = self._props.get("default_generation_settings") or {}
        context = settings.get("n_ctx") or self._listed.get("max_model_len")
        if context and needed > context:
            raise ServerError(
                f"the server's context is {context} tokens, and {needed} are needed: restart it with a"
                " larger one (llama-server -c, for all slots together; vLLM --max-model-len)"
            )
        context = self._running.get("context_length")  # older versions of Ollama do not report it
        if context and needed > context:
            raise ServerError(
                f"the server's context is {context} tokens, although num_ctx {self._num_ctx} was requested,"
                f" and {needed} are needed: measure fewer tokens"
            )

    def _load(self, tokens: int) -> None:
        """Let Ollama load the model with a context of so many tokens. Past its own, often 4,096, it discards
        tokens, so that later ones cost less."""
        self._num_ctx = CONTEXT_STEP * (tokens // CONTEXT_STEP + 2)
        self._api = with_context(self._api, self._num_ctx)
        for _ in self._client.stream(self._api, self._model, self._other_start() + WORDS, 1):
            pass
        self._find_running()

    def _find_running(self) -> None:
        """Keeps what was known of a model that was unloaded since."""
        models = self._rows("/api/ps", "models")
        self._running = next(filter(self._is_own, models), self._running)
        self._loaded_too = [
            {"name": name, "bytes": model.get("size")}
            for model in models
            if not self._is_own(model) and (name := model.get("name"))
        ][:MOST_LOADED]

    def _rows(self, page: str, name: str) -> list[Json]:
        """The objects of a list on a page; empty without the page. Raises ServerError."""
        return [row for row in (self._client.found(page) or {}).get(name) or [] if row]

    def _is_own(self, row: Json) -> bool:
        return row.get("name") in (self._model, f"{self._model}:latest")

    def _find_in_lm_studio(self) -> None:
        """Other servers may have anything at its address."""
        try:
            rows = self._rows("/api/v0/models", "data")
        except ServerError:
            return
        own = next((row for row in rows if row.get("id") == self._model), {})
        self._studio_quant = own.get("quantization") or ""
        others = (row.get("id") for row in rows if row is not own and row.get("state") == "loaded")
        self._loaded_too = [{"name": name, "bytes": None} for name in others if name][:MOST_LOADED]

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """What is asked besides the tokens is asked before, outside TTFT."""
        text = self._prompt(prompt)
        self._generated_before = self._client.total_generated(self._api)
        return self._generate(text, new_tokens)

    def _generate(self, prompt: Prompt, new_tokens: int) -> Iterator[int]:
        self._stream = stream = self._client.stream(self._api, self._model, prompt, new_tokens)
        self._began_ns = clock()  # the head of an answer may come with its first token
        pieces = iter(stream)
        try:
            for ids in pieces:
                yield from ids
            self._ended_ns, self._client_ns = clock(), stream.client_ns
            yield from [0] * _without_piece(stream)
        finally:
            for _ in pieces:  # an answer that was not read to its end would cost the connection
                pass

    def serve_batch(self, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
        """See runners.protocol.Session. A thread and a connection for each user; a text prompt begins with
        digits of its own."""
        texts = [self._prompt(prompt, is_one_of_several=True) for prompt in prompts]
        before = self._client.total_generated(self._api)
        began: list[int] = []
        ready = threading.Barrier(len(prompts), lambda: began.append(clock()))

        def answer(text: Prompt) -> tuple[Answer, Stream]:
            ready.wait()
            stream = self._client.stream(self._api, self._model, text, new_tokens)
            t_ns, ids = [], []
            for piece in stream:
                t_ns += [clock() - began[0]] * len(piece)
                ids += piece
            t_ns += [clock() - began[0]] * _without_piece(stream)
            _check_streamed(stream, len(t_ns))
            same = self._prompt_is_here and self._api.sends_ids and not self._api.keeps_prefix
            return Answer(t_ns, ids if same else None, stream.client_ns), stream

        with ThreadPoolExecutor(len(prompts)) as pool:
            try:
                futures = [pool.submit(answer, text) for text in texts]
            except RuntimeError as failure:
                ready.abort()  # the threads before it wait for this one
                users = len(prompts)
                raise ServerError(f"{users} users need as many threads, but {failure}") from failure
            answers, streams = zip(*(each.result() for each in futures), strict=True)
        own = sum(len(each.t_ns) for each in answers)
        self._add_others(before, own)
        self._totals["answer_tokens"] += own
        for stream in streams:
            self._add(stream)
            self._totals["cached_tokens"] += stream.counts.cached or 0
            self._prompt_counts.append(stream.counts.prompt)
        self._prompt_length = len(prompts[0])
        return list(answers)

    def _add(self, stream: Stream) -> None:
        totals = self._totals
        totals["pieces"] += stream.pieces
        totals["awaited_pieces"] += stream.awaited_pieces
        totals["largest_piece"] = max(totals["largest_piece"], stream.largest_piece)
        counted = stream.counted.generated
        totals["counted_tokens"] += stream.tokens + _without_piece(stream) if counted is None else counted
        self._proxy = stream.proxy
        totals["load_ms"] = max(totals["load_ms"], round(stream.counts.load_ms or 0))
        for name in ("drafted", "accepted"):
            totals[f"{name}_tokens"] += getattr(stream.counts, name) or 0

    def _add_others(self, before: float | None, own: int) -> None:
        """`own`: tokens of this client since the server's total was `before`."""
        total = self._client.total_generated(self._api)
        if total is not None and before is not None:
            self._totals["others_tokens"] += max(0, round(total - before) - own)

    def row_counters(self) -> dict[str, Any]:
        """See runners.protocol.Session."""
        if self._context:
            self._add_others(self._generated_before, self._totals["answer_tokens"])
            self.truncate(0)
        found: dict[str, Any] = dict(self._totals) | ({"proxy": self._proxy} if self._proxy else {})
        self._totals = Counter()
        counted, self._prompt_counts = self._prompt_counts, []
        known = [each for each in counted if each is not None]
        if known and len(known) == len(counted):
            found["prompt_tokens"] = max(known, key=lambda each: abs(each - self._prompt_length))
        return found

    def empty(self, tokens: int) -> None:
        """Begin a prompt that the server has not seen. Raises ServerError."""
        if self._api is CHAT:
            raise ServerError("the server has chats alone, whose template stands between prompt and answer")
        if not self._totals:  # the first call of a workload is not timed
            self._totals["answer_tokens"] = 0
            self._vocabulary = self._pieces_of_text()
            self._generated_before = self._client.total_generated(self._api)
        self._is_new, self._evaluated = True, 0
        self.truncate(0)

    def truncate(self, tokens: int) -> None:
        del self._context[tokens:]
        self._last = None

    def held(self) -> int:
        return len(self._context)

    def evaluated(self) -> int | None:
        return self._evaluated

    def context_bytes(self) -> int:
        return KEPT_NOWHERE

    def feed(self, ids: list[int], keep: int) -> None:
        """Nothing is sent yet. A prompt that begins here has another order, and another first token than the
        one before, where a server keeps prefixes. Raises ServerError after an answer that is not known."""
        if self._last == UNKNOWN:
            raise ServerError("the server sent no ids for some tokens, so a conversation cannot go on")
        if not self._context and self._api.keeps_prefix:
            self._begun += 1
            ids = [self._begun, *random.sample(ids, len(ids))[1:]]
        items = [self._vocabulary[each % len(self._vocabulary)] for each in ids]
        if self._last is not None:
            items[0], self._last = self._last, None
        self._context += items

    def steps(self, new_tokens: int) -> Iterator[int]:
        """Raises ServerError where the prompt or the answer has another length."""
        prompt: Any = self._context if self._api.takes_ids else "".join(map(str, self._context))
        stream = self._client.stream(self._api, self._model, prompt, new_tokens, reuse=not self._is_new)
        ids: list[int] = []
        for piece in stream:
            ids += piece
            yield from piece
        counts, self._is_new = stream.counts, False
        generated = len(ids) + _without_piece(stream)
        yield from [0] * _without_piece(stream)
        self._check_lengths(counts.prompt, generated, new_tokens)
        _check_streamed(stream, generated)
        if self._evaluated is not None:
            evaluated = self.held() + generated - 1 - (counts.cached or 0)
            self._evaluated = None if counts.cached is None else self._evaluated + evaluated
        self._add(stream)
        self._totals["answer_tokens"] += generated
        *held, self._last = self._sent_back(ids, stream.text, generated)
        self._context += held

    def _check_lengths(self, prompt: int | None, generated: int, requested: int) -> None:
        """Raises ServerError."""
        sent = self.held()
        if prompt is None:
            raise ServerError("the server does not count the tokens of a prompt, so its length is unknown")
        if abs(prompt - sent) > (0 if self._api.takes_ids else 1 + LENGTH_OFF * sent):
            hint = ": its context may be shorter" if prompt < sent else ""
            raise ServerError(f"the server counts {prompt} tokens in a prompt of {sent}{hint}")
        if generated != requested:
            raise ServerError(f"the server generated {generated} of {requested} tokens")

    def _sent_back(self, ids: list[int], text: str, generated: int) -> list[int | str]:
        """An answer's tokens, as a later prompt has them; a text is its last one."""
        if not self._api.takes_ids:
            return [*[""] * (generated - 1), text]
        known = ids if len(ids) == generated else self._tokenized(text)
        return [*known] if len(known) == generated else [UNKNOWN] * generated

    def _pieces_of_text(self) -> Sequence[int | str]:
        """What to send for each id of the text, a token each."""
        if not self._api.takes_ids:
            return [f" {word}" for word in WORDS.split()]
        return ([] if self._prompt_is_here else self._tokenized(TEXT)) or range(1 << 31)

    def _prompt(self, ids: list[int], is_one_of_several: bool = False) -> Prompt:
        """A prompt of as many tokens as the ids are, by the server's own count where it is a text. Where a
        server keeps prefixes, or where it is one of several, it does not begin as the one before."""
        if self._prompt_is_here:
            return random.sample(ids, len(ids)) if self._api.keeps_prefix else ids
        start = self._other_start() if self._api.keeps_prefix or is_one_of_several else ""
        if self._api.takes_ids:
            found = self._tokenized(start + TEXT * (1 + len(ids) // 20))[: len(ids)]
            return found or random.sample(ids, len(ids))  # small ones, which any vocabulary has
        if len(ids) not in self._texts:
            self._texts[len(ids)] = self._fitting(len(ids))
        return start + self._texts[len(ids)]

    def _other_start(self) -> str:
        """Digits, of a token each; the first is another than that of the prompt before."""
        self._begun += 1
        return " ".join(f"{self._begun % 10}{random.randrange(10**6):06}") + " "

    def _tokenized(self, text: str) -> list[int]:
        """Empty for a server that runs without a tokenizer."""
        body = {"content": text} | {"prompt": text, "model": self._model, "add_special_tokens": False}
        return [int(each) for each in (self._client.found("/tokenize", body) or {}).get("tokens") or []]

    def _fitting(self, wanted: int) -> str:
        """A text that is a prompt of `wanted` tokens, or of the nearest number that was found. It begins at
        any word, so that another process has another prompt: an answer may end with its text."""
        words = (TEXT * (2 + wanted // 20)).split()[random.randrange(len(TEXT.split())) :]
        count, best = max(1, wanted // 2), (wanted, "")
        for _ in range(TRIES):
            text = " ".join(words[:count])
            stream = self._client.stream(self._api, self._model, self._other_start() + text, 1)
            for _ in stream:
                pass
            if not (got := stream.counted.prompt):
                return text  # it does not count: see the record's prompt tokens
            best = min(best, (abs(got - wanted), text))
            if got == wanted:
                break
            count = max(1, count + (wanted - got if abs(wanted - got) < 3 else (wanted - got) * 3 // 4))
        return best[1]

    def counters(self) -> dict[str, Any]:
        """The server's counts and clock of the last request, and the client's own part in it. `waited_ms` of
        `elapsed_ms` it waited for the server."""
        stream = self._stream
        assert stream is not None  # after a generation
        counts, total = stream.counts, self._client.total_generated(self._api)
        generated = stream.tokens + _without_piece(stream)
        evaluated = None
        if counts.prompt is not None:
            evaluated = counts.prompt - (counts.cached or 0) + generated - 1
        others = None
        if total is not None and self._generated_before is not None:
            others = round(total - self._generated_before) - generated
        found = {
            "evaluated_tokens": evaluated,
            "counted_tokens": stream.counted.generated,
            "ended_by": stream.ended,
            "proxy": stream.proxy,
            "stack_prefill_ms": counts.prefill_ms,
            "stack_decode_ms": counts.decode_ms,
            "prompt_tokens": counts.prompt,
            "cached_tokens": counts.cached,
            "pieces": stream.pieces,
            "awaited_pieces": stream.awaited_pieces,
            "piece_tokens": stream.tokens,
            "largest_piece": stream.largest_piece,
            "first_burst_tokens": stream.first_tokens,
            "drafted_tokens": counts.drafted,
            "accepted_tokens": counts.accepted,
            "others_tokens": others,
            "load_ms": counts.load_ms,
            "waited_ms": (self._ended_ns - self._began_ns - self._client_ns) / 1e6,
            "elapsed_ms": (self._ended_ns - self._began_ns) / 1e6,
        }
        return {name: value for name, value in found.items() if value is not None}

    def facts(self) -> dict[str, Any]:
        options = self._options
        if self._api.name in OLLAMA_SPEAKS:
            self._find_running()
            self._shown = self._client.found("/api/show", {"model": self._model}) or {}
        if self._api.name == "openai":
            self._find_in_lm_studio()
        about, guesses = self._about(), self._speculation != "none"
        forms = self._client.forms.items()
        return {
            "versions": {
                "httpx": httpx.__version__,
                "python": platform.python_version(),
                self._api.name: self._version(),
            },
            "options": {
                **options,
                "api": options["api"] if options["api"] == "auto" else self._api.name,
                "model": self._model,
                "speculation": guesses if guesses or self._api.name == "llama-server" else None,
            },
            "served": {
                "api": self._api.name,
                "path": self._api.path,
                "model": self._model,
                "file": self._props.get("model_path") or self._listed.get("root"),
                "sends_ids": self._api.sends_ids,
                "template": self._api is CHAT,
                "elsewhere": self.elsewhere,
                "slots": self._props.get("total_slots"),
                "speculation": self._speculation,
                "num_ctx": self._num_ctx,
                "gpu_share": self._gpu_share(),
                "loaded_too": self._loaded_too,
                **self._sizes(),
                "other_forms": [f"{sent} for {field}" if sent else f"no {field}" for field, sent in forms],
            },
            **about,
        }

    def _speculates(self) -> str:
        """What guesses tokens ahead, by llama-server's own name. Its /props has what a request may ask for,
        and only an answer has what it got. vLLM counts drafts if it was started with speculation."""
        if self._api.name == "vllm":
            counted = metric(self._client.ask("/metrics").text, "vllm:spec_decode_num_drafts_total")
            return "none" if counted is None else "spec_decode"
        if self._api.name != "llama-server":
            return "none"
        body = {**self._api.body(self._model, [1], 1), "stream": False}
        settings = (self._client.found(self._api.path, body) or {}).get("generation_settings") or {}
        return str(settings.get("speculative.types") or "none")

    def _gpu_share(self) -> float | None:
        """Of the memory that the model takes, as Ollama reports it after it has loaded the model."""
        size, on_gpu = self._running.get("size"), self._running.get("size_vram")
        return on_gpu / size if isinstance(size, int) and isinstance(on_gpu, int) and size > 0 else None

    def _sizes(self) -> dict[str, Any]:
        """Of the model, as Ollama lists and describes it; empty for other servers."""
        if self._api.name != "ollama":
            return {}
        info = self._shown.get("model_info") or {}
        architecture = info.get("general.architecture")
        try:
            experts = architecture and (part(info, f"{architecture}.expert_count", int) or 0)
        except WrongAnswer as wrong:
            raise self._client.error(f"{self._client.url}/api/show: {wrong}") from None
        rows = self._rows("/api/tags", "models")
        return {
            "file_bytes": next((row.get("size") for row in rows if self._is_own(row)), None),
            "parameter_size": (self._shown.get("details") or {}).get("parameter_size"),
            "experts": experts,
        }

    def _about(self) -> dict[str, Any]:
        """Of the model, as llama-server, Ollama and LM Studio show it."""
        if self._api.name in OLLAMA_SPEAKS:
            details, info = self._shown.get("details") or {}, self._shown.get("model_info") or {}
            quant = (details.get("quantization_level") or self._studio_quant).lower()
            known = {
                "quant": None if quant == "unknown" else quant,
                "parameters": info.get("general.parameter_count"),
                "holds_tokens": self._running.get("context_length"),
            }
            return {name: value for name, value in known.items() if value}
        if self._api.name != "llama-server":
            return {}
        meta = self._listed.get("meta") or {}
        holds = (self._props.get("default_generation_settings") or {}).get("n_ctx")
        # llama.cpp's names of mixes end in their size: Q4_K - Medium.
        quant = re.sub(
            r" - (small|medium|large)$",
            lambda size: f"_{size[1][0]}",
            str(self._props.get("model_ftype") or "").lower(),
        )
        known = {
            "model_bytes": meta.get("size"),
            "parameters": meta.get("n_params"),
            "vocab_size": meta.get("n_vocab"),
            "trained_context": meta.get("n_ctx_train"),
            "holds_tokens": holds,
            "quant": None if " " in quant else quant.replace("q2_k_m", "q2_k"),
            "kv_read": "padded256",
        }
        return {name: value for name, value in known.items() if value}

    def _version(self) -> str:
        if self._api.name == "llama-server":
            return str(self._props.get("build_info") or "unknown")
        path = {"ollama": "/api/version", "vllm": "/version"}.get(self._api.name)
        return str((self._client.found(path) or {}).get("version", "unknown")) if path else "unknown"

    def close(self) -> None:
        self._client.close()


def _without_piece(stream: Stream) -> int:
    """Tokens of an answer that ended, other than those that came."""
    return (stream.counts.generated or 0) - stream.tokens


def _check_streamed(stream: Stream, tokens: int) -> None:
    if stream.pieces <= 1 < tokens:
        raise ServerError(f"the server sent all {tokens} tokens at once: it does not stream")


def _model_of(served: list[str], requested: str | None) -> str:
    """The model to ask for. Raises ServerError where it is not clear, or not there."""
    names = ", ".join(served[:8])
    if requested:
        if served and not {requested, f"{requested}:latest"} & {*served}:  # Ollama's names
            raise ServerError(f"model {requested}: the server has {names}")
        return requested
    if not served:
        raise ServerError(f"the server {NO_MODEL}")
    if len(served) > 1:
        raise ServerError(f"the server has {len(served)} models ({names}): give one as `model`")
    return served[0]
