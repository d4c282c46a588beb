"""Faults of this machine's C++ compiler that would crash the builds, and flags that work around them."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

from harness.base.files import small_text
from harness.stacks.header import Environment

# GCC before 11.5, 12.4, 13.3 and 14 declares only the first 8 of the 64 bytes that _tile_loadconfig reads,
# and drops the others as unused (GCC bug 114098; seen with 12.2). llama.cpp's first product on a CPU with AMX
# then ends in SIGILL (its pull request 26954). Without the macro it uses its AVX-512 kernels.
_TILES = "include/amxtileintrin.h"
_FAULTY = '__asm__ volatile ("ldtilecfg'
NO_AMX = "-U__AMX_INT8__"
WHY_NO_AMX = "built without AMX, whose tiles this compiler loses (GCC bug 114098)"


def with_workarounds(environment: Environment) -> Environment:
    """The environment with the flags that its source builds need on this machine; unchanged if none."""
    if not environment.source_builds or not loses_tiles():
        return environment
    flags = {name: f"{os.environ.get(name, '')} {NO_AMX}".strip() for name in ("CFLAGS", "CXXFLAGS")}
    return environment.model_copy(update={"variables": environment.variables | flags})


@cache
def loses_tiles(cpuinfo: Path = Path("/proc/cpuinfo"), compiler: str = "c++") -> bool:
    """Whether code that is compiled here for this CPU would set AMX up wrongly."""
    if " amx_int8" not in (small_text(cpuinfo) or ""):
        return False
    try:
        answer = subprocess.run([compiler, f"-print-file-name={_TILES}"], capture_output=True, text=True)
    except OSError:
        return False
    return _FAULTY in (small_text(Path(answer.stdout.strip())) or "")
