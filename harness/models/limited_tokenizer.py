"""Tokenize in a process with limits: `python -I limited_tokenizer.py FILE COUNT`, the text on stdin."""

import ctypes
import json
import resource
import signal
import sys

MEMORY_BYTES = 2 << 30  # 33 MB of tokenizer.json, the largest known, take 0.3 GB
CPU_S = 60  # not of wall time: the machine may be busy
PR_SET_PDEATHSIG = 1


def main(path: str, count: int) -> None:
    """Print {"ids": the first `count` of them}, or {"error": a clause}. Past a limit the process dies."""
    for what, most in ((resource.RLIMIT_DATA, MEMORY_BYTES), (resource.RLIMIT_CPU, CPU_S)):
        hard = resource.getrlimit(what)[1]  # -1: none
        resource.setrlimit(what, (most if hard < 0 else min(most, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the controller
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        text = sys.stdin.buffer.read().decode()
        answer: object = {"ids": tokenizer.encode(text, add_special_tokens=False).ids[:count]}
    except BaseException as mistake:  # a panic of the library is no Exception
        answer = {"error": (str(mistake).strip() or type(mistake).__name__).splitlines()[0][:200]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
