"""Plays autoawq's CUDA extension on a CPU: what its three functions compute, by PyTorch."""

import torch
from awq.utils.packing_utils import dequantize_gemm


def layernorm_forward_cuda(x, weight, out, eps):
    """RMS norm, into `out`."""
    wide = x.float()
    out.copy_((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight)


def dequantize_weights_cuda(qweight, scales, qzeros, *_):
    return dequantize_gemm(qweight, qzeros, scales, 4, qweight.shape[0] // scales.shape[0])


def gemm_forward_cuda(x, qweight, scales, qzeros, split_k):
    return x @ dequantize_weights_cuda(qweight, scales, qzeros)
