"""A config.json as one family of models reads it: checked values, and the kind of each layer. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.theory.decoder import Decoder, Experts, Heads
from harness.theory.hf_config import (
    MOST_HEAD_DIM,
    MOST_LAYERS,
    MOST_TOKENS,
    ConfigJsonError,
    Settings,
    is_whole,
    shown,
)

Build = Callable[["Values"], Decoder]
FULL, WINDOW, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


class Values(Settings):
    """The part of a config.json that describes the text model, of one known model_type."""

    def of(self, **defaults: object) -> Values:
        """The same with the family's defaults, for keys that its files leave out."""
        return Values(defaults | self)

    @property
    def kind(self) -> str:
        return str(self["model_type"])

    def maybe(self, key: str, least: int = 1) -> int | None:
        """A whole number, or null."""
        return None if self.get(key) is None else self.count(key, least=least, most=MOST_TOKENS)

    @property
    def hidden(self) -> int:
        return self.count("hidden_size")

    @property
    def layers(self) -> int:
        return self.count("num_hidden_layers", "num_layers", most=MOST_LAYERS)

    @property
    def vocab(self) -> int:
        return self.count("vocab_size")

    @property
    def context(self) -> int:
        return self.count("max_position_embeddings", most=MOST_TOKENS)

    @property
    def tied(self) -> bool:
        return self.flag("tie_word_embeddings")

    def heads(
        self,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: str | None = None,
        gated: bool = False,
        sinks: bool = False,
        fused: bool = False,
    ) -> Heads:
        """Raises ConfigJsonError for heads that do not divide."""
        heads = self.count("num_attention_heads")
        kv_heads = self.count("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ConfigJsonError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        if self.get("head_dim") is None and self.hidden % heads:
            raise ConfigJsonError(
                f"hidden_size {self.hidden} is not a multiple of num_attention_heads {heads}"
            )
        head_dim = self.count("head_dim", default=self.hidden // heads, most=MOST_HEAD_DIM)
        return Heads(heads, kv_heads, head_dim, qkv_bias, o_bias, qk_norm, gated, sinks, fused)

    def experts(self, ffn: str = "moe_intermediate_size", **fields: bool | int) -> Experts:
        """Raises ConfigJsonError for a router that chooses more experts than there are."""
        count = self.count("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        used = self._used()
        if used > count:
            raise ConfigJsonError(f"{used} experts are chosen for a token, of {count}")
        found = Experts(count, used, self.count(ffn))
        return Experts(found.count, found.used, found.ffn, **fields)  # type: ignore[arg-type]

    def _used(self) -> int:
        for key in ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"):
            given = self.get(key)
            if isinstance(given, list) and given and all(each == given[0] for each in given):
                given = given[0]
            if given is not None:
                return Settings({key: given}).count(key)
        return self.count("num_experts_per_tok")

    def kinds(self, known: Sequence[str], otherwise: Callable[[int], str]) -> list[str]:
        """The kind of each layer by layer_types, else by `otherwise`. Raises ConfigJsonError."""
        given = self.get("layer_types")
        if given is None:
            return [otherwise(number) for number in range(self.layers)]
        if not isinstance(given, list) or len(given) != self.layers:
            raise ConfigJsonError(f"layer_types must be a list of {self.layers}, one for each layer")
        for each in given:
            if each not in known:
                raise ConfigJsonError(f"layer_types has {shown(each)}; known: {', '.join(known)}")
        return [str(each) for each in given]

    def windows(self, every: int | None = None, beyond_context: bool = False) -> list[int | None]:
        """The window of each layer, null for all tokens. `every`: one layer in so many, the last of them,
        attends to all tokens if no layer_types say which; null: no layer.

        Raises ConfigJsonError for a window longer than the context, unless `beyond_context`: then it is none.
        """
        window = self.maybe("sliding_window")
        if not window or not self.flag("use_sliding_window", True):
            return [None] * self.layers

        def otherwise(number: int) -> str:
            return FULL if every and (number + 1) % every == 0 else WINDOW

        kinds = self.kinds((FULL, WINDOW), otherwise)
        if window > self.context and WINDOW in kinds and not beyond_context:
            raise ConfigJsonError(f"sliding_window {window} is longer than the context of {self.context}")
        return [window if kind == WINDOW and window < self.context else None for kind in kinds]

    def numbers(self, key: str) -> list[int]:
        """A list of layers' numbers; empty if it is not there. Raises ConfigJsonError."""
        given = self.get(key)
        if given is None:
            return []
        if not isinstance(given, list) or not all(is_whole(each, self.layers - 1, 0) for each in given):
            raise ConfigJsonError(f"{key} must be a list of layers from 0 to {self.layers - 1}")
        return [int(each) for each in given]

    def sparse(self, first_dense: int = 0, every: int = 1) -> list[bool]:
        """Which layers are a mixture: mlp_layer_types, else all but the first ones and mlp_only_layers, one
        in `every`."""
        types = self.get("mlp_layer_types")
        if isinstance(types, list) and len(types) == self.layers:
            return [each == "sparse" for each in types]
        dense = set(self.numbers("mlp_only_layers"))
        return [
            number >= first_dense and (number + 1) % every == 0 and number not in dense
            for number in range(self.layers)
        ]
