"""What is run on each model: the kinds of workloads, their lengths and limits."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
)

from harness.base.text import shortened
from harness.config.base import MOST_TOKENS, Frozen, Plain, Share, Tokens, absolute, tokens_of

_Self = TypeVar("_Self", bound="_Workload")
Capability = Literal["logits", "context", "memory", "users"]


class _Workload(Frozen):
    prompt_tokens: Tokens | None = None
    """Tokens of prompt, in place of the protocol's."""

    timed: ClassVar[Literal["tokens", "rows"] | None] = "tokens"
    """What is timed: each token of one decode, or rows of a table; None: nothing."""
    needs: ClassVar[Capability | None] = None
    """What it needs of a stack besides tokens; None: nothing."""

    @property
    def cuts(self) -> bool:
        """Whether it cuts the KV cache to fewer tokens."""
        return False

    def repeated(self, repeats: int) -> int:
        """How often it runs where the protocol has `repeats`."""
        return repeats

    def resolved(self: _Self, prompt_tokens: int, new_tokens: int) -> _Self:
        """Itself; lengths it does not set come from the protocol."""
        return self.model_copy(update={"prompt_tokens": self.prompt_tokens or prompt_tokens})


class Decode(_Workload):
    """Decode greedily, token by token. A null length means the protocol's."""

    kind: Literal["decode"] = "decode"
    new_tokens: Tokens | None = None
    """Tokens to decode, in place of the protocol's."""

    def resolved(self, prompt_tokens: int, new_tokens: int) -> Decode:
        lengths = {"new_tokens": self.new_tokens or new_tokens}
        return super().resolved(prompt_tokens, new_tokens).model_copy(update=lengths)

    @property
    def holds(self) -> int:
        """Tokens that its context must hold."""
        return (self.prompt_tokens or 0) + (self.new_tokens or 0)


class MaxCtx(_Workload):
    """Find the longest context that fits. A context length in the variant's options is ignored."""

    kind: Literal["max_ctx"] = "max_ctx"
    fill: bool = True
    """Fill the context and decode at its end; otherwise only allocate it."""
    past_trained: bool = False
    """Search past the context that the model was trained on."""
    prompt_tokens: Tokens | None = None
    """Tokens of text, repeated until the context is full."""

    timed = None
    needs = "context"

    @model_serializer(mode="wrap")
    def _plain(self, values: SerializerFunctionWrapHandler) -> Plain:
        """The default is left out, so that ids of cells stay."""
        found: Plain = values(self)
        return {name: value for name, value in found.items() if name != "past_trained" or value}

    @property
    def new_tokens(self) -> int:
        """No tokens: nothing is timed."""
        return 0

    @property
    def holds(self) -> int:
        """Tokens that its context must hold at least."""
        return self.prompt_tokens or 0


class Grow(_Workload):
    """Decode until memory runs out, or the target is reached."""

    needs = "memory"

    kind: Literal["grow"] = "grow"
    target: Annotated[Tokens, Field(ge=2)] = 100_000
    """Tokens of prompt and decode."""

    @property
    def new_tokens(self) -> int:
        """The target minus the prompt."""
        return self.target - (self.prompt_tokens or 0)

    @property
    def holds(self) -> int:
        """Tokens that its context must hold."""
        return self.target


Depth = Annotated[
    int,
    BeforeValidator(tokens_of),
    Field(ge=0, le=MOST_TOKENS),
    WithJsonSchema({"type": ["integer", "string"], "minimum": 0, "maximum": MOST_TOKENS}),
]
"""Tokens in the KV cache before; 4k is 4,096."""


def _each_once(given: list[int]) -> list[int]:
    twice = next((value for place, value in enumerate(given) if value in given[:place]), None)
    if twice is not None:
        raise ValueError(f"{json.dumps(twice)} occurs twice")
    return given


class _Surface(_Workload):
    """A workload whose result is a table of timed rows."""

    prompt_tokens: Tokens | None = None
    """Tokens of text, repeated as often as needed; by default the protocol's prompt."""
    repeats: int | None = Field(
        default=None, ge=1, le=1000, exclude=True
    )  # as often as it runs, it is the same
    """Processes per cell at most, where the protocol has more: its rows have an interval without others."""

    timed = "rows"

    def repeated(self, repeats: int) -> int:
        return min(repeats, self.repeats or repeats)


