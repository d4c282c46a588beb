"""config.json as a Decoder. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.base import bounds, data
from harness.theory.decoder import Decoder, Experts, Heads, dense
from harness.theory.tensors import FORMATS, Packing

# Values of a parsed config.json, checked: nothing in the file is trusted. Pure.


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
        given = default if self.get(key) is None else self[key]
        if given is None:
            raise ConfigJsonError(f"{key} is missing")
        if not isinstance(given, int) or not is_whole(given, most, least):
            raise ConfigJsonError(f"{key} must be a whole number from {least} to {most}, not {shown(given)}")
        return given

    def number(self, key: str, below: float, default: float | None = None) -> float:
        given = default if self.get(key) is None else self[key]
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < below:
            raise ConfigJsonError(f"{key} must be a number between 0 and {below:g}, not {shown(given)}")
        return float(given)

    def flag(self, key: str, default: bool = False, prefix: str = "") -> bool:
        given = default if self.get(key) is None else self[key]
        if not isinstance(given, bool):
            raise ConfigJsonError(f"{prefix}{key} must be true or false, not {shown(given)}")
        return given

    def inner(self, key: str) -> Settings | None:
        """The object at a key; None if there is none."""
        given = self.get(key)
        return settings_of(given, key) if isinstance(given, Mapping) else None


def settings_of(given: object, what: str) -> Settings:
    """Wrap a JSON object as Settings. Raises ConfigJsonError for another value."""
    if not isinstance(given, Mapping):
        raise ConfigJsonError(f"{what} must be a mapping, not {shown(given)}")
    return given if isinstance(given, Settings) else Settings(given)


def is_whole(given: object, most: int, least: int = 1) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and least <= given <= most


def shown(given: object) -> str:
    """A value as a message quotes it: short, printable, on one line."""
    if given is None or isinstance(given, bool):
        return {None: "null", True: "true", False: "false"}[given]
    if isinstance(given, str):
        return ascii(given[:40]) + ("..." if len(given) > 40 else "")
    if isinstance(given, int):
        return str(given) if abs(given) < 10**15 else "a huge number"
    if isinstance(given, float):
        return f"{given:g}"
    return "a mapping" if isinstance(given, Mapping) else "a list"


# A config.json as one family of models reads it: checked values, and the kind of each layer. Pure.


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
        """The window of each layer, None for all tokens. `every`: one layer in so many, the last of them,
        attends to all tokens if no layer_types say which; None: no layer.

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


# A dense model from its parsed config.json, as transformers would build it. Pure.
#
# The file is not trusted: for any content the result is a Decoder or a ConfigJsonError.
# Defaults and biases: configuration_*.py and modeling_*.py of transformers' llama, mistral, qwen2 and qwen3.


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class _Family:
    """llama.cpp's name of the architecture, transformers' name of the class, defaults of missing keys."""

    arch: str
    causal: str
    context: int
    head_dim: int | None = None


_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", context=2048),
    "mistral": _Family("llama", "MistralForCausalLM", context=131_072),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM", context=32_768),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM", context=32_768, head_dim=128),
}


DENSE = tuple(_FAMILIES)
"""model_type of what `dense_of` describes."""


def dense_of(values: Values) -> Decoder:
    """A dense Llama, Mistral, Qwen2 or Qwen3 model for text.

    A missing number without a default is an error, never guessed. Without `num_key_value_heads` every head
    has its own. A sliding window counts if the model uses it (Mistral; Qwen with use_sliding_window) in all
    layers; one in some layers is an error.
    """
    kind, family = values.kind, _FAMILIES[values.kind]
    for key in EXPERTS:
        if values.count(key, default=1, least=0) > 1:
            raise ConfigJsonError(f"{kind} is a mixture of experts; only dense models are known")
    if (names := values.get("architectures")) is not None and not _is_causal(values, kind):
        first = names[0] if isinstance(names, list) and names else names
        raise ConfigJsonError(f"architectures must name {family.causal}, not {shown(first)}")
    defaults = {"max_position_embeddings": family.context, "head_dim": family.head_dim}
    values = Values(values | {key: given for key, given in defaults.items() if values.get(key) is None})
    heads, layers = values.heads(), values.layers
    attention_bias = kind in ("llama", "qwen3") and values.flag("attention_bias")
    return dense(
        arch=family.arch,
        vocab_size=values.vocab,
        hidden_size=values.hidden,
        layers=layers,
        intermediate_size=values.count("intermediate_size"),
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        tied=values.tied,
        qkv_bias=kind == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=kind == "llama" and values.flag("mlp_bias"),
        qk_norm=kind == "qwen3",
        rope_theta=_theta(values),
        norm_eps=values.number("rms_norm_eps", 1, default=1e-6),
        context=values.context,
        window=_window(values, kind, layers),
    )


