"""CONTROLLER: decides, records, analyses and draws. Never imports a stack.

In Python, as docs/guide/python.md shows: `load_results` reads results or a log as a `Study`, `run` measures,
`predict` says what to expect of a model on a machine, `theory_rows` what the hardware allows, and `fit`
analyses a log.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.api.fit import fit
    from harness.api.load import load_results
    from harness.api.prediction import Prediction, predict
    from harness.api.run import run
    from harness.api.theory import theory_rows
    from harness.base.files import Mistake, NotFinished, NotStarted
    from harness.config import ConfigError
    from harness.dataset.study import Study
    from harness.records import ResultsError
    from harness.records.foreign.log import LogError

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "LogError",
    "Mistake",
    "NotFinished",
    "NotStarted",
    "Prediction",
    "ResultsError",
    "Study",
    "fit",
    "load_results",
    "predict",
    "run",
    "theory_rows",
]

# Imported when used: `harness --help` stays fast, and folders below may import the version.
_MODULES = {
    **dict.fromkeys(("Mistake", "NotFinished", "NotStarted"), "harness.base.files"),
    "ConfigError": "harness.config",
    "LogError": "harness.records.foreign.log",
    "ResultsError": "harness.records",
    "Study": "harness.dataset.study",
    "Prediction": "harness.api.prediction",
    "fit": "harness.api.fit",
    "load_results": "harness.api.load",
    "predict": "harness.api.prediction",
    "run": "harness.api.run",
    "theory_rows": "harness.api.theory",
}


if not TYPE_CHECKING:  # type checkers then know that there are no other names

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module 'harness' has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
