#!/usr/bin/env bash
# Which tests fail now and then? Runs a tier again and again, each time in another order, beside processes that
# compute and one that writes to the disk; the last time in the background, with SIGINT ignored. Lists what failed,
# and how often. Exit code 1: something did.
#
#     ci/flake.sh [--tier test|test-all] [--runs 5]
set -u
tier=test runs=5
while [ $# -gt 0 ]; do
  case $1 in
    --tier) tier=${2:?} ;;
    --runs) runs=${2:?} ;;
    *) echo "flake.sh: unknown option $1" >&2; exit 2 ;;
  esac
  shift 2
done
folder=$(mktemp -d -t flake-XXXXXX)
trap 'kill $(jobs -p) 2> /dev/null; rm -f "$folder/written"' EXIT
for _ in $(seq $(($(nproc) + 1))); do while :; do :; done & done
while :; do head -c 64M /dev/urandom > "$folder/written"; sync "$folder/written"; done &
for run in $(seq "$runs"); do
  echo "run $run of $runs: $folder/$run.log"
  if [ "$run" = "$runs" ]; then
    (trap '' INT; exec make "$tier" < /dev/null)
  else
    make "$tier"
  fi > "$folder/$run.log" 2>&1 || echo "exit status $?" >> "$folder/$run.log"
done
grep -hoE '^((FAILED|ERROR) [^ ]+|exit status .*)' "$folder"/*.log | sort | uniq -c | sort -rn > "$folder/failed"
cat "$folder/failed"
[ ! -s "$folder/failed" ]
