"""The extent of a graph's tensors under ggml's allocator: they come and go in the order of computation, each
in the smallest hole that holds it, else at the end. Pure.

Source: ggml_gallocr and ggml_dyn_tallocr in ggml/src/ggml-alloc.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 32  # bytes; of CUDA 128


@dataclass
class _Node:
    size: int
    sources: Sequence[int]
    in_place: bool
    root: int | None  # of a view: the tensor that has the memory
    leaf: bool
    children: int = 0
    views: int = 0
    offset: int | None = None


class Graph:
    """Tensors in the order in which they are computed. Weights and caches have memory of their own."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []

    def leaf(self, size: float) -> int:
        """An input, allocated before all others."""
        return self._add(size, (), leaf=True)

    def op(self, size: float, *sources: int, in_place: bool = False) -> int:
        """`in_place`: it may take the memory of a source that nothing else needs, if as large."""
        return self._add(size, sources, in_place=in_place)

    def view(self, source: int) -> int:
        """Another name for the memory of a tensor."""
        root = self._nodes[source].root
        return self._add(0, (source,), root=source if root is None else root)

    def use(self, *sources: int) -> None:
        """A copy into a cache, which needs no memory here."""
        self._add(0, sources)

    def keep(self, node: int) -> None:
        """A result, which stays to the end."""
        self._nodes[node].children += 1

    def _add(
        self,
        size: float,
        sources: Sequence[int],
        in_place: bool = False,
        root: int | None = None,
        leaf: bool = False,
    ) -> int:
        padded = -(-round(size) // ALIGNMENT) * ALIGNMENT
        self._nodes.append(_Node(padded, sources, in_place, root, leaf))
        return len(self._nodes) - 1

    def bytes(self) -> int:
        """The most that is ever taken, holes included."""
        memory, nodes = _Memory(), self._nodes
        for node in nodes:
            if node.root is not None:
                nodes[node.root].views += 1
            for source in node.sources:
                nodes[source].children += 1
        for node in nodes:
            if node.leaf:
                node.offset = memory.take(node.size)
        for node in nodes:
            if node.leaf:
                continue
            if node.root is None and node.size and not (node.in_place and self._reused(node)):
                node.offset = memory.take(node.size)
            for source in node.sources:
                self._release(nodes[source], memory)
        return memory.most

    def _reused(self, node: _Node) -> bool:
        """Take the memory of the first source that nothing else needs."""
        for source in map(self._nodes.__getitem__, node.sources):
            owner = source if source.root is None else self._nodes[source.root]
            only = source.children == 1 and source.views == 0
            if source.root is not None:
                only = only and owner.views == 1 and owner.children == 0
            if only and owner.offset is not None and owner.size == node.size:
                node.offset, owner.offset = owner.offset, None
                return True
        return False

    def _release(self, source: _Node, memory: _Memory) -> None:
        source.children -= 1
        if source.children or source.views:
            return
        owner = source
        if source.root is not None:
            owner = self._nodes[source.root]
            owner.views -= 1
        if owner.offset is not None and not owner.children and not owner.views:
            memory.free(owner.offset, owner.size)
            owner.offset = None


class _Memory:
    """Holes by address, the last of which has no end."""

    def __init__(self) -> None:
        self.most = 0
        self._end = 0
        self._holes: list[list[int]] = []  # [begin, end)

    def take(self, size: int) -> int:
        fitting = [hole for hole in self._holes if hole[1] - hole[0] >= size]
        if fitting:
            hole = min(reversed(fitting), key=lambda each: each[1] - each[0])
            offset = hole[0]
            hole[0] += size
            if hole[0] == hole[1]:
                self._holes.remove(hole)
            return offset
        offset, self._end = self._end, self._end + size
        self.most = max(self.most, self._end)
        return offset

    def free(self, offset: int, size: int) -> None:
        merged = [offset, offset + size]
        for hole in [each for each in self._holes if each[1] == offset or each[0] == offset + size]:
            merged = [min(merged[0], hole[0]), max(merged[1], hole[1])]
            self._holes.remove(hole)
        if merged[1] == self._end:
            self._end = merged[0]
            return
        self._holes.append(merged)
        self._holes.sort()
