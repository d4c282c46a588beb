"""The experts that the routers of a mixture choose, counted by hooks on transformers' modules, untimed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Choices:
    """How often each router chose each of its experts since `begin`."""

    def __init__(self, routers: list[nn.Module]) -> None:
        self.routers = routers
        self._chosen: dict[nn.Module, list[torch.Tensor]] = {}
        self.begin()

    def begin(self) -> None:
        self._chosen = {router: [] for router in self.routers}

    def hear(self, router: nn.Module, _given: Any, output: Any) -> None:
        """A forward hook: of what a router returns, whole numbers are the chosen experts (tokens, k)."""
        self._chosen[router] += [
            each for each in output if isinstance(each, torch.Tensor) and not each.is_floating_point()
        ]

    def counts(self) -> list[list[int]]:
        """By router, in the order of the layers: of each expert."""
        return [
            torch.cat([each.flatten() for each in chosen]).bincount(minlength=experts_of(router)).tolist()
            for router, chosen in self._chosen.items()
            if chosen
        ]


def experts_of(router: nn.Module) -> int:
    """A row of its weight for each expert."""
    return int(router.weight.shape[0])  # type: ignore[union-attr, index]


@contextmanager
def listening(model: nn.Module) -> Iterator[Choices]:
    """Hooks on all routers as long as the block runs: modules whose class is called so, with a weight."""
    called = (module for module in model.modules() if type(module).__name__.endswith("Router"))
    found = [module for module in called if isinstance(getattr(module, "weight", None), nn.Parameter)]
    choices = Choices(found)
    hooks = [router.register_forward_hook(choices.hear) for router in found]
    try:
        yield choices
    finally:
        for hook in hooks:
            hook.remove()
