#!/bin/sh
# Installs the harness and its stacks from this folder, without a network, with the Python that is there:
#
#     sh install.sh [--python PYTHON] [--to FOLDER] [--background]
#
# All of it is in functions that the last line calls: cut short, it does nothing.
set -eu

stop() {
  echo "install.sh: $*" >&2
  exit 2
}

# The version of a Python, such as 3.12; nothing if it is none.
version_of() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null | tail -n 1
}

main() {
  pack=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
  python=''
  before=''
  for word in "$@"; do
    case $before in --python) python=$word ;; esac
    case $word in --python=*) python=${word#--python=} ;; esac
    before=$word
  done
  if [ -z "$python" ]; then
    python=python3
    if [ "$(version_of python3)" != "@PYTHON@" ] && [ "$(version_of python@PYTHON@)" = "@PYTHON@" ]; then
      python=python@PYTHON@
    fi
  fi
  found=$(version_of "$python")
  [ -n "$found" ] || stop "$python is no Python that runs here; name one with --python"
  [ "$found" = "@PYTHON@" ] || stop "this pack is for Python @PYTHON@, and $python is $found; name another with" \
    "--python, or pack again with --python $found"
  exec "$python" -I - "$pack" "@DIGEST@" "$@" <<'END_OF_PYTHON'
@INSTALL@
END_OF_PYTHON
}

main "$@"
