"""Entry point, run by path under a stack's interpreter: `python -I runners REQUEST EVENTS_FD GO_ON_FD
CONTROLLER_PID`."""

import sys
from pathlib import Path

# `python -I path/to/runners` still puts that folder on sys.path, where `import gptq` inside a library would
# find our gptq.py. The project root is there only while the worker is imported: `runners` keeps its own
# __path__.
_folder = Path(__file__).absolute().parent
sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != _folder]
sys.path.insert(0, str(_folder.parent))
from runners import worker  # noqa: E402

sys.path.remove(str(_folder.parent))

if __name__ == "__main__":
    sys.exit(worker.main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
