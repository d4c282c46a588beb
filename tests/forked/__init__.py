"""Workers that are forked from a process which has a stack's libraries imported: torch takes seconds, a fork
milliseconds. For tests of a stack's results, never of its memory.

An environment is made whose python is the client: it hands a worker's command line, variables and descriptors
to the server over a socket, and ends as the worker does. Any other use of it is the real python.
"""

import os
import shlex
import socket
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
IMPORTS = {  # of each stack, what its workers import that takes long
    "hf": ["torch", "transformers.modeling_utils"],
    "bnb": ["torch", "transformers.modeling_utils", "bitsandbytes"],
    "torchao": ["torch", "transformers.modeling_utils", "torchao.quantization"],
    "gptq": ["torch", "transformers.modeling_utils", "auto_gptq"],
    "autoawq": ["torch", "transformers.modeling_utils", "awq"],
    "gptqm": ["torch", "transformers.modeling_utils", "gptqmodel"],
    "vllm": ["torch", "transformers.modeling_utils", "vllm.v1.engine.llm_engine"],
    "ort": ["torch", "onnxruntime_genai.models", "builder"],  # `builder` is on the path that the second adds
    "ct2": ["torch", "transformers.modeling_utils"],  # for its conversions alone
}


class Server:
    """One process of an environment's python, which ends with this one."""

    def __init__(self, real: Path, stack: str, folder: Path) -> None:
        """`folder`: to become an environment as the harness knows them, like the one in `real`."""
        (folder / "bin").mkdir(parents=True)
        for path in real.iterdir():
            if path.name != "bin":
                (folder / path.name).symlink_to(path)
        python, self.python = real / "bin" / "python", folder / "bin" / "python"
        address = f"harness-{os.getpid()}-{folder.name}"  # in Linux' abstract namespace: no path, no limit
        settings = f"REAL, ADDRESS = {str(python)!r}, {address!r}\n"
        # A shell starts it, as pip does where a path is long or has spaces; Python reads that as a string.
        begin = "#!/bin/sh\n'''exec' " + shlex.quote(str(python)) + ' -IS "$0" "$@"\n' + "' '''\n"
        self.python.write_text(f"{begin}{settings}{(HERE / 'client.py').read_text()}")
        self.python.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"\0{address}")
            listening.listen(16)
            self._process = subprocess.Popen(
                [python, "-I", "-X", "utf8", HERE / "server.py", str(listening.fileno()), *IMPORTS[stack]],
                stdin=subprocess.PIPE,  # it ends when this closes, however this process ends
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )

    def stop(self) -> None:
        self._process.communicate()
