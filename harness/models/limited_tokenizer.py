"""Tokenize in a process with limits: `python -I limited_tokenizer.py FILE COUNT BYTES SECONDS`, the text on
stdin; the limits are of memory and CPU time."""

import ctypes
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PR_SET_PDEATHSIG = 1


def main(path: str, count: int, memory_bytes: int, cpu_s: int) -> None:
    """Print {"ids": the first `count` of them, "bos": as bos_of}, or {"error": a clause}. Past a limit the
    process dies (Windows has none)."""
    if sys.platform != "win32":
        for resource_kind, most in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CPU, cpu_s)):
            hard = resource.getrlimit(resource_kind)[1]  # -1: none
            resource.setrlimit(resource_kind, (most if hard < 0 else min(most, hard), hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the controller
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        text = sys.stdin.buffer.read().decode()
        bos = bos_of(tokenizer, Path(path).with_name("tokenizer_config.json"))
        read_special_as_text(tokenizer)
        answer: object = {"ids": tokenizer.encode(text, add_special_tokens=False).ids[:count], "bos": bos}
    except BaseException as mistake:  # a panic of the library is no Exception
        answer = {"error": (str(mistake).strip() or type(mistake).__name__).splitlines()[0][:200]}
    print(json.dumps(answer))


def read_special_as_text(tokenizer: "Tokenizer") -> None:
    """Give a special token that is written in a text no id of its own, as llama.cpp does (parse_special of
    llama_tokenize; llama-perplexity). Its converter counts added tokens by their form too
    (does_token_look_special of convert_hf_to_gguf.py)."""
    added = tokenizer.get_added_tokens_decoder().values()
    by_form = [
        token.content for token in added if token.content.startswith("<|") and token.content.endswith("|>")
    ]
    tokenizer.add_special_tokens(by_form)
    tokenizer.encode_special_tokens = True


def bos_of(tokenizer: "Tokenizer", settings_path: Path) -> int | None:
    """The id that belongs in front of a text; None: none. As in llama.cpp's converter (gguf-py), a
    setting in tokenizer_config.json precedes the post-processor of tokenizer.json."""
    with_special, alone = (tokenizer.encode("a", add_special_tokens=added).ids for added in (True, False))
    in_front = with_special[0] if with_special and with_special[1 : 1 + len(alone)] == alone else None
    settings = json.loads(settings_path.read_text("utf-8")) if settings_path.is_file() else {}
    if not isinstance(adds_bos := settings.get("add_bos_token"), bool):
        return in_front
    named = settings.get("bos_token")
    named = named.get("content") if isinstance(named, dict) else named
    by_name = tokenizer.token_to_id(named) if isinstance(named, str) else None
    return (in_front if by_name is None else by_name) if adds_bos else None


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
