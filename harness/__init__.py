"""CONTROLLER: decides, records, analyses and draws. Never imports a stack.

In Python, as docs/guide/python.md shows: `load_results(path)` reads results or a log as a `Study`, and
`theory_rows([model], [machine])` computes what the hardware allows.
"""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["LogError", "Mistake", "ResultsError", "Study", "load_results", "theory_rows"]

# Imported when used: `harness --help` stays fast, and folders below may import the version. Their
# types are in __init__.pyi.
_MODULES = {
    "LogError": "harness.records.foreign.log",
    "Mistake": "harness.cli",
    "ResultsError": "harness.records",
    "Study": "harness.dataset.study",
    "load_results": "harness.loading",
    "theory_rows": "harness.cli.theory",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
