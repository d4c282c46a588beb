"""A session of transformers: decodes greedily, the cache passed in. Owns the loop that others share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runners import hf_loaded, hf_routing, routing, torch_device, windows
from runners.experts import Heard
from runners.hf_cache import TransformersCache
from runners.protocol import Request

DOES_NOT_FIT: tuple[type[BaseException], ...] = (torch_device.OUT_OF_MEMORY, MemoryError)
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
            self._mode = torch_device.compile_mode(self._device, self._context.same_buffers)
            self._stepping = torch_device.compiled(model, self._mode)
        self._clock = torch_device.Clock(self._device)
        self._allocator = torch_device.Allocator(self._device)
        self._compilations = self._prompt_tokens = 0
        self._highest: list[torch.Tensor] = []
        self._logits = torch.empty(0)  # after the last token

    def settle(self) -> None:
        """Take a step, so that facts describe the model as it decodes: with its static cache allocated and
        the weights repacked by a CPU's kernels. On a GPU take more: see rehearse()."""
        self._context.allocate()
        self.empty(0)
        self._forward(self.model, self._tensor([0]), 1)
        if self._device.type == "cuda":
            self.rehearse()
        self.empty(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def rehearse(self) -> None:
        """Take steps at several depths, see windows.rehearsed. A static cache has one length, which the
        warm-up covers."""
        for depth in windows.rehearsed(self._context.capacity - 1):
            try:
                if not self._context.deepen(depth):
                    return
                self._forward(self._stepping, self._tensor([0]), 1)
            except DOES_NOT_FIT:
                return  # decoding will show how far it gets

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Clears the cache now, outside TTFT; the rest runs when iterated."""
        self._check_numbers()  # of the previous generation, a window of the warm-up
        self.empty(len(prompt) + new_tokens)
        self._prompt_tokens = len(prompt)
        torch_device.synchronize(self._device)
        self._allocator.begin()
        self._compilations = torch_device.compilations()
        return self._decode(prompt, new_tokens)

    def _decode(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        self._clock.begin()
        self._logits = self._forward(self.model, self._tensor(prompt), 1)
        yield from self._steps(len(prompt), new_tokens)

    def fix(self, ids: list[int]) -> None:
        """See runners.protocol.Session."""
        self._fixed = self._tensor(ids)[0]

    def steps(self, new_tokens: int) -> Iterator[int]:
        """Greedy ids after those fed; see runners.protocol.Session."""
        self._check_numbers()
        self._clock.begin()
        return self._steps(self.held(), new_tokens)

    def _steps(self, held: int, new_tokens: int) -> Iterator[int]:
        """Greedy ids from the logits that are there."""
        clock, allocator, logits, fixed = self._clock, self._allocator, self._logits, self._fixed
        with torch_device.memory_errors():  # also those that show only when the device is waited for
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
            raise ValueError(f"not-a-number logits at token {self._prompt_tokens + finite.index(False) + 1}")

    @torch_device.memory_errors()
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
        """Null: transformers does not count."""

    def memory_state(self) -> tuple[int, int] | None:
        """Allocated and reserved bytes of the CUDA allocator; null on a CPU."""
        state = self._allocator.state()
        return state and (state["allocated_bytes"], state["reserved_bytes"])

    def routing(self, prompt: list[int], new_tokens: int) -> dict[str, Any] | None:
        """The experts chosen in greedy decode steps after a prompt; null for a model without routers."""
        if not hf_routing.is_mixture(self.model):
            return None
        with hf_routing.listening(self.model) as heard:
            self.empty(len(prompt) + new_tokens)
            logits = self._forward(self.model, self._tensor(prompt), 1)
            heard.begin()
            ids, fixed = [], self._fixed
            for position in range(len(prompt), len(prompt) + new_tokens):
                ids.append(int(logits[-1].argmax() if fixed is None else fixed[position % len(fixed)]))
                logits = self._forward(self.model, self._tensor(ids[-1:]), 1)
            return routing.facts(heard.experts, ids, heard.counts())

    @contextmanager
    def experts(self) -> Iterator[Heard | None]:
        """See runners.protocol.Session. Null also where steps are compiled, which nothing hears."""
        if self._mode or not hf_routing.is_mixture(self.model):
            yield None
            return
        with hf_routing.listening(self.model, self._follow) as heard:
            yield heard

    def counters(self) -> dict[str, Any]:
        """Tokens in the cache; on CUDA also each token by the device clock, and the allocator's state."""
        self._check_numbers()
        return {
            "evaluated_tokens": self._context.tokens(),
            "compilations": torch_device.compilations() - self._compilations,
            **self._clock.counters(),
            **self._allocator.counters(),
        }

    def facts(self) -> dict[str, Any]:
        """As transformers has it after loading: counted from the modules, not from the request."""
        options, config, model = self._options, self.model.config, self._describe()
        skips = torch_device.cudagraph_skips(self._mode)
        settings, context = torch_device.settings(self._device), self._context.facts()
        allocator = settings.get("allocator", {})  # null: unknown; a CPU has none
        resolved = {
            "threads": torch.get_num_threads(),
            "expandable_segments": None if allocator is None else bool(allocator.get("expandable_segments")),
            "dtype": hf_loaded.compute_dtype(self.model),
            "attn": config._attn_implementation,
            "compile": self._mode is not None,
            "mmap": hf_loaded.is_mapped(self.model, options["mmap"]),
        }
        return {
            "versions": hf_loaded.versions(),
            "attention": config._attn_implementation,
            "settings": settings | {"compile_mode": self._mode, "cudagraph_skips": skips},
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
