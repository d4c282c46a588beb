"""Small quantized checkpoints, made of a 16-bit one: `python tiny_formats.py SOURCE TARGET FORMAT...` under
hf's interpreter. compressed-tensors makes its schemes (W4A16, NVFP4...). fp8 and mxfp4 are written here after
transformers' layout: it quantizes to them on GPUs alone.
"""

import json
import sys
from pathlib import Path
from typing import Any

FP8_BLOCK = 64
MXFP4 = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
MXFP4 |= {"head_dim": 16, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
MXFP4 |= {"vocab_size": 512, "max_position_embeddings": 512, "tie_word_embeddings": False}


def compressed(source: Path, target: Path, scheme: str) -> None:
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    apply_quantization_config(
        model, QuantizationConfig(config_groups={scheme: ["Linear"]}, ignore=["lm_head"])
    )
    for layer in [module for module in model.modules() if getattr(module, "quantization_scheme", None)]:
        weight, settings = layer.weight.data.float(), layer.quantization_scheme.weights
        given: dict[str, Any] = {}
        if settings.group_size:
            rows = weight.unflatten(1, (-1, settings.group_size))
            low, high = rows.amin(-1), rows.amax(-1)
        elif settings.strategy == "channel":
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        else:
            low, high = weight.min().reshape(1), weight.max().reshape(1)
        if hasattr(layer, "weight_global_scale"):
            given["global_scale"] = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
            layer.weight_global_scale.data.copy_(given["global_scale"])
        scale, _ = calculate_qparams(low, high, settings, **given)
        layer.weight_scale.data.copy_(scale)
        for name in ("input_scale", "input_global_scale"):
            if hasattr(layer, name):
                getattr(layer, name).data.fill_(1.0)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(str(target))


def fp8(source: Path, target: Path) -> None:
    """A float32 scale for each block of a matrix, as in DeepSeek's and Qwen's checkpoints."""
    import torch
    from safetensors.torch import load_file

    stored = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = tensor
        if "_proj.weight" in name:
            blocks = tensor.float().unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
            scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            values = blocks / scale[:, None, :, None]
            stored[name] = values.flatten(0, 1).flatten(1).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
    _write(target, stored, json.loads((source / "config.json").read_text()), FP8)


def mxfp4(target: Path) -> None:
    """gpt-oss's experts: 32 values of 4 bits share a power of two."""
    import torch
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(**MXFP4, dtype="bfloat16")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    stored = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, n_in, n_out = tensor.shape
            size = (experts, n_out, n_in // 32)
            stored[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(118, 122, size, dtype=torch.uint8)
        else:
            stored[name] = tensor
    _write(
        target, stored, config.to_dict() | {"architectures": ["GptOssForCausalLM"]}, {"quant_method": "mxfp4"}
    )


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}


def _write(target: Path, tensors: dict[str, Any], config: dict[str, Any], settings: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    target.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    text = json.dumps(config | {"quantization_config": settings}, default=str)
    (target / "config.json").write_text(text)


if __name__ == "__main__":
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    for name in sys.argv[3:]:
        if name == "mxfp4":
            mxfp4(folder / name)
        elif name == "fp8":
            fp8(source, folder / name)
        else:
            compressed(source, folder / name, name)
