#!/bin/sh
# Installs the harness and its stacks from this folder, without a network, with the Python that is there:
#
#     sh install.sh [--python PYTHON] [--to FOLDER]
#
# All of it is in functions that the last line calls: cut short, it does nothing.
set -eu

stop() {
  echo "install.sh: $*" >&2
  exit 2
}

# Makes the environment $1 of the other arguments. It finds the packages of the Python that is there behind its
# own, also those of a virtual environment, of the user and of PYTHONPATH.
environment() {
  folder=$1
  shift
  "$to/bin/uv" venv --quiet --clear --python "$python" "$folder" &&
    "$to/bin/uv" pip install --quiet --no-deps --python "$folder/bin/python" "$@" &&
    "$python" -c 'import importlib.metadata
for place in dict.fromkeys(str(each.locate_file("")) for each in importlib.metadata.distributions()):
    print(f"import site; site.addsitedir({place!r})")' > "$folder/lib/python@PYTHON@/site-packages/beside.pth"
}

harness_itself() {
  mkdir -p "$to/bin" &&
    "$python" -m zipfile -e "$pack"/packages/uv-*.whl "$to/uv" && mv "$to"/uv/*/scripts/uv "$to/bin/uv" &&
    rm -r "$to/uv" && chmod +x "$to/bin/uv" &&
    environment "$to/controller" --requirements "$pack/controller.txt" "$pack"/packages/batch1_harness-*.whl &&
    ln -s ../controller/bin/harness "$to/bin/harness" && cp "$pack/SHA256SUMS" "$to/"
}

main() {
  pack=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
  python=python3 to=${XDG_DATA_HOME:-$HOME/.local/share}/harness code=0
  while [ $# -gt 0 ]; do
    case $1 in
      --python) python=${2:?} ;;
      --to) to=${2:?} ;;
      *) stop "unknown argument $1; usage: sh install.sh [--python PYTHON] [--to FOLDER]" ;;
    esac
    shift 2
  done
  found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null | tail -n 1)
  [ "$found" = "@PYTHON@" ] || stop "this pack is for Python @PYTHON@, and $python is ${found:-no Python that runs}"
  (cd "$pack" && sha256sum --check --quiet SHA256SUMS) || stop "the pack is damaged; copy it again"
  for name in @NEEDED@; do
    "$python" -c "import importlib.metadata; importlib.metadata.version('$name')" 2>/dev/null ||
      stop "$python lacks $name, which this pack leaves out"
  done
  mkdir -p "$(dirname -- "$to")"
  to=$(cd "$(dirname -- "$to")" && pwd)/$(basename -- "$to")
  export UV_OFFLINE=1 UV_NO_CACHE=1 UV_NO_CONFIG=1 UV_PYTHON_DOWNLOADS=never UV_FIND_LINKS="$pack/packages"
  if [ ! -e "$to" ]; then
    trap 'rm -rf "$to"' EXIT
    trap 'exit 130' INT TERM
    harness_itself || stop "nothing was installed"
    trap - EXIT
  fi
  cmp -s "$pack/SHA256SUMS" "$to/SHA256SUMS" ||
    stop "$to exists and is not of this pack; remove it, or name another folder with --to"
  for stack in @STACKS@; do
    if [ -e "$pack/$stack.txt" ]; then
      environment "$to/stacks/$stack" --requirements "$pack/$stack.txt" &&
        "$to/bin/harness" env use "$stack" "$to/stacks/$stack/bin/python" --device @DEVICE@ || code=1
    else
      "$to/bin/harness" env create "$stack" --device @DEVICE@ || code=1
    fi
  done
  echo "harness: $to/bin/harness"
  return $code
}

main "$@"
