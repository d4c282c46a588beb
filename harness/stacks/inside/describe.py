"""What an interpreter is and has, as JSON in a file: `python -I describe.py FILE`, run under it by path.

Runs under any Python 3, so that one that is too old can be named. Imports no package: torch would take
seconds. Writes to a file, since start-up code of the interpreter may print.
"""

import json
import os
import platform
import re
import sys
from pathlib import Path


def main(path: str) -> None:
    version = platform.python_version()
    found = {
        "python": version,
        "architecture": platform.machine(),
        # For the markers of requirements (PEP 508).
        "markers": {
            "implementation_name": sys.implementation.name,
            "os_name": os.name,
            "platform_machine": platform.machine(),
            "platform_python_implementation": platform.python_implementation(),
            "platform_release": platform.release(),
            "platform_system": platform.system(),
            "platform_version": platform.version(),
            "python_full_version": version,
            "python_version": ".".join(version.split(".")[:2]),
            "sys_platform": sys.platform,
        },
        "distributions": _distributions(),
    }
    with Path(path).open("w", encoding="utf-8") as file:
        json.dump(found, file)


def _distributions() -> "dict[str, dict[str, object]] | None":
    """By name as written: version, requirements, and for torch the CUDA version of the build (None: none).
    The first on the path is imported. Null before Python 3.8."""
    try:
        from importlib.metadata import distributions
    except ImportError:
        return None
    found: dict[str, dict[str, object]] = {}
    for each in distributions():
        name = each.metadata["Name"]
        if name and name not in found and each.version:
            found[name] = {"version": each.version, "requires": each.requires or []}
            if name.lower() == "torch":
                found[name]["cuda"] = _cuda(Path(str(each.locate_file("torch/version.py"))))
    return found


def _cuda(path: Path) -> "str | None":
    """Read torch/version.py, as in `cuda: Optional[str] = '13.0'`."""
    try:
        match = re.search(r"(?m)^cuda\b.*=\s*'([\d.]+)'", path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match and match.group(1)


if __name__ == "__main__":
    main(sys.argv[1])
