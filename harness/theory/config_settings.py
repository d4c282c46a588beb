"""Values of a parsed config.json, checked: nothing in the file is trusted. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from harness.base import bounds
from harness.theory.decoder import Decoder
from harness.theory.layer_parts import Experts, Heads

MOST = 10_000_000  # of a width; Llama 3.1 405B has 128,256 at most
MOST_HEAD_DIM = 10_000
MOST_TOKENS = 1_000_000_000
MOST_THETA = 1e15
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


class ConfigJsonError(ValueError):
    """This config.json gives no shape; the message is one printable line of bounded length."""


class NoShape(ConfigJsonError):
    """A valid file, but of a model that cannot be described; transformers may support it."""


class Settings(dict[str, object]):
    """A JSON object of a model's files, read with checks. All methods raise ConfigJsonError."""

    def count(self, *keys: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number: the first of these keys that is there."""
        key = next((key for key in keys if self.get(key) is not None), keys[0])
        value = default if self.get(key) is None else self[key]
        if value is None:
            raise ConfigJsonError(f"{key} is missing")
        if not isinstance(value, int) or not is_whole(value, most, least):
            raise ConfigJsonError(f"{key} must be a whole number from {least} to {most}, not {shown(value)}")
        return value

    def number(self, key: str, below: float, default: float | None = None) -> float:
        value = default if self.get(key) is None else self[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < below:
            raise ConfigJsonError(f"{key} must be a number between 0 and {below:g}, not {shown(value)}")
        return float(value)

    def flag(self, key: str, default: bool = False, prefix: str = "") -> bool:
        value = default if self.get(key) is None else self[key]
        if not isinstance(value, bool):
            raise ConfigJsonError(f"{prefix}{key} must be true or false, not {shown(value)}")
        return value

    def inner(self, key: str) -> Settings | None:
        """The object at a key; None if there is none."""
        value = self.get(key)
        return settings_of(value, key) if isinstance(value, Mapping) else None


def settings_of(value: object, label: str) -> Settings:
    """Wrap a JSON object as Settings. Raises ConfigJsonError for another value."""
    if not isinstance(value, Mapping):
        raise ConfigJsonError(f"{label} must be a mapping, not {shown(value)}")
    return value if isinstance(value, Settings) else Settings(value)


def is_whole(value: object, most: int, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def shown(value: object) -> str:
    """A value as a message quotes it: short, printable, on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return ascii(value[:40]) + ("..." if len(value) > 40 else "")
    if isinstance(value, int):
        return str(value) if abs(value) < 10**15 else "a huge number"
    if isinstance(value, float):
        return f"{value:g}"
    return "a mapping" if isinstance(value, Mapping) else "a list"


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

    def maybe(self, key: str) -> int | None:
        """A whole number, or None."""
        return None if self.get(key) is None else self.count(key, most=MOST_TOKENS)

    @property
    def hidden(self) -> int:
        return self.count("hidden_size")

    @property
    def layers(self) -> int:
        return self.count("num_hidden_layers", "num_layers", most=bounds.MODEL_LAYERS)

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
        return Experts(count, used, self.count(ffn), **fields)  # type: ignore[arg-type]

    def _used(self) -> int:
        for key in ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"):
            value = self.get(key)
            if isinstance(value, list) and value and all(entry == value[0] for entry in value):
                value = value[0]
            if value is not None:
                return Settings({key: value}).count(key)
        return self.count("num_experts_per_tok")

    def kinds(self, allowed: Sequence[str], otherwise: Callable[[int], str]) -> list[str]:
        """The kind of each layer by layer_types, else by `otherwise`. Raises ConfigJsonError."""
        names = self.get("layer_types")
        if names is None:
            return [otherwise(number) for number in range(self.layers)]
        if not isinstance(names, list) or len(names) != self.layers:
            raise ConfigJsonError(f"layer_types must be a list of {self.layers}, one for each layer")
        for name in names:
            if name not in allowed:
                raise ConfigJsonError(f"layer_types has {shown(name)}; known: {', '.join(allowed)}")
        return [str(name) for name in names]

    def windows(self, period: int | None = None, beyond_context: bool = False) -> list[int | None]:
        """The window of each layer, None for all tokens. `every`: one layer in so many, the last of them,
        attends to all tokens if no layer_types say which; None: no layer.

        Raises ConfigJsonError for a window longer than the context, unless `beyond_context`: then it is none.
        """
        window = self.maybe("sliding_window")
        if not window or not self.flag("use_sliding_window", True):
            return [None] * self.layers

        def otherwise(number: int) -> str:
            return FULL if period and (number + 1) % period == 0 else WINDOW

        kinds = self.kinds((FULL, WINDOW), otherwise)
        if window > self.context and WINDOW in kinds and not beyond_context:
            raise ConfigJsonError(f"sliding_window {window} is longer than the context of {self.context}")
        return [window if kind == WINDOW and window < self.context else None for kind in kinds]

    def numbers(self, key: str) -> list[int]:
        """A list of layers' numbers; empty if it is not there. Raises ConfigJsonError."""
        numbers = self.get(key)
        if numbers is None:
            return []
        if not isinstance(numbers, list) or not all(
            is_whole(number, self.layers - 1, 0) for number in numbers
        ):
            raise ConfigJsonError(f"{key} must be a list of layers from 0 to {self.layers - 1}")
        return [int(number) for number in numbers]

    def sparse(self, first_dense: int = 0, period: int = 1) -> list[bool]:
        """Which layers are a mixture: mlp_layer_types, else all but the first ones and mlp_only_layers, one
        in `every`."""
        types = self.get("mlp_layer_types")
        if isinstance(types, list) and len(types) == self.layers:
            return [kind_name == "sparse" for kind_name in types]
        dense = set(self.numbers("mlp_only_layers"))
        return [
            number >= first_dense and (number + 1) % period == 0 and number not in dense
            for number in range(self.layers)
        ]
