"""Parse a YAML file into a typed Experiment; each mistake is one sentence. Reads only that file."""

from harness.config.experiment import (
    Batch,
    Decode,
    Exclude,
    Experiment,
    Grow,
    MaxCtx,
    Model,
    Prefill,
    Protocol,
    Quality,
    Turns,
    Variant,
    Warmup,
    Weights,
    Windows,
    Workload,
)
from harness.config.load import load
from harness.config.yaml_text import ConfigError

__all__ = [
    "Batch",
    "ConfigError",
    "Decode",
    "Exclude",
    "Experiment",
    "Grow",
    "MaxCtx",
    "Model",
    "Prefill",
    "Protocol",
    "Quality",
    "Turns",
    "Variant",
    "Warmup",
    "Weights",
    "Windows",
    "Workload",
    "load",
]
