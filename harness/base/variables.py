"""Which environment variables other processes and records get; text without the credentials of URLs."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECRET = re.compile(r"KEY|TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
# uv asks its indexes with these, and a proxy has its name and password in its URL.
_OF_INDEX = re.compile(r"UV_(?!PUBLISH_)|\w+_PROXY$", re.IGNORECASE)
# What may change a measurement is recorded: by prefix, where only the libraries below a worker read such
# names, and one by one, where services share the prefix (LLAMA_CLOUD_API_KEY).
_LIBRARY = re.compile(
    r"""(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|DNNL|ONEDNN|MALLOC|GGML|CUBLAS|CUBLASLT|CUDNN|NVIDIA_TF32|HIP|HSA|ROCR
    |ROCBLAS|HIPBLASLT|MIOPEN|VK|PYTORCH|TORCHINDUCTOR|TORCHDYNAMO|TORCH_BLAS|TORCH_CUDNN|TORCH_MKLDNN|TRITON
    |GPTQMODEL|GPTQ|AWQ)_\w+
    |LD_(LIBRARY_PATH|PRELOAD|BIND_NOW)|GLIBC_TUNABLES|ATEN_CPU_CAPABILITY|TOKENIZERS_PARALLELISM
    |CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MODULE_LOADING|AUTO_BOOST|HOME|PATH
        |FORCE_PTX_JIT|DISABLE_PTX_JIT|CACHE_DISABLE|CACHE_MAXSIZE|CACHE_PATH|SCALE_LAUNCH_QUEUES
        |MPS_PIPE_DIRECTORY|MPS_ACTIVE_THREAD_PERCENTAGE)
    |LLAMA_(ATTN_ROT_DISABLE|GRAPH_REUSE_DISABLE|SET_ROWS|TRACE|CPP_LIB_PATH)
    |QEMU_CPU
    |TORCH_(ALLOW_TF32_CUBLAS_OVERRIDE|COMPILE_DISABLE|LOGS)|TRANSFORMERS_VERBOSITY|BNB_(CUDA|ROCM)_VERSION|HARNESS_LOCKS""",
    re.VERBOSE,
)
# A worker gets those, and what places files and finds compilers: torch.compile and Triton start one.
_PLAIN = re.compile(
    r"""PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|XDG_CACHE_HOME|HF_HOME|HF_HUB_CACHE|HF_MODULES_CACHE
    |SYSTEMROOT|USERPROFILE|TEMP|TMP|CC|CXX|ROCM_PATH|SSL_CERT_FILE|SSL_CERT_DIR
    |HARNESS_\w+|COVERAGE_\w+""",
    re.VERBOSE,
)
_USER = re.compile(r"(://)[^\s/?#'\"<>]*@")
# Up to the next :// alone: else a text of many takes the square of its length.
_QUERY = re.compile(r"(://(?:(?!://)[^\s?'\"<>])*)\?[^\s'\"<>`)]+")


def recorded(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that a record has: those that may change a measurement."""
    names = sorted(name for name in variables if _LIBRARY.fullmatch(name) and not _SECRET.search(name))
    return {name: variables[name] for name in names}


def for_workers(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that a worker gets: a stack runs the code of many, and needs no credential."""
    plain = [name for name in variables if _PLAIN.fullmatch(name) and not _SECRET.search(name)]
    return {name: variables[name] for name in plain} | recorded(variables)


def for_builds(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that uv and the builds it starts get: of credentials, those of package indexes alone."""
    return {
        name: value
        for name, value in variables.items()
        if _OF_INDEX.match(name) or not (_SECRET.search(name) or redacted(value) != value)
    }


def redacted(text: str) -> str:
    """The text with *** for the user, the password and the query of each URL."""
    return _QUERY.sub(r"\1?***", _USER.sub(r"\1***@", text))
