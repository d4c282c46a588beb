"""What a record keeps of a model that is not dense, and a decode step's demand from that. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from harness.theory import decoder
from harness.theory.decoder import Decoder
from harness.theory.demand import STATE_BYTES
from harness.theory.floors import Demand, Reach


def facts(made: Decoder) -> dict[str, Any]:
    """Its architecture, experts, active parameters, and what its layers keep of earlier tokens, by kind."""
    return {
        "architecture": made.arch,
        "experts": made.experts,
        "experts_used": made.experts_used,
        "layer_params": decoder.active_layer_params(made),
        "lm_head_params": decoder.lm_head_params(made),
        "caches": [{"layers": layers, **asdict(cache)} for cache, layers in decoder.kinds(made).items()],
    }


def demand_of(
    known: Mapping[str, Any],
    weight_bytes: float,
    lm_head_bytes: float,
    expert_bytes: float,
    k_bytes: float,
    v_bytes: float,
    latent: bool = True,
) -> Demand:
    """A decode step's bytes and FLOP from recorded `facts`.

    `weight_bytes`: that one step reads, `lm_head_bytes` among them; `expert_bytes`: of all experts.
    `k_bytes`, `v_bytes`: of an element of the cache. `latent`: cached as such, not as the keys and values
    made from it.
    """
    reaches = []
    for each in known["caches"]:
        k, v = each["k"], each["v"]
        if not latent and each["expanded"]:
            k, v = each["expanded"] / 2, each["expanded"] / 2
        if k:
            bytes_of_token = each["layers"] * (k * k_bytes + v * v_bytes)
            flops = 2.0 * each["layers"] * each["products"]
            reaches.append(Reach(bytes_of_token, flops, each["window"], each["chunked"]))
    return Demand(
        layer_params=known["layer_params"],
        lm_head_params=known["lm_head_params"],
        layer_bytes=weight_bytes - lm_head_bytes,
        lm_head_bytes=lm_head_bytes,
        embedding_bytes=0.0,
        reaches=tuple(reaches),
        state_bytes=float(sum(each["layers"] * each["state"] for each in known["caches"]) * STATE_BYTES),
        expert_bytes=expert_bytes,
        experts=known["experts"],
        experts_used=known["experts_used"],
    )
