"""Generation with transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from runners.hf import device, loading
from runners.protocol import Request, not_a_number
from runners.workloads import scoring
from runners.workloads.experts import Heard
from runners.workloads.warm_up import rehearsed_windows

# The context of a decode in transformers' own caches: allocate, clear, deepen; how a step reads it.


# How a step reads a cache of these layers. A static sliding window is missing: it reads less than n_ctx.
_READ = {"DynamicLayer": "copied", "DynamicSlidingWindowLayer": "window", "StaticLayer": "full"}


class TransformersCache:
    """A dynamic cache, or a static one of `n_ctx` tokens, which is one block of memory for all generations.

    `capacity`: the tokens it is meant for. `in_chunks`: accepts several tokens after others. `same_buffers`:
    it stays at the same address for every step.
    """

    in_chunks = True

    def __init__(self, config: Any, kind: str, n_ctx: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = n_ctx
        self._config, self._dtype, self._device = config, dtype, device
        self._static = StaticCache(config=config, max_cache_len=n_ctx) if kind == "static" else None
        self._cache = self._emptied()
        self.same_buffers = self._all_are(StaticLayer)

    @device.memory_errors()
    @torch.inference_mode()
    def allocate(self) -> None:
        """Allocate a static cache at once if its layers are plain: then torch refuses one that is far too
        large, before the first step makes a mask of that length and the kernel kills the process."""
        if self._static is not None and self.same_buffers:
            shape = _kv_shape(self._config)
            self._static.early_initialization(1, *shape, self._dtype, self._device)

    def empty(self, tokens: int) -> None:
        """Reset, with room for so many tokens. Raises ValueError for a static cache that is too short."""
        if self._static is not None and tokens > self.capacity:
            raise ValueError(
                f"a static cache of n_ctx {self.capacity} cannot hold the {tokens} tokens asked for"
            )
        self._cache = self._emptied()

    @torch.inference_mode()  # a static cache written in it can only be zeroed in it
    def _emptied(self) -> DynamicCache | StaticCache:
        if self._static is None:
            return DynamicCache(config=self._config)
        self._static.reset()
        return self._static

    @device.memory_errors()
    @torch.inference_mode()
    def deepen(self, tokens: int) -> bool:
        """Repeat the first token to this depth, to load the kernels that run there; whether that is possible.
        Takes no more memory than decoding to it."""
        if not self._all_are(DynamicLayer):
            return False
        layers = self._cache.layers
        firsts = [[state[:, :, :1].clone() for state in (each.keys, each.values)] for each in layers]
        del layers
        self._cache = self._emptied()  # frees the shallower one
        held = [[state.expand(-1, -1, tokens, -1) for state in states] for states in firsts]
        self._cache = DynamicCache(held, config=self._config)
        return True

    @torch.inference_mode()
    def keep(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer. A step of a dynamic cache makes new tensors and leaves these."""
        if not self.tokens():
            return []
        if not all(hasattr(layer, "keys") for layer in self._cache.layers):
            raise ValueError("a context with states that do not grow with its tokens cannot be kept or cut")
        return [(layer.keys, layer.values) for layer in self._cache.layers]

    @torch.inference_mode()
    def restore(self, kept: list[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> None:
        """A dynamic cache of the first `tokens` of those kept. Raises ValueError for a static one."""
        if not tokens:
            self._cache = self._emptied()
            return
        if self._static is not None:
            raise ValueError("a static cache cannot be cut to fewer tokens")
        held = [[state[:, :, :tokens].to(self._device) for state in (keys, values)] for keys, values in kept]
        self._cache = DynamicCache(held, config=self._config)

    def arguments(self) -> dict[str, Any]:
        """The arguments of a forward pass for it."""
        return {"past_key_values": self._cache, "use_cache": True}

    def tokens(self) -> int:
        """Tokens that it holds."""
        return int(self._cache.get_seq_length())

    def facts(self) -> dict[str, Any]:
        """How a step reads it, its device, and the bytes per token; None if layers differ."""
        kinds = [type(layer).__name__ for layer in self._cache.layers]
        text, (kv_heads, head_dim) = self._config.get_text_config(decoder=True), _kv_shape(self._config)
        read = _READ.get(kinds[0]) if len(set(kinds)) == 1 else None
        held = [
            tensor
            for layer in self._cache.layers
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if tensor is not None
        ]
        on: Counter[str] = Counter()
        for tensor in held:
            on[str(tensor.device)] += tensor.nbytes
        static = self._static is not None
        return {
            "options": {
                "cache": "static" if static else "dynamic",
                "n_ctx": max(getattr(layer, "max_cache_len", 0) for layer in self._cache.layers)
                if static
                else None,
            },
            "kv_read": read,
            "window": getattr(text, "sliding_window", None) if read == "window" else None,
            "kv_bytes_per_token": read and 2 * len(kinds) * kv_heads * head_dim * self._dtype.itemsize,
            "kv_layers": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "memory": dict(on),
            "devices": dict(Counter(str(tensor.device) for tensor in held)),
        }

    def _all_are(self, kind: type) -> bool:
        """Whether all layers are plain ones of a kind, without a window or a state."""
        return {type(layer) for layer in self._cache.layers} == {kind}


def _kv_shape(config: Any) -> tuple[int, int]:
    """KV heads and head size."""
    text = config.get_text_config(decoder=True)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return kv_heads, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


# A session of transformers: decodes greedily, the cache passed in. Owns the loop that others share.


DOES_NOT_FIT: tuple[type[BaseException], ...] = (device.OUT_OF_MEMORY, MemoryError)
SKIPPED = "torch.compile left out CUDA graphs (cudagraph_skips in the settings): see TORCH_LOGS=cudagraphs"


class HfSession:
    """One model and its cache; see runners.protocol.Session."""

    chunk = 64  # each makes a mask as long as the cache, and maybe scores for every head

    def __init__(
        self,
        request: Request,
        model: torch.nn.Module,
        describe: Callable[[], dict[str, Any]],
        context: Any = None,
    ) -> None:
        """`describe`: the stack's current facts of the model, called for each facts(); its `options` are
        those that the stack itself resolves. `context`: the cache, if it is not one of transformers: with the
        interface of TransformersCache."""
        self._options = options = request.options
        self._follow = request.files.get("follow")
        self._fused: list[str] = []  # kernels of the attention in the last step of settle()
        if not options["cudnn_attention"]:
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._fixed: torch.Tensor | None = None
        self.model = model
        self._describe = describe
        self._device = next(model.parameters()).device
        dtype = model.get_input_embeddings().weight.dtype
        self._context = context or TransformersCache(
            model.config, options["cache"], options["n_ctx"], dtype, self._device
        )
        self._mode: str | None = None
        self._stepping = model
        if options.get("compile"):
            self._mode = device.compile_mode(self._device, self._context.same_buffers)
            self._stepping = device.compiled(model, self._mode)
        self._clock = device.Clock(self._device)
        self._allocator = device.Allocator(self._device)
        self._compilations = self._prompt_tokens = 0
        self._highest: list[torch.Tensor] = []
        self._logits = torch.empty(0)  # after the last token

    def settle(self) -> None:
        """Take a step, so that facts describe the model as it decodes: with its static cache allocated and
        the weights repacked by a CPU's kernels. On a GPU take more: see rehearse()."""
        self._context.allocate()
        self.empty(0)
        self._first_step(self.model)
        if self._device.type == "cuda":
            self.rehearse()
        self.empty(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _first_step(self, model: Any) -> None:
        with (
            nullcontext() if self._mode else device.FusedAttention() as chosen
        ):  # what is compiled shows nothing
            self._forward(model, self._tensor([0]), 1)
        self._fused = sorted(chosen.kernels) if chosen else []

    def rehearse(self) -> None:
        """Take steps at several depths, see windows.rehearsed. A static cache has one length, which the
        warm-up covers."""
        for depth in rehearsed_windows(self._context.capacity - 1):
            try:
                if not self._context.deepen(depth):
                    return
                self._first_step(self._stepping)
            except DOES_NOT_FIT:
                return  # decoding will show how far it gets

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Clears the cache now, outside TTFT; the rest runs when iterated."""
        self._check_numbers()  # of the previous generation, a window of the warm-up
        self.empty(len(prompt) + new_tokens)
        self._prompt_tokens = len(prompt)
        self._clock.clear()
        device.synchronize(self._device)
        self._allocator.begin()
        self._compilations = device.compilations()
        return self._decode(prompt, new_tokens)

    def _decode(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        self._clock.begin()
        self._logits = self._forward(self.model, self._tensor(prompt), 1)
        yield from self._steps(len(prompt), new_tokens)

    def force_tokens(self, ids: list[int]) -> None:
        """See runners.protocol.Session."""
        self._fixed = self._tensor(ids)[0]

    def steps(self, new_tokens: int) -> Iterator[int]:
        """Greedy ids after those fed; see runners.protocol.Session."""
        self._check_numbers()
        self._clock.clear()
        self._clock.begin()
        return self._steps(self.held(), new_tokens)

    def _steps(self, held: int, new_tokens: int) -> Iterator[int]:
        """Greedy ids from the logits that are there."""
        clock, allocator, logits, fixed = self._clock, self._allocator, self._logits, self._fixed
        with device.memory_errors():  # also those that show only when the device is waited for
            for n in range(held + 1, held + new_tokens + 1):
                highest, token = logits[-1].max(dim=-1)
                clock.token()
                self._highest.append(highest)  # checked at the end: on a GPU reading it is another wait
                yield int(token)  # waits for the device
                allocator.token(n)
                if n < held + new_tokens:  # the last token is never fed back
                    fed = token if fixed is None else fixed[(n - 1) % len(fixed)]
                    logits = self._forward(self._stepping, fed.view(1, 1), 1)

    def _check_numbers(self) -> None:
        """The maximum of logits is NaN if any of them is. Raises ValueError with the first token."""
        finite = torch.stack(self._highest).isfinite().tolist() if self._highest else []
        self._highest = []
        if not all(finite):
            raise ValueError(not_a_number(self._prompt_tokens + finite.index(False) + 1))

    @device.memory_errors()
    @torch.inference_mode()
    def _forward(self, model: torch.nn.Module, ids: torch.Tensor, keep: int) -> torch.Tensor:
        """Logits after the last `keep` of `ids` (1, tokens), these added to the cache: (keep, vocabulary)."""
        out = model(input_ids=ids, logits_to_keep=keep, **self._context.arguments())
        return out.logits[0]

    def _tensor(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([ids], device=self._device)

    def empty(self, tokens: int) -> None:
        """Reset, with room for so many tokens. Raises ValueError if there is none."""
        self._context.empty(tokens)

    def feed(self, ids: list[int], keep: int) -> np.ndarray:
        """Logits after the last `keep` of `ids`, evaluated after those before: float32 (keep, vocabulary).

        A single id takes the path of a decode step.
        """
        if len(ids) > 1 and self._context.tokens() and not self._context.in_chunks:
            return np.concatenate([self.feed([one], 1) for one in ids])[-keep:]
        model = self._stepping if len(ids) == 1 else self.model
        self._logits = self._forward(model, self._tensor(ids), keep)
        return self._logits.float().cpu().numpy()

    def held(self) -> int:
        """Tokens in the cache."""
        return int(self._context.tokens())

    def truncate(self, tokens: int) -> None:
        """Forget all but the first `tokens`."""
        self._context.restore(self._context.keep(), tokens)

    def context_bytes(self) -> int:
        """Bytes of a copy of the context."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._context.keep())

    def keep(self) -> Any:
        """A copy of the context, for restore()."""
        return [(keys.cpu(), values.cpu()) for keys, values in self._context.keep()]

    def restore(self, kept: Any, tokens: int) -> None:
        """Bring back the first `tokens` of a kept context."""
        self._context.restore(kept, tokens)

    def write_kept(self, kept: Any, path: Path) -> None:
        """Write a kept context to a file."""
        torch.save(kept, path)

    def read_kept(self, path: Path) -> Any:
        """A kept context of a file."""
        return torch.load(path, weights_only=True)

    def evaluated(self) -> None:
        """Return None: transformers does not count."""

    def memory_state(self) -> tuple[int, int] | None:
        """Allocated and reserved bytes of the CUDA allocator; None on a CPU."""
        state = self._allocator.state()
        return state and (state["allocated_bytes"], state["reserved_bytes"])

    def routing(self, prompt: list[int], new_tokens: int) -> dict[str, Any] | None:
        """The experts chosen in greedy decode steps after a prompt; None for a model without routers."""
        if not loading.is_mixture(self.model):
            return None
        with loading.listening(self.model) as heard:
            self.empty(len(prompt) + new_tokens)
            logits = self._forward(self.model, self._tensor(prompt), 1)
            heard.begin()
            ids, fixed = [], self._fixed
            for position in range(len(prompt), len(prompt) + new_tokens):
                ids.append(int(logits[-1].argmax() if fixed is None else fixed[position % len(fixed)]))
                logits = self._forward(self.model, self._tensor(ids[-1:]), 1)
            return scoring.routing_facts(heard.experts, ids, heard.counts())

    @contextmanager
    def experts(self) -> Iterator[Heard | None]:
        """See runners.protocol.Session. Null also where steps are compiled, which nothing hears."""
        if self._mode or not loading.is_mixture(self.model):
            yield None
            return
        with loading.listening(self.model, self._follow) as heard:
            yield heard

    def counters(self) -> dict[str, Any]:
        """Tokens in the cache; on CUDA also each token by the device clock, and the allocator's state."""
        self._check_numbers()
        return {
            "evaluated_tokens": self._context.tokens(),
            "compilations": device.compilations() - self._compilations,
            **self._clock.counters(),
            **self._allocator.counters(),
        }

    def facts(self) -> dict[str, Any]:
        """The model's facts after loading, counted from the modules, not from the request."""
        options, config, model = self._options, self.model.config, self._describe()
        skips = device.cudagraph_skips(self._mode)
        settings, context = device.settings(self._device), self._context.facts()
        allocator = settings.get("allocator", {})  # null: unknown; a CPU has none
        resolved = {
            "threads": torch.get_num_threads(),
            "expandable_segments": None if allocator is None else bool(allocator.get("expandable_segments")),
            "dtype": loading.compute_dtype(self.model),
            "attn": config._attn_implementation,
            "compile": self._mode is not None,
            "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
            "mmap": loading.is_mapped(self.model, options["mmap"]),
        }
        return {
            "versions": loading.versions(),
            "attention": config._attn_implementation,
            "settings": settings
            | {"compile_mode": self._mode, "cudagraph_skips": skips, "sdpa_kernels": self._fused},
            "warnings": [SKIPPED] if skips else [],
            "allocator": self._allocator.state(),
            **model,
            **context,
            "options": options | resolved | context["options"] | model.get("options", {}),
            "devices": model["devices"] | {"cache": context["devices"]},
            "memory": model["memory"] | {"kv": context["memory"]},
        }

    def close(self) -> None:
        del self._context, self._stepping, self.model
