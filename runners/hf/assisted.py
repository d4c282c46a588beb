"""Assisted generation of transformers: a draft model guesses tokens, one pass of the model verifies them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from runners.hf import device
from runners.hf.session import HfSession
from runners.protocol import Request


class _Left(Exception):
    """Nobody takes further tokens."""


class _Passes(BaseStreamer):
    """The tokens of each pass, taken in another thread; until they are, generation waits."""

    def __init__(self) -> None:
        self._ids: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._taken, self._left, self._prompt = threading.Semaphore(0), False, True

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first. The tokens are on the host."""
        if self._prompt:
            self._prompt = False
            return
        self._ids.put(value.flatten().tolist())
        self._taken.acquire()
        if self._left:
            raise _Left

    def end(self) -> None:
        self._ids.put(None)

    def __iter__(self) -> Iterator[list[int]]:
        while (ids := self._ids.get()) is not None:
            yield ids
            self._taken.release()

    def leave(self) -> None:
        self._left = True
        self._taken.release()


class AssistedSession(HfSession):
    """Decodes with generate() of transformers, which calls back with the tokens of each pass. It runs in a
    thread of its own that waits while they are taken, so that, as in a generator, nothing is computed while a
    token is stamped or written. Tokens of one pass have nearly one stamp. The first pass is of the prompt and
    the first guesses."""

    def __init__(
        self,
        request: Request,
        model: torch.nn.Module,
        describe: Callable[[], dict[str, Any]],
        draft: torch.nn.Module,
    ) -> None:
        super().__init__(request, model, describe)
        sizes = [each.config.get_text_config(decoder=True).vocab_size for each in (model, draft)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"draft: its vocabulary has {sizes[1]} tokens, the model's {sizes[0]}")
        self._draft = draft
        for each in (model, draft):
            each.generation_config = GenerationConfig()  # greedy, without an end of text
        if most := request.options["draft_tokens"]:
            draft.generation_config.num_assistant_tokens = most
            draft.generation_config.assistant_confidence_threshold = 0.0
        self._thread = ThreadPoolExecutor(1, "assisted", torch.set_num_threads, (torch.get_num_threads(),))
        self._fed: list[int] = []  # of each pass
        self._gave: list[int] = []
        model.register_forward_hook(self._verified, with_kwargs=True)

    def force_tokens(self, ids: list[int]) -> None:
        """Raises ValueError."""
        raise ValueError("fixed ids are fed in place of the model's own, so that no guess would be right")

    def _decode(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        self._fed, self._gave = [], []
        self._clock.begin()
        passes, n = _Passes(), len(prompt)
        running = self._thread.submit(self._assisted, prompt, new_tokens, passes)
        try:
            for ids in passes:
                self._gave.append(len(ids))
                self._highest += self._highest[-1:] * (len(ids) - 1)  # one per token
                for token in ids:
                    n += 1
                    self._clock.token()
                    yield token
                    self._allocator.token(n)
        finally:
            passes.leave()
            with device.memory_errors():
                running.result()

    def _assisted(self, prompt: list[int], new_tokens: int, passes: _Passes) -> None:
        ids = self._tensor(prompt)
        try:
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=self._draft,
                max_new_tokens=new_tokens,
                streamer=passes,
                **self._context.arguments(),
            )
        except _Left:
            return
        except BaseException:
            passes.end()
            raise

    def _verified(self, model: torch.nn.Module, args: Any, given: dict[str, Any], out: Any) -> None:
        self._fed.append(given["input_ids"].shape[1])
        self._highest.append(out.logits.amax())

    def counters(self) -> dict[str, Any]:
        """Also what was guessed and accepted, by what the model was fed and gave. The first pass counts
        apart: with the prompt it verifies guesses too."""
        return {
            **super().counters(),
            "drafted_tokens": sum(fed - 1 for fed in self._fed[1:]),
            "accepted_tokens": sum(gave - 1 for gave in self._gave[1:]),
            "first_burst_tokens": self._gave[0],
        }

    def facts(self) -> dict[str, Any]:
        sizes = (tensor.nbytes for tensor in (*self._draft.parameters(), *self._draft.buffers()))
        return super().facts() | {"draft_model_bytes": sum(sizes)}

    def close(self) -> None:
        self._thread.shutdown()
        del self._draft
        super().close()
