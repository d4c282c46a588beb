"""llama.cpp's compute buffer, as its graph allocator lays it out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from harness.theory.decoder import Decoder, Layer, Piece

# The extent of a graph's tensors under ggml's allocator: they come and go in the order of computation, each
# in the smallest hole that holds it, else at the end. Pure.
#
# Source: ggml_gallocr and ggml_dyn_tallocr in ggml/src/ggml-alloc.c.


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


# The tensors of one pass of llama.cpp through layers that keep a state: short convolutions, Mamba 2, gated
# delta rules. Pure.
#
# Source: src/models/lfm2.cpp, mamba-base.cpp, delta-net-base.cpp of llama-cpp-python 0.3.36.


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


# llama.cpp's compute buffer: the tensors of one pass, layer by layer, as its graphs have them. Pure.
#
# Source: src/llama-graph.cpp, src/models/*.cpp of llama-cpp-python 0.3.36. What is smaller than a row of the
# hidden state (positions, sums of a router) is left out.


F16, I64 = 2, 8
# Those whose hidden states may feed layers that predict further tokens: all tokens go through the last layer.
_ALL_TO_THE_END = (
    *("deepseek2", "glm4moe", "gpt-oss", "nemotron_h", "nemotron_h_moe", "qwen3next", "qwen35", "qwen35moe"),
)
# Their norms subtract the mean, which ggml does not compute in place.
_MEAN = ("command-r", "cohere2", "phi2", "phimoe", "starcoder2", "stablelm", "nemotron", "olmo")
# Their layers without a window have no positions.
_UNROTATED = ("cohere2", "exaone4", "granitehybrid", "llama4", "nemotron_h", "nemotron_h_moe")
_PARALLEL = ("command-r", "cohere2", "phi2")  # attention and feed-forward read the same norm


@lru_cache(maxsize=1024)
def compute_bytes(made: Decoder, tokens: int, outputs: int, cells: int, window: int, flash: bool) -> int:
    """Bytes for a pass of so many `tokens` of which `outputs` have logits, over a cache of `cells`, or of
    `window` in layers with a window (0: there are none)."""
    return _Pass(made, tokens, outputs, cells, window, flash).bytes()


class _Pass(States):
    def __init__(
        self, made: Decoder, tokens: int, outputs: int, cells: int, window: int, flash: bool
    ) -> None:
        super().__init__(made.hidden_size, tokens)
        self._made, self._outputs = made, outputs
        self._cells, self._window, self._flash = cells, window, flash

    def bytes(self) -> int:
        made, graph = self._made, self.graph
        graph.leaf(F32 * self.tokens * self.hidden)  # embeddings given in place of tokens
        self._masks: dict[bool, int] = {}
        self._places: dict[bool, int] = {}
        for window, cells in ((False, self._cells), (True, self._window)):
            layers = [each for each in made.layers() if self._has(each, window)]
            if cells and layers:
                self._masks[window] = graph.leaf((F16 if self._flash else F32) * cells * self.tokens)
                widest = max(each.cache.v for each in layers)
                if not self._flash and widest:
                    # where each value of V goes
                    self._places[window] = graph.leaf(I64 * widest * self.tokens)
        # Numbers of the tokens with logits: small, and in the way of larger holes.
        self._rows = graph.leaf(F32 * self.tokens)
        stream = graph.op(F32 * self.tokens * self.hidden)
        stream = self._gemma3n(stream) if made.arch == "gemma3n" else self._layers(stream)
        stream = self._norm(stream)
        if made.arch in _ALL_TO_THE_END:
            graph.keep(stream)
            stream = self._with_logits(stream)
        self.op(made.vocab_size, stream)
        return graph.bytes()

    def _layers(self, stream: int) -> int:
        count = self._made.count
        for number, each in enumerate(self._made.layers()):
            stream = self._layer(each, stream, last=number == count - 1)
        return stream

    def _has(self, layer: Layer, window: bool) -> bool:
        return bool(layer.cache.k) and self._windowed(layer) == window

    def _windowed(self, layer: Layer) -> bool:
        return bool(self._window and layer.cache.window)

    def _norm(self, x: int) -> int:
        return self.op(self.hidden, x, in_place=self._made.arch not in _MEAN)

    def _layer(self, layer: Layer, stream: int, last: bool) -> int:
        dims = Dims(layer.pieces)
        residual = stream
        x = self._norm(stream)
        parts = []
        if "ssm_in.weight" in dims:
            attended = self._attention(dims, layer, x) if layer.cache.k else None
            finish = self.mamba(dims, layer, x if attended is None else self._norm(stream))
            parts += [] if attended is None else [self.op(self.hidden, attended)]
            parts.append(finish())
        elif "shortconv.in_proj.weight" in dims:
            parts.append(self.convolution(dims, x))
        elif "ssm_conv1d.weight" in dims:
            parts.append(self.delta(dims, layer, x))
        elif layer.cache.k:
            attended = self._attention(dims, layer, x)
            if self._made.arch in _PARALLEL:
                return self._beside(dims, attended, x, stream, last)
            parts.append(self.op(self.hidden, attended))
        if parts:
            mixed = parts[0]
            for each in parts[1:]:
                mixed = self.op(self.hidden, mixed, each, in_place=True)
            if last and self._made.arch not in _ALL_TO_THE_END:
                mixed, residual = self._with_logits(mixed), self._with_logits(residual)
            stream = self.op(self.hidden, mixed, residual, in_place=True)
            residual = stream
        if not any(name.startswith("ffn_") for name in dims):
            return stream
        if parts:
            x = self._norm(stream)
        out = self._feed_forward(dims, x)
        return self.op(self.hidden, out, residual, in_place=True)

    def _beside(self, dims: Dims, attended: int, x: int, residual: int, last: bool) -> int:
        """The feed-forward reads what attention reads, and comes before the attention's output."""
        tokens = self.tokens
        if last:
            x = self._with_logits(x)
        out = self._feed_forward(dims, x)
        if last:
            residual = self._with_logits(residual)
        out = self.op(self.hidden, out, residual, in_place=True)
        mixed = self.graph.op(F32 * self.hidden * tokens, attended)
        if last:
            mixed = self._with_logits(mixed)
        return self.op(self.hidden, out, mixed, in_place=True)

    def _with_logits(self, x: int) -> int:
        """The tokens with logits, the only ones from here on."""
        self.tokens = self._outputs
        return self.op(self.hidden, x, self._rows)

    def _attention(self, dims: Dims, layer: Layer, x: int) -> int:
        """Of all heads, to be multiplied with the output's matrix."""
        cache, graph = layer.cache, self.graph
        queries = dims["attn_output.weight"][-1]
        windowed = self._windowed(layer)
        places = [self._places[windowed]] if windowed in self._places else []
        if "attn_kv_a_mqa.weight" in dims:
            return self._latent(dims, layer, x)
        if "attn_qkv.weight" in dims:
            fused = self.op(dims["attn_qkv.weight"][0], x)
            q = self.op(queries, graph.view(fused))
            k = self.op(cache.k, graph.view(fused))
            graph.use(k)
            graph.use(graph.view(fused), *places)
        else:
            full = q = self.op(dims["attn_q.weight"][0], x)
            gated = dims["attn_q.weight"][0] > queries
            if gated:
                q = self.op(queries, graph.view(full))
            if windowed or self._made.arch not in _UNROTATED:
                q = self.op(queries, graph.view(q))
            if not cache.borrowed:
                k, v = self.op(cache.k, x), self.op(cache.v, x)
                graph.use(k)
                graph.use(v, *places)
        attended = self._scores(q, self._window if windowed else self._cells, queries, self._masks[windowed])
        if "attn_qkv.weight" not in dims and gated:
            gate = self.op(queries, graph.view(full))
            attended = self.op(queries, attended, gate, in_place=True)
        return attended

    def _scores(self, q: int, cells: int, values: int, mask: int) -> int:
        if self._flash:
            return self.graph.view(self.op(values, q, mask))
        scores = self.op(self._made.heads * cells, q)
        weights = self.op(self._made.heads * cells, scores, mask, in_place=True)
        return self.op(values, self.op(values, weights))

    def _latent(self, dims: Dims, layer: Layer, x: int) -> int:
        graph, heads = self.graph, self._made.heads
        rank = max(0, layer.cache.products // max(heads, 1) - layer.cache.k)
        width = dims["attn_kv_a_mqa.weight"][0]
        if "attn_q_a.weight" in dims:
            down = self.op(dims["attn_q_a.weight"][0], x)
            q = self.op(dims["attn_q_b.weight"][0], self.op(dims["attn_q_a.weight"][0], down, in_place=True))
        else:
            q = self.op(dims["attn_q.weight"][0], x)
        rope = width - rank
        kv = self.op(width, x)
        q_rope = self.op(heads * rope, graph.view(q))
        k_rope = self.op(rope, graph.view(kv))
        normed = self.op(rank, graph.view(kv))
        absorbed = self.op(heads * rank, graph.view(q))
        whole = self.op(heads * width, q_rope, graph.view(absorbed))
        key = self.op(width, k_rope, normed)
        graph.use(key)
        mask = self._masks[False]
        values = dims["attn_output.weight"][-1]
        if self._flash:
            out = self.op(heads * rank, whole, mask)
        else:
            scores = self.op(heads * self._cells, whole)
            weights = self.op(heads * self._cells, scores, mask, in_place=True)
            # V is a part of K, transposed here.
            out = self.op(heads * rank, weights, graph.op(F16 * rank * self._cells))
        return self.op(values, self.op(values, out))

    def _feed_forward(self, dims: Dims, x: int) -> int:
        if "ffn_gate_inp.weight" not in dims or not self._made.experts_used:
            return self._dense(dims, x, "")
        out = self._experts(dims, x)
        if "ffn_up_shexp.weight" in dims:
            out = self.op(self.hidden, out, self._dense(dims, x, "_shexp"), in_place=True)
        return out

    def _dense(self, dims: Dims, x: int, suffix: str) -> int:
        up_width, width = dims[f"ffn_up{suffix}.weight"][0], dims[f"ffn_down{suffix}.weight"][-1]
        up = self.op(up_width, x)
        if f"ffn_gate{suffix}.weight" in dims:
            act = self.op(width, self.op(width, x), up)
        else:
            act = self.op(width, up, in_place=up_width == width)
        return self.op(self.hidden, act)

    def _experts(self, dims: Dims, x: int) -> int:
        graph, made = self.graph, self._made
        used, width, hidden = made.experts_used, dims["ffn_down_exps.weight"][-1], self.hidden
        logits = self.op(made.experts, x)
        shares = self.op(made.experts, logits, in_place=True)
        chosen = graph.view(self.op(made.experts, shares))
        weights = self.op(used, graph.view(shares), chosen)
        if made.arch == "llama4":
            x = self.op(used * hidden, self.op(used * hidden, x), weights, in_place=True)
        up = self.op(used * width, x, chosen)
        if "ffn_gate_exps.weight" in dims:
            act = self.op(used * width, self.op(used * width, x, chosen), up)
        else:
            act = self.op(used * width, up, in_place=True)
        down = self.op(used * hidden, act, chosen)
        if made.arch != "llama4":
            down = self.op(used * hidden, down, weights, in_place=True)
        # The first two make a tensor, to which the others are added in place.
        views = [graph.view(down) for _ in range(min(used, 2))]
        return self.op(hidden, *views)

    def _gemma3n(self, stream: int) -> int:
        """Its hidden state has several copies, which each layer predicts and corrects (AltUp), and each layer
        has an input of its own."""
        graph, hidden = self.graph, self.hidden
        dims = Dims(self._made.others)
        inputs, rest = dims["per_layer_model_proj.weight"][0], dims["altup_proj.weight"][0] * hidden
        chosen, projected = self.op(inputs), self.op(inputs, stream)
        by_layer = self.op(inputs, self.op(inputs, projected, chosen, in_place=True))
        copies = self.op(rest + hidden, stream, self.op(rest, self.op(rest, stream)))
        for each in self._made.layers():
            copies = self._altup(each, copies, by_layer, rest + hidden)
        others = self.op(rest, graph.view(copies))
        return self._with_logits(self.op(hidden, graph.view(copies), graph.view(others)))

    def _altup(self, layer: Layer, copies: int, by_layer: int, width: int) -> int:
        graph, hidden = self.graph, self.hidden
        dims = Dims(layer.pieces)
        mixed = self.op(width, self.op(width, self.op(width, copies)))
        predicted = self.op(width, mixed, copies, in_place=True)
        active = graph.view(predicted)
        x = self.op(hidden, active)
        laurel = self.op(hidden, self.op(dims["laurel_l.weight"][0], x))
        laurel = self.op(hidden, laurel, x, in_place=True)
        out = self.op(hidden, self._attention(dims, layer, x))
        out = self.op(hidden, out, active, in_place=True)
        out = self.op(hidden, out, laurel, in_place=True)
        x = self.op(hidden, out)
        ffn = dims["ffn_up.weight"][0]
        up, gate = self.op(ffn, x), self.op(ffn, x)
        graph.use(self.op(ffn, gate))  # its spread, to cut it
        act = self.op(ffn, up, self.op(ffn, gate, in_place=True), in_place=True)
        out = self.op(hidden, self.op(hidden, act), out, in_place=True)
        change = self.op(hidden, out, active, in_place=True)
        corrected = self.op(width, self.op(width, change), predicted, in_place=True)
        first = self.op(dims["proj.weight"][-1], graph.view(corrected), graph.view(by_layer))
        rest = self.op(width - hidden, graph.view(corrected), self.op(hidden, first))
        return self.op(width, graph.view(corrected), rest)