def _lengths(given: Any) -> Any:
    if isinstance(given, str) and given != "auto":
        raise ValueError(f'expected auto or a list, got "{shortened(given)}"')
    return None if given == "auto" else given


class Prefill(_Surface):
    """Time single forward passes over several numbers of tokens, at several depths of context."""

    kind: Literal["prefill"] = "prefill"
    lengths: Annotated[
        Annotated[list[Tokens], Field(min_length=1, max_length=200)] | None,
        BeforeValidator(_lengths),
        WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "array", "items": {"minimum": 1}}]}),
    ] = None
    """Tokens of a pass; auto: powers of two up to `up_to`, and more where the slope changes."""
    up_to: Tokens = 1024
    """Longest pass of `lengths: auto`."""
    depth: list[Depth] = Field(default=[0], min_length=1, max_length=50)
    """Tokens in the KV cache before a pass."""
    passes: int = Field(default=5, ge=2, le=1000)
    """Passes of each length and depth, in rounds."""

    needs = "context"
    _once = field_validator("depth")(_each_once)

    @field_validator("lengths")
    @classmethod
    def _lengths_once(cls, given: list[int] | None) -> list[int] | None:
        return given and _each_once(given)

    @property
    def cuts(self) -> bool:
        """Between passes behind other tokens."""
        return max(self.depth) > 0

    @property
    def longest(self) -> int:
        """Tokens of the longest pass."""
        return max(self.lengths or [self.up_to])

    @property
    def new_tokens(self) -> int:
        """No tokens: a pass is no decode."""
        return 0

    @property
    def holds(self) -> int:
        """Tokens that its context must hold: those of the deepest pass, and one after it."""
        return max(self.depth) + self.longest + 1


MOST_SCORED = 1 << 17  # tokens of a window: the logits of its second half are in memory at once
WINDOW_ROOM = 260  # a window begins up to 255 tokens from its depth, and its first steps are not timed


class Windows(_Surface):
    """Decode short windows at several depths of context, filled by prefill."""

    kind: Literal["depth"] = "depth"
    depths: list[Depth] = Field(min_length=1, max_length=50)
    """Tokens in the KV cache at which the speed is wanted."""
    window: int = Field(default=64, ge=8, le=10_000)
    """Tokens in a window."""
    stop_at: Share = 0.005
    """Half the 95% interval of tok/s, as a share of it, at which a depth is known well enough."""
    most_windows: int = Field(default=24, ge=4, le=10_000)
    """Windows of a depth, on average, after which it ends anyway."""

    keep_context: bool = False
    """Keep the filled context in the cache folder, for further repeats and runs."""

    _once = field_validator("depths")(_each_once)

    @property
    def cuts(self) -> bool:
        """Whether the context is cut between depths."""
        return True

    @property
    def new_tokens(self) -> int:
        """No tokens: windows are rows of a table, not one decode."""
        return 0

    @property
    def holds(self) -> int:
        """Tokens that its context must hold."""
        return max(self.depths) + self.window + WINDOW_ROOM


class Turns(_Surface):
    """A conversation of several turns, with and without its prefix kept in the KV cache."""

    kind: Literal["turns"] = "turns"
    first: Tokens = 2000
    """Tokens of the first prompt."""
    each: Tokens = 200
    """Tokens that each later turn adds."""
    new_tokens: Tokens = 150
    """Tokens decoded in each turn."""
    turns: int = Field(default=10, ge=1, le=1000)
    prefix_cache: list[bool] = Field(default=[False, True], min_length=1, max_length=2)
    """off: each turn evaluates the whole conversation; on: what is new."""

    _once = field_validator("prefix_cache")(_each_once)

    @property
    def holds(self) -> int:
        """Tokens that its context must hold."""
        return self.first + (self.turns - 1) * self.each + self.turns * self.new_tokens


SLOT_STEP = 256  # llama.cpp gives every sequence a multiple of this many KV cells


