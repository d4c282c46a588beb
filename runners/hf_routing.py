"""The experts that the routers of a mixture choose in transformers: heard, or given to them. Untimed.

A router chooses by torch.topk over its scores, one call a layer and forward pass, in every version of
transformers and whatever its class is called. A function mode hears these calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from runners.experts import Heard

_TOP_K = (torch.topk, torch.Tensor.topk)


class _Mode(TorchFunctionMode):
    """Lets `heard` hear, and replace, what routers choose."""

    def __init__(self, heard: Heard) -> None:
        super().__init__()
        self._heard, self._layer = heard, 0

    def next_pass(self, *_given: Any) -> None:
        """A forward pre-hook of the model."""
        self._layer = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return found
        scores = args[0].reshape(-1, args[0].shape[-1])
        own = found.indices.reshape(len(scores), -1)
        self._heard.experts = scores.shape[-1]
        followed = self._heard.hear(self._layer, own.cpu().numpy(), scores.float().cpu().numpy())
        self._layer += 1
        if followed is None:
            return found
        chosen = torch.from_numpy(followed).to(own)
        values = scores.gather(-1, chosen).view_as(found.values)
        return type(found)((values, chosen.view_as(found.indices)))


def is_mixture(model: nn.Module) -> bool:
    return any("experts" in name for name, _ in model.named_modules())


@contextmanager
def listening(model: nn.Module, given: str | None = None) -> Iterator[Heard]:
    """Hear the routers as long as the block runs. `given`: an array of `Heard.write` to follow."""
    heard = Heard(None if given is None else np.load(given))
    mode = _Mode(heard)
    hook = model.register_forward_pre_hook(mode.next_pass)
    try:
        with mode:
            yield heard
    finally:
        hook.remove()
