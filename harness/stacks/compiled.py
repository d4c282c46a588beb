"""Whether the compiled modules of an environment import: each in a separate process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

from harness.system.variables import for_builds

LIMIT_S = 300.0  # torch's CUDA build takes ten seconds on a cold disk
# Kernels link to torch's libraries, which only its own import finds.
_IMPORT = """
import importlib, importlib.util, sys
if importlib.util.find_spec("torch"):
    import torch
importlib.import_module(sys.argv[1])
"""
_PYTHON_ERROR = re.compile(r"[\w.]*(?:Error|Exception): (?P<what>.+)")


def why_not(python: Path, module: str) -> str | None:
    """Why a module does not import under an environment's python, e.g. built for another torch or a missing
    library; null if it imports."""
    # Importing a kernel needs no GPU; hide it, since a measurement may be using it.
    variables = for_builds(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    try:
        ran = subprocess.run(
            [python, "-I", "-c", _IMPORT, module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=variables,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not imported within {LIMIT_S / 60:g} min"
    if not ran.returncode:
        return None
    if ran.returncode < 0:
        return f"its import is killed by {signal.Signals(-ran.returncode).name}"
    lines = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
    errors = [match["what"] for line in lines if (match := _PYTHON_ERROR.fullmatch(line))] or lines
    # Drop the environment's own folders from the message.
    return re.sub(r"(?<!\S)/\S*/", "", errors[-1])[:300] if errors else f"exit status {ran.returncode}"
