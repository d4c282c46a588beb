"""Parse a YAML file into a typed Experiment; each mistake is one sentence. Reads only that file."""

from harness.config.experiment import Exclude, Experiment, Model, Protocol, Variant, Warmup, Weights
from harness.config.load import load
from harness.config.mistakes import ConfigError
from harness.config.workloads import Batch, Decode, Grow, MaxCtx, Prefill, Quality, Turns, Windows, Workload

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
