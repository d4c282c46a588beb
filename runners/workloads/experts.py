"""The experts that a mixture's routers choose, token by token: heard, and given to them. NumPy alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class Heard:
    """Choices of each router since `begin`, for every token of the passes, in order.

    `given`: chosen elsewhere, whole numbers (layers, tokens, k), -1 where unknown: the routers follow it, and
    `write` says how far their own scores are from it.
    """

    def __init__(self, given: np.ndarray | None = None) -> None:
        self.given = given
        self.experts = 0
        """In a layer; 0: none heard."""
        self.begin()

    def begin(self) -> None:
        self._parts: list[list[np.ndarray]] = []
        self._gaps: list[np.ndarray] = []
        self._others = 0

    def hear(self, layer: int, own: np.ndarray, scores: np.ndarray | None) -> np.ndarray | None:
        """A layer's choice, (tokens, k), of its scores, (tokens, experts). Returns the one to follow; None:
        its own. Layers are heard one after the other, each for the last tokens of those of the first."""
        if layer == len(self._parts):
            self._parts.append([])
        while len(self._parts[layer]) < len(self._parts[0]) - 1:  # batches of which it took no token
            self._parts[layer].append(own[:0])
        self._parts[layer].append(own)
        if self.given is None or scores is None:
            return None
        end = sum(len(part) for part in self._parts[0])
        wanted = self.given[layer : layer + 1, end - len(own) : end].reshape(-1, self.given.shape[-1])
        if wanted.shape != own.shape:  # another number of experts, or of layers: said, not followed
            return None
        known = (wanted >= 0).all(-1)
        followed: np.ndarray = np.where(known[:, None], wanted, own)
        self._others += int((np.sort(followed) != np.sort(own)).any(-1).sum())
        self._gaps.append(gaps(scores[known], followed[known]))
        return followed

    def chosen(self) -> np.ndarray:
        """Whole numbers (layers, tokens, k). -1 where unknown: llama.cpp's last layer takes only the last
        tokens of a batch, those with logits."""
        sizes = [len(part) for part in self._parts[0]] if self._parts else []
        used = self._parts[0][0].shape[-1] if self._parts else 0
        found = np.full((len(self._parts), sum(sizes), used), -1, np.int32)
        for row, parts in zip(found, self._parts, strict=True):
            for end, part in zip(np.cumsum(sizes), parts, strict=False):
                row[end - len(part) : end] = part
        return found

    def counts(self) -> list[list[int]]:
        """Count how often each expert was chosen, by layer."""
        known = (layer[layer >= 0] for layer in self.chosen())
        return [np.bincount(each, minlength=self.experts).tolist() for each in known]

    def write(self, path: Path) -> dict[str, Any]:
        """Write what was chosen. Returns the facts `experts` of a job of logits; of one that followed also
        `followed`: of so many `choices` how many are `others` than the routers' own, and `gap`, the root
        mean square of `gaps`."""
        chosen = self.chosen()
        np.save(path, chosen)
        layers, tokens, used = chosen.shape
        found = {"experts": self.experts, "used": used, "layers": layers, "tokens": tokens}
        if self.given is None:
            return found
        all_gaps = np.concatenate([np.zeros(0), *self._gaps])
        return found | {
            "followed": {
                "layers": len(self.given),
                "used": int(self.given.shape[-1]),
                "choices": len(all_gaps),
                "others": self._others,
                "gap": float(np.sqrt(np.square(all_gaps).sum() / max(1, len(all_gaps)))),
            }
        }


def gaps(scores: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """How far a router's scores are from these experts: (tokens,), 0 where they are its own choice.

    `scores`: (tokens, experts); of a softmax the logarithm is taken, its logits but for a constant. By how
    much the highest that is left exceeds the lowest that is chosen, over sqrt(2) times the scores' spread: an
    error of this share of the spread in each score has this standard deviation in the difference of two.
    """
    scores = scores.astype(np.float64)
    if len(scores) and (scores > 0).all() and np.allclose(scores.sum(-1), 1, atol=1e-3):
        scores = np.log(scores)
    is_chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(is_chosen, chosen.astype(np.int64), True, -1)
    lowest = np.where(is_chosen, scores, np.inf).min(-1, initial=np.inf)
    highest = np.where(is_chosen, -np.inf, scores).max(-1, initial=-np.inf)
    found: np.ndarray = np.maximum(0, highest - lowest) / (np.sqrt(2) * scores.std(-1))
    return found
