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


def comments(path: Path) -> list[tuple[int, str]]:
    """The comments and docstrings of a file, with the lines where they begin."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
    return [
        (token.start[0], token.string)
        for token in tokens
        if token.type == tokenize.COMMENT or token.string.startswith(('"""', 'r"""'))
    ]


def is_there(dotted: str) -> bool:
    """Whether harness.x.y.Name is a module, or a name in the source of one."""
    module, _, name = dotted.rpartition(".")
    if (place := ROOT / dotted.replace(".", "/")).is_dir() or place.with_suffix(".py").exists():
        return True
    source = ROOT / module.replace(".", "/")
    source = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
    return source.exists() and re.search(rf"\b{name}\b", source.read_text("utf-8")) is not None


def test_no_comment_names_a_module_that_is_gone():
    sources = [path for top in ("harness", "runners") for path in (ROOT / top).rglob("*.py")]
    modules = {path.name for path in (*sources, *(ROOT / "benchmarks").rglob("*.py"))} | ELSEWHERE
    gone = []
    for path in sources:
        for line, text in comments(path):
            names = [name for name in re.findall(r"\b\w+\.py\b", text) if name not in modules]
            dotted = re.findall(r"(?<![\w.`/-])(?:harness|runners)(?:\.\w+)+", text)
            names += [name for name in dotted if not is_there(name)]
            gone += [f"{path.relative_to(ROOT)}:{line}: {name}" for name in names]
    assert not gone