def dense_kind(config: Settings) -> str | None:
    """The model_type of a file without one, by its architectures; None: another, or none."""
    return next((kind for kind in DENSE if _is_causal(config, kind)), None)


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint's weights are stored. `method`: as transformers names it. `words`: for people.
    `options`: the options that a stack needs to apply the method. `obstacle`: why transformers would
    dequantize the weights to other values; empty if it would not. `mixed`: GPTQ whose layers differ."""

    method: str
    words: str
    options: Mapping[str, str | int | float] = field(default_factory=dict)
    obstacle: str = ""
    mixed: bool = False


def quantization_of(config: object) -> Quantization | None:
    """How the weights are quantized ("gptq 4-bit, group 128"); None if they are not.

    Invalid details are omitted; an invalid method is a ConfigJsonError.
    """
    for key, given in quantization_configs(config):
        if found := _quantization(given, key):
            return found
    return None


def modelopt(given: object) -> Quantization | None:
    """Read ModelOpt's separate file, hf_quant_config.json. Raises ConfigJsonError."""
    known = settings_of(settings_of(given, "hf_quant_config.json").get("quantization"), "quantization")
    return _quantization(Settings(known | {"quant_method": "modelopt"}), "quantization")


def quantization_configs(config: object) -> Iterator[tuple[str, Settings]]:
    """The quantization of a config.json, by its keys. Raises ConfigJsonError."""
    config = settings_of(config, "config.json")
    for place in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config", "quantization"):  # the last is MLX's own
            given = place.get(key) if isinstance(place, Mapping) else None
            if given is not None:
                yield key, settings_of(given, key)


def _quantization(given: Settings, key: str) -> Quantization | None:
    if not given:
        return None
    method = given.get("quant_method")
    if method is None:  # early bitsandbytes and MLX do not name their method
        flags = {"load_in_4bit", "load_in_8bit"} & given.keys()
        method = "bitsandbytes" if flags else "mlx" if "bits" in given else "unnamed"
    if not isinstance(method, str) or not NAME.fullmatch(method):
        raise ConfigJsonError(f"{key}.quant_method must be a name, not {shown(method)}")
    bits, group, blocks = _details(given)
    found = method.lower() + (f" {bits}-bit" if bits else "") + _type_of(given)
    options: dict[str, str | int | float] = {}
    if method.lower() == "bitsandbytes":
        named = given.get("bnb_4bit_quant_type") or "fp4"  # transformers' own default
        kind = str(named) if bits == 4 else "int8"
        nested = bits == 4 and given.get("bnb_4bit_use_double_quant") is True
        options = {"quant": kind, "double_quant": nested}
        found += f" ({kind})" if kind in ("nf4", "fp4") else ""
        found += ", double_quant" if nested else ""
    schemes = _schemes(given)
    rules = ", rules for single layers" if given.get("dynamic") or len(schemes) > 1 else ""
    words = found + (f", {group}" if group else "") + (f", {blocks}" if blocks else "") + rules
    mixed = bool(given.get("dynamic")) or given.get("lm_head") is True
    return Quantization(method.lower(), words, options, _obstacle(given, len(schemes)), mixed)


def _schemes(given: Settings) -> list[object]:
    """The different types of weights in the groups of layers of compressed-tensors."""
    found: list[object] = []
    for group in (given.inner("config_groups") or Settings()).values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            keys = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")
            found += [scheme] if (scheme := [weights.get(key) for key in keys]) not in found else []
    return found


