"""`kind: reported`: a published result, as in results/published/."""

from typing_extensions import NotRequired, TypedDict

from harness.records.common import Common
from harness.records.values import (
    Above0,
    Count,
    Number,
    Positive,
    Switch,
    Text,
)


class Source(TypedDict):
    title: Text
    url: Text
    license: Text
    tables: dict[str, Text]
    """file of the table -> its row"""
    series: Text | None
    """where the series comes from, or null"""
    prefill_series: Text | None
    notes: list[Text]
    """further facts"""


class Reported(TypedDict):
    """Figures as published; null if not published."""

    bpw: Above0 | None
    prefill_ms: Above0 | None
    B_ms: Number | None
    W_tokens_per_ms: Above0 | None
    file_bytes: Count | None
    model_bytes: Count | None
    """all tensors"""
    model_buffer_bytes: Count | None
    """tensors on the device"""
    vram_bytes: Count | None
    """after load"""
    kv_buffer_bytes: Count | None
    """at `kv_buffer_n_ctx`"""
    kv_buffer_n_ctx: Positive | None
    max_ctx: Positive | None
    max_ctx_is_target: Switch
    """a longer one might fit"""
    perplexity: Above0 | None
    perplexity_stderr: NotRequired[Above0 | None]
    """its standard error, as llama.cpp prints it after +/-"""
    printed: dict[str, dict[str, Text]]
    """the rows as printed, text by column by table"""


class OnlyReported(TypedDict):
    """Keys that no other kind has."""

    n_counts_from: Count
    """0: the `n` of `tokens.parquet` is the source's, and its first position is 0; 1: as here"""
    source: Source
    reported: Reported


class Published(Common, OnlyReported):
    """A published result."""
