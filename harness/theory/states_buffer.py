"""The tensors of one pass of llama.cpp through layers that keep a state: short convolutions, Mamba 2, gated
delta rules. Pure.

Source: src/models/lfm2.cpp, mamba-base.cpp, delta-net-base.cpp of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from harness.theory.graph_memory import Graph
from harness.theory.layers import Layer, Piece

F32 = 4


class Dims(dict[str, tuple[int, ...]]):
    """Of tensors by name; those that a file lacks have no elements."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__((piece.name, piece.dims) for piece in pieces)

    def __missing__(self, name: str) -> tuple[int, ...]:
        return 0, 0


class States:
    """A graph for a pass over so many `tokens` with `hidden` elements. Nodes are of its graph."""

    def __init__(self, hidden: int, tokens: int) -> None:
        self.graph, self.hidden, self.tokens = Graph(), hidden, tokens

    def op(self, width: float, *sources: int, in_place: bool = False) -> int:
        return self.graph.op(F32 * width * self.tokens, *sources, in_place=in_place)

    def convolution(self, dims: Dims, x: int) -> int:
        graph, hidden = self.graph, self.hidden
        kernel = dims["shortconv.conv.weight"][-1]
        mixed = self.op(3 * hidden, x)
        bx = self.op(hidden, graph.view(mixed), graph.view(mixed))
        before = graph.op(F32 * hidden * (kernel - 1))
        joined = graph.op(F32 * hidden * (kernel - 1 + self.tokens), graph.view(before), graph.view(bx))
        graph.use(graph.view(joined))
        out = self.op(hidden, joined)
        return self.op(hidden, self.op(hidden, graph.view(mixed), out, in_place=True))

    def mamba(self, dims: Dims, layer: Layer, x: int) -> Callable[[], int]:
        """Up to its scan; the rest comes after the output of an attention beside it."""
        graph = self.graph
        convolved, kernel = dims["ssm_conv1d.weight"]
        inner, heads = dims["ssm_out.weight"][-1], dims["ssm_dt.bias"][0]
        state = layer.cache.state - convolved * (kernel - 1)
        before = graph.op(F32 * convolved * (kernel - 1))
        mixed = self.op(dims["ssm_in.weight"][0], x)
        joined = graph.op(F32 * convolved * (kernel - 1 + self.tokens), graph.view(before), graph.view(mixed))
        graph.use(graph.view(joined))
        xbc = self.op(convolved, joined)
        dt = self.op(heads, graph.view(mixed))
        scanned = graph.op(F32 * (inner * self.tokens + state), graph.view(xbc), dt)
        graph.use(graph.view(scanned))

        def finish() -> int:
            skip = self.op(inner, graph.view(xbc))
            y = self.op(inner, graph.view(scanned), skip, in_place=True)
            return self.op(self.hidden, self.op(inner, self.op(inner, graph.view(mixed)), y))

        return finish

    def delta(self, dims: Dims, layer: Layer, x: int) -> int:
        graph = self.graph
        convolved, kernel = dims["ssm_conv1d.weight"]
        values, heads = dims["ssm_out.weight"][-1], dims["ssm_dt.bias"][0]
        keys = (convolved - values) // 2
        state = layer.cache.state - convolved * (kernel - 1)
        mixed = self.op(convolved, x)
        z = self.op(values, x)
        if "ssm_ba.weight" in dims:
            gates = self.op(2 * heads, x)
            beta, alpha = self.op(heads, graph.view(gates)), self.op(heads, graph.view(gates))
        else:
            beta, alpha = self.op(heads, x), self.op(heads, x)
        before = graph.op(F32 * convolved * (kernel - 1))
        joined = graph.op(F32 * convolved * (kernel - 1 + self.tokens), graph.view(before), graph.view(mixed))
        graph.use(graph.view(joined))
        held = graph.op(F32 * state)
        silu = self.op(convolved, self.op(convolved, joined), in_place=True)
        q = self.op(keys, graph.view(silu))
        k = self.op(keys, graph.view(silu))
        out = graph.op(F32 * (values * self.tokens + state), q, k, graph.view(silu), alpha, beta, held)
        graph.use(graph.view(out))
        normed = self.op(values, graph.view(out))
        gate = self.op(values, z, in_place=True)
        return self.op(self.hidden, self.op(values, normed, gate, in_place=True))