def _obstacle(given: Settings, schemes: int) -> str:
    """Why transformers 5.23 would dequantize to other values (CompressedTensorsDequantize); or empty."""
    if schemes > 1:
        return f"its layers have {schemes} types of weights (config_groups), and transformers dequantizes one"
    if given.get("transform_config"):
        return "its weights are transformed (transform_config), which transformers does not undo"
    sparse = (given.inner("sparsity_config") or Settings()).get("format") not in (None, "dense")
    return "its weights are sparse (sparsity_config), which transformers does not undo" if sparse else ""


def _type_of(given: Settings) -> str:
    """The type of the weights where it says more than their bits: ModelOpt's, Quark's, torchao's, floats; or
    empty."""
    settings = _of_weights(given)
    if settings.get("type") == "float":
        name = str(settings.get("format")).partition("-")[0]
        return " float" + (f" ({name})" if name in _BLOCK_FLOATS else "")
    if (kind := settings.get("quant_type")) is not None:
        return _type_of_torchao(kind)
    name = next((n for key in ("quant_algo", "dtype") if isinstance(n := settings.get(key), str)), "")
    return f" {name.lower()}" if NAME.fullmatch(name) else ""


_BLOCK_FLOATS = ("nvfp4", "mxfp4", "mxfp6", "mxfp8")  # by the names of compressed-tensors' formats
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def _type_of_torchao(kind: object) -> str:
    """The class of its settings in words, Int8WeightOnlyConfig as int8 weight only, and a type in it."""
    if isinstance(kind, Mapping):
        kind = next(iter(kind.values()), None)
        known = settings_of(kind, "quant_type") if isinstance(kind, Mapping) else Settings()
        width = ((known.inner("_data") or Settings()).inner("weight_dtype") or Settings()).get("_data")
        width = f" ({width})" if isinstance(width, str) and NAME.fullmatch(width) else ""
        name = known.get("_type")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            return ""
        return f" {_WORD.sub(' ', name.removesuffix('Config')).lower()}{width}"
    return f" {kind.replace('_', ' ')}" if isinstance(kind, str) and NAME.fullmatch(kind) else ""


def _of_weights(given: Settings) -> Settings:
    """The settings with those of the weights, which compressed-tensors, Quark and HQQ nest."""
    groups = given.inner("config_groups") or Settings()
    places = [(groups, name, "weights") for name in [*groups][:1]]
    places += [(given, "global_quant_config", "weight"), (given, "quant_config", "weight_quant_params")]
    for holder, outer, inner in places:
        if (place := holder.inner(outer)) is not None and (found := place.inner(inner)) is not None:
            return Settings(given | found)
    return given


def _details(given: Settings) -> tuple[int | None, str, str]:
    """Bits, group and blocks; None or empty if not given."""
    settings = _of_weights(given)
    widths = [settings.get(name) for name in ("bits", "w_bit", "num_bits", "nbits")]
    widths += [bits for bits in (4, 8) if settings.get(f"load_in_{bits}bit") is True]
    bits = next((each for each in widths if isinstance(each, int) and is_whole(each, 64)), None)
    size = settings.get("group_size", settings.get("q_group_size"))
    group = f"group {size}" if is_whole(size, MOST) else "one group a row" if size == -1 else ""
    block = settings.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(is_whole(side, MOST) for side in block):
        return bits, group, f"blocks of {block[0]} x {block[1]}"
    return bits, group, ""


def _is_causal(config: Settings, kind: str) -> bool:
    """Whether the architectures name the causal language model; early LLaMA files have LLaMAForCausalLM."""
    names = config.get("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and name.lower() == _FAMILIES[kind].causal.lower() for name in names[:10]
    )


def _theta(config: Settings) -> float:
    """Transformers 5 keeps it in rope_parameters, which takes precedence over the key of transformers 4."""
    inner = config.get("rope_parameters")
    if inner is not None and (known := settings_of(inner, "rope_parameters")).get("rope_theta") is not None:
        return known.number("rope_theta", MOST_THETA)
    return config.number("rope_theta", MOST_THETA, default=10_000.0)


