"""How an environment was compiled, asked under its own Python: no package is imported, ours neither."""

from __future__ import annotations

import ctypes
import json
import re
import sysconfig
from pathlib import Path
from typing import Any

# Functions of libggml-cpu without their ggml_cpu_has_, and what the kernel calls that in /proc/cpuinfo.
FEATURES = {
    "avx": "avx",
    "avx2": "avx2",
    "avx_vnni": "avx_vnni",
    "avx512": "avx512f",
    "avx512_vbmi": "avx512vbmi",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx_int8": "amx_int8",
    "bmi2": "bmi2",
    "f16c": "f16c",
    "fma": "fma",
    "neon": "asimd",
    "dotprod": "asimddp",
    "matmul_int8": "i8mm",
    "sve": "sve",
}


def main() -> None:
    said: dict[str, Any] = {"python_debug": bool(sysconfig.get_config_var("Py_DEBUG"))}
    packages = Path(sysconfig.get_path("platlib"))
    version = packages / "torch" / "version.py"
    if version.exists():
        found = re.search(r"^debug = (True|False)$", version.read_text(), re.MULTILINE)
        said["torch_debug"] = found and found[1] == "True"
    for name in ("libggml-cpu.so", "libggml-cpu.dylib"):
        library = packages / "llama_cpp" / "lib" / name
        if library.exists():
            # What assert() calls, by glibc's name and by macOS's: with NDEBUG nothing does.
            code = library.read_bytes()
            said["asserts"] = b"\0__assert_fail\0" in code or b"\0___assert_rtn\0" in code
            said["features"] = features(library)
    print(json.dumps(said))


def features(library: Path) -> list[str] | None:
    """What ggml was compiled for, in the kernel's words; null where it does not load."""
    try:
        ggml = ctypes.CDLL(str(library))
        return [theirs for ours, theirs in FEATURES.items() if ggml[f"ggml_cpu_has_{ours}"]()]
    except (AttributeError, OSError):
        return None


if __name__ == "__main__":
    main()
