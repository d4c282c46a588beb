"""Entry point, run by path under a stack's interpreter: `python -I runners REQUEST EVENTS_FD GO_ON_FD
ALIVE_FD`."""

import importlib.util
import sys
from pathlib import Path

# `python -I path/to/runners` still puts that folder on sys.path, where `import gptq` inside a library would
# find our gptq.py. The folder's parent is never on sys.path: installed, it is the controller's site-packages.
_folder = Path(__file__).absolute().parent
sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != _folder]
_spec = importlib.util.spec_from_file_location("runners", _folder / "__init__.py")
assert _spec is not None
assert _spec.loader is not None
sys.modules["runners"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["runners"])
from runners import worker  # noqa: E402

if __name__ == "__main__":
    sys.exit(worker.main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
