#!/usr/bin/env bash
# The first half hour on a bare machine with one card and no network: install a pack (harness env pack), run every
# check of a GPU, then a night's cells at 0.5B and 7B.
#
#     ci/first-light.sh PACK [--device cuda|cpu] [--to FOLDER] [--python PYTHON]
#
# Each step has its own limit, and a step that is done is not done again: run the same command to go on.
# FOLDER/records has every record, log and page. `--device cpu` tries it where there is no card.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
pack=$(cd "${1:?PACK: a folder made by harness env pack}" && pwd)
shift
device=cuda folder=$PWD/first-light python=python3
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=$2 ;;
    --to) folder=$2 ;;
    --python) python=$2 ;;
    *) echo "first-light.sh: unknown option $1" >&2; exit 2 ;;
  esac
  shift 2
done
mkdir -p "$folder/done" "$folder/records" "$folder/locks" && chmod 1777 "$folder/locks"
folder=$(cd "$folder" && pwd)
export HARNESS_CACHE=$folder/cache HARNESS_LOCKS=$folder/locks
harness=$folder/installed/bin/harness
failed=0

# step NAME SECONDS COMMAND...: run it under its limit, unless it is done; its output is in records/NAME.log
step() {
  local name=$1 limit=$2 code=0
  shift 2
  [ ! -e "$folder/done/$name" ] || return 0
  timeout --kill-after 10 "$limit" "$@" 2>&1 | tee -a "$folder/records/$name.log" || code=$?
  echo "$name ended with $code (124: stopped after its $limit s)"
  if [ "$code" = 0 ]; then touch "$folder/done/$name"; else failed=1; fi
}

# A night's cells with another shape: configs/nightly-gpu.yaml has 7B.
night() {
  sed -e "s/^device: .*/device: $device/" -e "s/shape: .*/shape: $2/" "$root/configs/nightly-gpu.yaml" \
    > "$folder/records/$2.yaml"
  step "night-$2" "$1" "$harness" run "$folder/records/$2.yaml" -o "$folder/records/$2"
}

cd "$root" || exit
step install 1200 nice -n 10 sh "$pack/install.sh" --python "$python" --to "$folder/installed"
[ -x "$harness" ] || { echo "nothing can run without it" >&2; exit 1; }
step machine 120 "$harness" doctor --measure
step environments 60 "$harness" env list
step checks 900 "$folder/installed/controller/bin/python" -m ci.gpu --device "$device" --results "$folder/records/checks"
if [ "$device" = cuda ]; then
  night 400 qwen1.5-0.5b
  night 600 qwen1.5-7b
else
  night 400 tiny-qwen2
fi
echo "records, logs and pages: $folder/records"
exit "$failed"
