"""`harness completion`: print the script that completes commands, options and names in a shell."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator
from typing import NamedTuple

from harness.analysis.warnings import Warnings
from harness.base import data
from harness.cli import OK
from harness.cli.theory_options import THIS
from harness.stacks.header import stacks
from harness.theory.hf_config import SHAPES
from harness.theory.known_models import Known
from harness.theory.machines import MACHINES
from harness.theory.tensors import ALL_QUANTS

FILES = "@files"  # in place of a word: the files that match too
NAMES: dict[str, Callable[[], list[str]]] = {  # of options, and of arguments by how help shows them
    "--machine": lambda: [THIS, *MACHINES],
    "--model": lambda: [*Known(), FILES],
    "--models": lambda: [*Known()],
    "--quant": lambda: [*ALL_QUANTS],
    "--stacks": lambda: [*stacks()],
    "CODE": lambda: [*Warnings.__members__],
    "CONFIG": lambda: [*data.config_names(), FILES],
    **dict.fromkeys(("MODEL|CONFIG", "A", "B"), lambda: [*data.config_names(), *SHAPES, FILES]),
    "stack": lambda: [*stacks()],
    "SHAPE": lambda: [*SHAPES],
    "MODEL": lambda: [*Known(), FILES],
}

# The words for a place, in bash and zsh. A place is the commands so far, each with a slash; then nothing, or
# ` -` for options, or a space and the option before, for its values.
_WORDS = """\
_harness_words() {{
  case "$1" in
{cases}
    *) return 1 ;;
  esac
}}
"""
_BASH = """\
_harness() {
  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} place= word words
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case $word in -*) ;; *) _harness_words "$place$word/" >/dev/null && place=$place$word/ ;; esac
  done
  words=$(_harness_words "$place $before") || case $current in
    -*) words=$(_harness_words "$place -") ;;
    *) words=$(_harness_words "$place") ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W "${words%@files}" -- "$current")
  case $words in *@files)
    compopt -o filenames
    mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$current") ;;
  esac
}
complete -F _harness harness
"""
_ZSH = """\
_harness() {
  local place= word found
  for word in ${words[2,CURRENT-1]}; do
    case $word in -*) ;; *) _harness_words "$place$word/" >/dev/null && place=$place$word/ ;; esac
  done
  found=$(_harness_words "$place ${words[CURRENT-1]}") || case ${words[CURRENT]} in
    -*) found=$(_harness_words "$place -") ;;
    *) found=$(_harness_words "$place") ;;
  esac
  compadd -- ${=found%@files}
  case $found in *@files) _files ;; esac
}
if [[ $funcstack[1] == _harness ]]; then _harness; else compdef _harness harness; fi
"""
_FISH = """\
function __harness_words
  switch $argv[1]
{cases}
    case '*'
      return 1
  end
end

function __harness_complete
  set -l words (commandline -opc)
  set -l current (commandline -ct)
  set -l place ''
  for word in $words[2..-1]
    if not string match -q -- '-*' $word; and __harness_words $place$word/ >/dev/null
      set place $place$word/
    end
  end
  set -l found
  if not set found (__harness_words "$place $words[-1]")
    if string match -q -- '-*' $current
      set found (__harness_words "$place -")
    else
      set found (__harness_words $place)
    end
  end
  string match -v -- '@files' $found
  contains -- '@files' $found; and __fish_complete_path $current
end

complete -c harness -f -a '(__harness_complete)'
"""


class Place(NamedTuple):
    """A place on the command line, as _WORDS has it, and the words that may stand there."""

    key: str
    words: list[str]


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=[*SCRIPTS], help="the shell that reads the script")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from harness import cli

    print(SCRIPTS[arguments.shell]([*places(cli.parser())]), end="")
    return OK


def places(parser: argparse.ArgumentParser, above: str = "") -> Iterator[Place]:
    """Every place of a parser and of its commands."""
    options: list[str] = []
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words += action.choices
            for name, command in action.choices.items():
                yield from places(command, f"{above}{name}/")
        elif not action.option_strings:
            words += [word for word in _values(action) if word not in words]
        else:
            options += action.option_strings
            if action.nargs != 0:
                yield from (Place(f"{above} {option}", _values(action)) for option in action.option_strings)
    yield Place(above, words or [FILES])
    yield Place(f"{above} -", options)


def _values(action: argparse.Action) -> list[str]:
    """What an argument may be: its choices, known names, or else any file."""
    if action.choices is not None:
        return [str(each) for each in action.choices]
    shown = [*action.option_strings, str(action.metavar or action.dest)]
    return next((NAMES[each] for each in shown if each in NAMES), lambda: [FILES])()


def _posix(places: list[Place]) -> str:
    cases = [f"    {shlex.quote(key)}) echo {shlex.quote(' '.join(words))} ;;" for key, words in places]
    return _WORDS.format(cases="\n".join(cases))


def _fish(places: list[Place]) -> str:
    lines = [
        f"    case {shlex.quote(key)}\n      printf '%s\\n' {shlex.join(words)}" for key, words in places
    ]
    return _FISH.replace("{cases}", "\n".join(lines))


SCRIPTS: dict[str, Callable[[list[Place]], str]] = {
    "bash": lambda places: f"{_posix(places)}\n{_BASH}",
    "zsh": lambda places: f"#compdef harness\n{_posix(places)}\n{_ZSH}",
    "fish": _fish,
}
