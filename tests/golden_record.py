"""One real record (llama.cpp, tiny-qwen2 q4_k_m), and changed copies of it."""

import copy
import json
from pathlib import Path
from typing import Any

from harness.records import Draft

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "record-1.json").read_text())
BEGUN = {key: GOLDEN[key] for key in Draft.__annotations__ if key in GOLDEN} | {
    "kind": "measured",
    "cell": "m.fake.v.decode.00000000",
    "repeat": 1,
    "started_utc": "2026-11-20T00:00:00+00:00",
    "workload": {"kind": "decode", "prompt_tokens": 25, "new_tokens": 4},
}


def record(**changes: object) -> dict[str, Any]:
    """The golden record with parts changed, as `done__major_faults=3`."""
    changed = copy.deepcopy(GOLDEN)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = changed
        for name in parents:
            place = place[name]
        place[last] = value
    return changed


def write_record(folder: Path, content: object = GOLDEN) -> Path:
    """A folder of a repeat with this record.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(content))
    return folder
