"""Plays flash-attn on a CPU. (batch, tokens, heads, head size), as its own docstrings have it."""

from torch.nn.functional import scaled_dot_product_attention


def flash_attn_func(q, k, v, causal, **_):
    return _attention(q, k, v, causal)


def flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens, causal, **_):
    """Appends k and v after the first `cache_seqlens` tokens of the cache, and attends to all of them."""
    held = int(cache_seqlens[0])
    k_cache[:, held : held + 1], v_cache[:, held : held + 1] = k, v
    return _attention(q, k_cache[:, : held + 1], v_cache[:, : held + 1], causal=False)


def _attention(q, k, v, causal):
    groups = q.shape[2] // k.shape[2]
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
