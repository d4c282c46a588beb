"""Read how an environment was compiled. Runs under the environment's Python and imports no package, not even
ours."""

from __future__ import annotations

import ctypes
import json
import re
import sysconfig
from pathlib import Path
from typing import TypedDict

# Functions ggml_cpu_has_* of libggml-cpu (without the prefix), and the names in /proc/cpuinfo.
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


class Build(TypedDict, total=False):
    """How Python, torch and llama.cpp of an environment were compiled."""

    python_debug: bool
    torch_debug: bool
    asserts: bool
    features: list[str] | None


def main() -> None:
    build: Build = {"python_debug": bool(sysconfig.get_config_var("Py_DEBUG"))}
    packages = Path(sysconfig.get_path("platlib"))
    version = packages / "torch" / "version.py"
    if version.exists():
        found = re.search(r"^debug = (True|False)$", version.read_text(), re.MULTILINE)
        build["torch_debug"] = bool(found and found[1] == "True")
    for name in ("libggml-cpu.so", "libggml-cpu.dylib"):
        library = packages / "llama_cpp" / "lib" / name
        if library.exists():
            # The function behind assert() in glibc and macOS; with NDEBUG it is not referenced.
            code = library.read_bytes()
            build["asserts"] = b"\0__assert_fail\0" in code or b"\0___assert_rtn\0" in code
            build["features"] = features(library)
    print(json.dumps(build))


def features(library: Path) -> list[str] | None:
    """The CPU features that ggml was compiled for, by the kernel's names; None if it cannot be loaded."""
    try:
        ggml = ctypes.CDLL(str(library))
        return [theirs for ours, theirs in FEATURES.items() if ggml[f"ggml_cpu_has_{ours}"]()]
    except (AttributeError, OSError):
        return None


if __name__ == "__main__":
    main()
