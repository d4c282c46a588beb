"""`harness completion`: print the script for a shell, which asks the harness itself what can follow."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable

import argcomplete
from argcomplete.completers import FilesCompleter
from argcomplete.shell_integration import shellcode

from harness.base import data
from harness.cli import OK, parser


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    print(shellcode(["harness"], shell=arguments.shell))
    return OK


def complete() -> None:
    """Answer the shell's question, what can follow on a command line, and end the process."""
    line = os.environ.get("COMP_LINE", "").split()
    parsers = parser(line[1:2], lists_all=True)
    _add_names(parsers)
    argcomplete.autocomplete(parsers, always_complete_options=False)


def _add_names(parser: argparse.ArgumentParser) -> None:
    """Complete values that have names by these names, and by files if they may be files too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _add_names(command)
            continue
        words = [*action.option_strings, str(action.metavar)]
        if names := next((NAMES[word] for word in words if word in NAMES), None):
            action.completer = _completer(names)  # type: ignore[attr-defined]


def _completer(names: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    def words(prefix: str, **_: object) -> list[str]:
        known = [name for name in names() if name.startswith(prefix)]
        return known if names in WITHOUT_FILES else [*known, *FilesCompleter()(prefix)]

    return words


def _machines() -> list[str]:
    from harness.theory.machines import MACHINES

    return ["this", *MACHINES]


def _models() -> list[str]:
    from harness.theory.known_models import Known

    return [*Known()]


def _models_and_configs() -> list[str]:
    from harness.theory.hf_config import SHAPES

    return [*data.config_names(), *SHAPES]


def _stacks() -> list[str]:
    from harness.stacks.header import stacks

    return [*stacks()]


def _quants() -> list[str]:
    from harness.theory.ggml_quants import ALL_QUANTS

    return [*ALL_QUANTS]


def _codes() -> list[str]:
    from harness.analysis.warnings import Warnings

    return [*Warnings.__members__]


NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "--machine": _machines,
    **dict.fromkeys(("--stacks", "STACK"), _stacks),
    "--quant": _quants,
    **dict.fromkeys(("--model", "--models", "MODEL", "SHAPE"), _models),
    **dict.fromkeys(("MODEL|CONFIG", "A", "B"), _models_and_configs),
    "CODE": _codes,
    "CONFIG": data.config_names,
}
"""Of options, and of arguments by how help shows them."""
WITHOUT_FILES = (_machines, _stacks, _quants, _codes)
