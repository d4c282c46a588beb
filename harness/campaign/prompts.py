"""The token ids of prompts and texts: the same for every stack and variant of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from harness.base.text import plural
from harness.campaign.repeat import NotReady
from harness.campaign.tokenized_text import Tokenized, tokenized
from harness.campaign.worker import Facts
from harness.config.plan import Cell
from harness.models.locate import Ready, WeightsError
from harness.records import Record
from harness.stacks import build

# Filler text for prompts, repeated until there are enough tokens.
PROMPT_TEXT = (
    "A harness compares what several stacks make of one model on one machine: it sends the same words to "
    "each, waits for every token, and writes down when it came. "
)
# The sources of a prompt.
NO_PROMPT = "no prompt"
TOKENIZED = "the harness's fixed text, by the model's own tokenizer"
FIXED = "fixed ids (no tokenizer)"
FAKE_VOCABULARY = 512  # for a stack that loads no weights


class NoVocabulary(NotReady):
    """A text has no token ids: llama.cpp does not read the vocabulary of a GGUF."""


class Prompts:
    """Finds each prompt once per campaign."""

    def __init__(self, by_stack: Callable[[Cell, Path, str], Facts]) -> None:
        """`by_stack`: the ids of a text by a GGUF's own vocabulary. Raises WeightsError, NotReady."""
        self._by_stack = by_stack
        self._tokenized: dict[tuple[Path, int], list[int]] = {}
        self._known: dict[tuple[str, int], tuple[str, list[int], str]] = {}

    def know(self, records: Iterable[Record]) -> None:
        """Remember the prompts of kept records: every source of a model must tokenize the same."""
        for record in records:
            workload, file = record["workload"], record["model"]["weights"].get("file")
            if file and (source := workload.get("prompt_source")) in (TOKENIZED, FIXED):
                known = (str(file), workload["prompt"], str(source))
                self._known.setdefault((record["model"]["name"], workload["prompt_tokens"]), known)

    def ids(self, cell: Cell, ready: Ready | None) -> tuple[list[int], str]:
        """The prompt's token ids, the same for every stack and variant of a model, and their source.

        Raises NotReady: the tokenizer returns too few ids, or another source of the model has other ids.
        """
        count = int(cell.workload.prompt_tokens or 0)
        if not count:
            return [], NO_PROMPT
        if ready is None or (cell.weights_format == "served" and not _has_helper(cell)):
            return _fixed_ids(FAKE_VOCABULARY, count), FIXED
        if ready.tokenizer is not None:
            try:
                ids, source = self._tokenize(cell, ready, ready.tokenizer, count), TOKENIZED
            except NoVocabulary:
                return self.ids(cell, replace(ready, tokenizer=None))
        elif ready.vocab_size:
            ids, source = _fixed_ids(ready.vocab_size, count), FIXED
        else:
            raise NotReady("error", f"{ready.path}: has no input embedding, so its vocabulary is unknown")
        known = self._known.setdefault((cell.model.name, count), (str(ready.path), ids, source))
        if ids != known[1]:
            raise NotReady(
                "refused",
                f"{ready.path} and {known[0]} would get different prompts ({source}; {known[2]}): all stacks"
                " of a model need the same token ids; give both one tokenizer, or name them as two models",
            )
        return ids, source

    def _tokenize(self, cell: Cell, ready: Ready, source: Path, count: int) -> list[int]:
        if (source, count) not in self._tokenized:
            ids = self.tokenized(cell, ready, PROMPT_TEXT * (1 + count // 20), count).ids
            if len(ids) < count:
                raise NotReady(
                    "error",
                    f"{source}: its tokenizer returns fewer than {plural(count, 'token')} for the prompt",
                )
            self._tokenized[source, count] = ids
        return self._tokenized[source, count]

    def tokenized(self, cell: Cell, ready: Ready, text: str, count: int) -> Tokenized:
        """The first `count` ids of a text by the weights' own tokenizer, or all if they are fewer.

        Raises NotReady: there is no tokenizer, it fails, or the model has no such ids.
        """
        source = ready.tokenizer
        if source is None:
            raise NotReady("refused", f"{ready.path}: has no tokenizer, so a text has no token ids")
        try:
            if source == ready.path:  # a GGUF: only llama.cpp can read its vocabulary
                answer = self._by_stack(cell, source, text)
                if answer["ids"] is None:
                    why = f"{source}: llama.cpp does not read its vocabulary, so a text has no token ids"
                    raise NoVocabulary("refused", why)
                tokens = Tokenized(list(answer["ids"])[:count], answer["bos"])
            else:
                tokens = tokenized(source, text, count)
        except WeightsError as failure:
            raise NotReady("error", f"{ready.path}: cannot tokenize: {failure}") from failure
        except NotReady as failure:  # a stack that another one does this for runs without it
            raise NoVocabulary(failure.outcome, str(failure)) if cell.header.jobs_of else failure from None
        largest = max([*tokens.ids, tokens.bos or 0])
        if ready.vocab_size is not None and largest >= ready.vocab_size:
            reason = f"its tokenizer returns id {largest}, but the model has {ready.vocab_size}"
            raise NotReady("error", f"{source}: {reason}")
        return tokens


def _has_helper(cell: Cell) -> bool:
    """Whether the stack that reads vocabularies for a server's is built: a server needs none."""
    helper = cell.header.worker.environment_for("cpu")
    return helper is not None and build.find(helper) is not None


def _fixed_ids(vocabulary: int, count: int) -> list[int]:
    return [(1013 + 7919 * i) % vocabulary for i in range(count)]
