"""Comments and docstrings name modules that exist."""

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
ELSEWHERE = {  # files of other projects, which comments cite as their source
    *("auto.py", "machete.py", "qlinear_cuda_old.py", "qlinear_exllamav2.py"),  # GPTQ packages
    *("bench_serving.py", "cpu_worker.py", "decorators.py", "kv_cache_utils.py", "utils.py"),  # SGLang, vLLM
    *("cache.py", "gemm.py"),  # AutoAWQ
    *("constants.py", "convert_hf_to_gguf.py", "vocab.py"),  # llama.cpp
    *("conversion_mapping.py",),  # transformers
    *("cpp_extension.py", "cudagraph_utils.py", "version.py"),  # torch
}


def test_no_comment_names_a_module_that_is_gone():
    sources = [path for top in ("harness", "runners") for path in (ROOT / top).rglob("*.py")]
    modules = {path.name for path in (*sources, *(ROOT / "benchmarks").rglob("*.py"))} | ELSEWHERE
    gone = []
    for path in sources:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            said = token.type == tokenize.COMMENT or token.string.startswith(('"""', 'r"""'))
            for name in re.findall(r"\b\w+\.py\b", token.string) if said else ():
                if name not in modules:
                    gone.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {name}")
    assert not gone