def _window(config: Settings, kind: str, layers: int) -> int | None:
    if kind == "llama" or (kind != "mistral" and not config.flag("use_sliding_window")):
        return None
    if config.get("sliding_window", 4096) is None:  # a missing key is 4096, None is none
        return None
    window = config.count("sliding_window", most=MOST_TOKENS, default=4096)
    if kind == "mistral":
        return window
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise ConfigJsonError(f"layer_types must be a list of {layers}, one for each layer")
        sliding = sum(1 for layer in types if layer == "sliding_attention")
    else:
        sliding = max(0, layers - config.count("max_window_layers", default=28, least=0))
    if 0 < sliding < layers:
        raise NoShape(f"a sliding window over {sliding} of {layers} layers; known: over all or none")
    return window if sliding else None


# Parse the settings of GPTQ or AWQ weights, as the libraries that write them define them. Pure.
#
# Keys: BaseQuantizeConfig of auto-gptq 0.7.1, AwqConfig of autoawq 0.2.9, QuantizeConfig of gptqmodel 7.6.0.


_MOST_BITS = 8
_LARGEST_GROUP = 1 << 20
_USUAL_LAYOUT = {"gptq": "gptq", "awq": "gemm"}


def packing_of(config: object) -> Packing | None:
    """The GPTQ or AWQ settings of a config.json; None if it has none.

    Raises ConfigJsonError.
    """
    for key, given in quantization_configs(config):
        if found := packing_in(given, f"{key}."):
            return found
    return None


def packing_in(config: object, prefix: str = "", method: str | None = None) -> Packing | None:
    """As packing_of, from the settings only. `prefix`: of keys in messages. `method`: for settings without
    a name."""
    settings = settings_of(config, "settings")
    named = settings.get("quant_method") or method
    method = named.lower() if isinstance(named, str) else None
    if method not in FORMATS:
        return None

    def number(keys: tuple[str, str], is_valid: Callable[[int], bool], wanted: str) -> int:
        key = next((key for key in keys if settings.get(key) is not None), None)
        if key is None:
            raise ConfigJsonError(f"{prefix}{keys[0]} is missing")
        value = settings[key]
        if type(value) is not int or not is_valid(value):
            raise ConfigJsonError(f"{prefix}{key} must be {wanted}, not {shown(value)}")
        return value

    layout = "marlin" if settings.flag("is_marlin_format", prefix=prefix) else None
    for key in ("checkpoint_format", "format", *(("version",) if method == "awq" else ())):
        if layout is None and (name := settings.get(key)) is not None:
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ConfigJsonError(f"{prefix}{key} must be a name, not {shown(name)}")
            layout = name.lower()
    asymmetric = settings.flag("zero_point", method != "gptq", prefix)
    return Packing(
        method=method,
        bits=number(("bits", "w_bit"), lambda bits: 2 <= bits <= _MOST_BITS, f"from 2 to {_MOST_BITS}"),
        group_size=number(
            ("group_size", "q_group_size"),
            lambda size: size == -1 or 0 < size <= _LARGEST_GROUP,
            "a size, or -1 for a whole column",
        ),
        symmetric=settings.flag("sym", not asymmetric, prefix),
        act_order=settings.flag("desc_act", prefix=prefix),
        layout=layout or _USUAL_LAYOUT[method],
    )


# Shapes of common model families by name, from the config.json of each in data/models.json. Pure.
#
# A name stands for the base model as the hub has it (Qwen3: the one without a suffix). `vocab_size` is the
# rows stored, padding included: Qwen2's are 151,936 in small models and 152,064 in large ones. Qwen1.5: all
# untied, as in the published tables and the GGUF files (on the hub 0.5B ties its embeddings). -mha: without
# GQA, which the published study lists besides the real ones. The tiny ones are for tests and first tries:
# their speed is meaningless.


SHAPES: dict[str, Decoder] = {
    name: dense_of(Values(config)) for name, config in json.loads(data.text("models.json")).items()
}
