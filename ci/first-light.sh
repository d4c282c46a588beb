#!/usr/bin/env bash
# The first half hour on a bare machine with one card and no network: install a pack (harness env pack), build
# llama.cpp in the background, run every check of a GPU, then a night's cells at 0.5B and 7B.
#
#     ci/first-light.sh PACK [--device cuda|cpu] [--to FOLDER] [--python PYTHON]
#
# Each step has its own limit, and a step that is done is not done again: run the same command to go on. It ends
# with a table; FOLDER/records has every record, log and page. `--device cpu` tries it where there is no card.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
pack=${1:?PACK: a folder made by harness env pack}
shift
device=cuda
folder=$PWD/first-light
python=python3
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=$2 ;;
    --to) folder=$2 ;;
    --python) python=$2 ;;
    *) echo "first-light.sh: unknown option $1" >&2; exit 2 ;;
  esac
  shift 2
done
mkdir -p "$folder/done" "$folder/records"
folder=$(cd "$folder" && pwd)
pack=$(cd "$pack" && pwd)
export HARNESS_CACHE=$folder/cache HARNESS_LOCKS=$folder/locks
mkdir -p "$HARNESS_LOCKS" && chmod 1777 "$HARNESS_LOCKS"
# Checks run while llama.cpp is being compiled: leave them some cores, and the others to them first.
cores=$(nproc)
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$((cores > 4 ? cores - 4 : cores))}
harness=$folder/installed/bin/harness
failed=0

# step NAME SECONDS COMMAND...: run it under its limit, unless it is done; its output is in records/NAME.log
step() {
  local name=$1 limit=$2 begun=$SECONDS code=0
  shift 2
  if [ ! -e "$folder/done/$name" ]; then
    timeout --kill-after 10 "$limit" "$@" > >(tee -a "$folder/records/$name.log") 2>&1 || code=$?
    [ "$code" = 0 ] && echo "done in $((SECONDS - begun)) s" > "$folder/done/$name"
    [ "$code" = 124 ] && echo "stopped after its $limit s" > "$folder/records/$name.state"
    [ "$code" != 0 ] && [ "$code" != 124 ] && echo "ended with $code" > "$folder/records/$name.state"
  fi
  [ "$code" = 0 ] && rm -f "$folder/records/$name.state"
  [ "$code" = 0 ] || failed=1
  return "$code"
}

install_pack() { nice -n 10 sh "$pack/install.sh" --python "$python" --to "$folder/installed" "$@"; }

smoke() {
  command -v nvidia-smi > /dev/null && nvidia-smi
  "$harness" doctor
  "$harness" machine --measure
  "$harness" env list
  "$harness" env list --json > "$folder/records/environments.json"
}

checks() {
  cd "$root" && "$folder/installed/controller/bin/python" -m ci.gpu --device "$device" \
    --results "$folder/records/checks" "$@"
}

# A night's cells with another shape: configs/nightly-gpu.yaml has 7B.
night() {
  sed -e "s/^device: .*/device: $device/" -e "s/shape: .*/shape: $1/" "$root/configs/nightly-gpu.yaml" \
    > "$folder/records/$1.yaml"
  "$harness" run "$folder/records/$1.yaml" -o "$folder/records/$1"
}

export -f install_pack smoke checks night
export root folder pack python device harness

step install 180 bash -c 'install_pack --background' || { echo "nothing can run without it" >&2; exit 1; }
step smoke 120 bash -c smoke
# torch's stacks, while llama.cpp is being compiled
step checks-of-torch 500 bash -c 'checks --only hf bitsandbytes gptqmodel'
step llama.cpp 900 bash -c install_pack
step checks 900 bash -c checks
if [ "$device" = cuda ]; then
  step night-0.5b 400 bash -c 'night qwen1.5-0.5b'
  step night-7b 600 bash -c 'night qwen1.5-7b'
else
  step night 400 bash -c 'night tiny-qwen2'
fi

echo
for name in install smoke checks-of-torch llama.cpp checks night night-0.5b night-7b; do
  state=$(cat "$folder/done/$name" "$folder/records/$name.state" 2> /dev/null | tail -n 1)
  [ -n "$state" ] && printf '%-16s %s\n' "$name" "$state"
done
echo "records, logs and pages: $folder/records"
exit "$failed"
