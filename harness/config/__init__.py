"""A YAML file to a typed Experiment, every mistake in it one sentence. Reads that file only."""

from harness.config.experiment import (
    Decode,
    Exclude,
    Experiment,
    Grow,
    MaxCtx,
    Model,
    Protocol,
    Variant,
    Warmup,
    Weights,
    Workload,
)
from harness.config.load import load
from harness.config.mistakes import ConfigError

__all__ = [
    "ConfigError",
    "Decode",
    "Exclude",
    "Experiment",
    "Grow",
    "MaxCtx",
    "Model",
    "Protocol",
    "Variant",
    "Warmup",
    "Weights",
    "Workload",
    "load",
]
