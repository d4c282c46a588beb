"""CSV export: one line per repeat, all figures at full precision."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from harness.analysis.records.metrics import METRICS
from harness.analysis.rows import Repeat as Row
from harness.dataset.study import bounds
from harness.export.chosen import Repeat
from harness.system.wording import csv_cell

# Columns in this order. An interval becomes two columns; the flags' codes become one text.
FIELDS = (
    *("campaign", "cell", "model", "stack", "variant", "kind", "weights", "machine", "device", "repeat"),
    *("started_utc", "content_key", "workload", "prompt_tokens", "new_tokens", "tokens", "n_ctx", "kv_read"),
    *(
        "bpw",
        "quality",
        "perplexity",
        "kld_mean",
        "kld_mean_ci95",
        "top1",
        "ttft_ms",
        "tokens_per_s",
        "tokens_per_s_ci95",
        "start_tokens_per_s",
        "end_tokens_per_s",
    ),
    *("median_ms", "B_ms", "B_ci95_ms", "W_tokens_per_ms", "W_ci95", "W_identifiable", "robust_B_ms"),
    "plain_B_ms",
    *("robust_W_tokens_per_ms", "shape", "slow_from_n", "B_theory_ms", "B_ratio", "B_measured_ratio"),
    *("W_theory_tokens_per_ms", "W_ratio", "W_measured_ratio", "bandwidth_share", "bandwidth_bytes_per_s"),
    *("model_bytes", "weight_bytes_per_token", "kv_bytes_per_token", "loaded_bytes", "peak_rss_bytes"),
    *("peak_vram_bytes", "peak_allocator_bytes", "max_ctx", "weights_check", "flags"),
    *(COMPUTED := ("pp512", "ttft_8k_ms", "tokens_per_s_16k", "task_s", "task_kept_s")),
)
OF_METRICS = {metric.name: metric.value for metric in METRICS}
INTERVALS = ("tokens_per_s_ci95", "B_ci95_ms", "W_ci95", "kld_mean_ci95")


def text(chosen: Iterable[Sequence[Repeat]]) -> str:
    """A heading and a line per repeat; empty without repeats. An unknown value is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for campaign in chosen:
        for row, _ in campaign:
            writer.writerow([csv_cell(value) for field in FIELDS for value in _values(row, field)])
    heading = ",".join(name for field in FIELDS for name in _names(field))
    return f"{heading}\n{out.getvalue()}" if out.getvalue() else ""


def _names(field: str) -> list[str]:
    return [f"{field}_low", f"{field}_high"] if field in INTERVALS else [field]


def _values(row: Row, field: str) -> list[object]:
    if field in INTERVALS:
        return list(bounds(row, field))
    if field == "flags":
        return [" ".join(dict.fromkeys(flag["code"] for flag in row["flags"]))]
    return [OF_METRICS[field](row) if field in COMPUTED else row.get(field)]