class Batch(_Surface):
    """Several users at once, each with a prompt of its own, decoded together."""

    kind: Literal["batch"] = "batch"
    concurrency: list[Annotated[int, Field(ge=1, le=256)]] = Field(  # 256: llama.cpp's LLAMA_MAX_SEQ
        default=[1, 2, 4, 8, 16], min_length=1, max_length=50
    )
    """Users at once."""
    new_tokens: Annotated[Tokens, Field(ge=2)] = 256
    """Tokens decoded for each user."""
    rounds: int = Field(default=3, ge=1, le=1000)
    """Rounds over all numbers of users, in random order, after one that warms up."""

    needs = "users"
    _once = field_validator("concurrency")(_each_once)

    @property
    def holds(self) -> int:
        """Tokens that its context must hold: those of all users together."""
        of_each = (self.prompt_tokens or 0) + self.new_tokens
        return max(self.concurrency) * -(-of_each // SLOT_STEP) * SLOT_STEP


class Quality(_Workload):
    """Perplexity of a text, and the divergence from the 16-bit weights: teacher-forced, nothing is timed."""

    kind: Literal["quality"] = "quality"
    text: str = Field(default="default", min_length=1)
    """A file in UTF-8, relative to this file's folder, absolute, or from ~; default: the shipped text."""
    n_ctx: Annotated[Tokens, Field(ge=8, le=MOST_SCORED)] = 512
    """Tokens of a window; those of its second half are scored, as llama-perplexity does."""
    chunks: int = Field(default=64, ge=1, le=10_000)
    """Windows, from the start of the text."""
    depths: list[Annotated[Tokens, Field(ge=8, le=MOST_SCORED)]] = Field(default=[], max_length=20)
    """Besides, as many windows of each of these lengths; as many of their last tokens are scored."""
    bos: bool = True
    """Begin each window with a BOS, as llama-perplexity does, if the model's tokenizer asks for one."""
    reference: Literal["auto"] = "auto"
    """The model's 16-bit weights, in transformers if they are a checkpoint."""

    timed = None
    needs = "logits"

    @field_validator("text")
    @classmethod
    def _absolute(cls, text: str, info: ValidationInfo) -> str:
        return text if text == "default" or info.context is None else absolute(text, info.context)

    @field_validator("depths")
    @classmethod
    def _longer(cls, given: list[int], info: ValidationInfo) -> list[int]:
        n_ctx = info.data.get("n_ctx", 0)
        if short := [depth for depth in given if depth <= n_ctx]:
            raise ValueError(f"{min(short)} is not deeper than the windows of n_ctx {n_ctx}")
        return _each_once(given)

    @model_serializer(mode="wrap")
    def _plain(self, values: SerializerFunctionWrapHandler) -> Plain:
        """The default is left out: ids of cells are made of this, and without a BOS in question they stay."""
        found: Plain = values(self)
        return {name: value for name, value in found.items() if name != "bos" or not value}

    def repeated(self, repeats: int) -> int:
        """Once: it has an interval from its windows."""
        return 1

    def resolved(self, prompt_tokens: int, new_tokens: int) -> Quality:
        """Itself: it has no prompt."""
        return self

    @property
    def new_tokens(self) -> int:
        """No tokens: nothing is decoded."""
        return 0

    @property
    def holds(self) -> int:
        """Tokens that its context must hold."""
        return max([self.n_ctx, *self.depths])

    def windows(self) -> list[tuple[int, int]]:
        """First token and end of each window in the text: `chunks` of n_ctx, then `chunks` of each depth.
        Windows of all depths end at the same tokens, so that they score the same ones."""
        deepest = max(self.depths, default=0)
        found = [(k * self.n_ctx, (k + 1) * self.n_ctx) for k in range(self.chunks)]
        for depth in self.depths:
            ends = (deepest + k * self.n_ctx for k in range(self.chunks))
            found += [(end - depth, end) for end in ends]
        return found

    def fitting(self, tokens: int) -> int:
        """The most `chunks` for a text of so many tokens."""
        return 1 + (tokens - self.holds) // self.n_ctx if tokens >= self.holds else 0

    @property
    def positions(self) -> int:
        """Positions of a window that are scored: those before its second half's tokens, but the first."""
        return self.n_ctx - self.n_ctx // 2 - 1


Workload = Decode | MaxCtx | Grow | Prefill | Windows | Turns | Batch | Quality
KINDS: dict[str, type[Workload]] = {kind.model_fields["kind"].default: kind for kind in get_args(Workload)}
