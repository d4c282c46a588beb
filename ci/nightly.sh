#!/usr/bin/env bash
# One night on one device: preflight, run, compare with the nights before, pages, summary. See docs/guide/nightly.md.
#
#   ci/nightly.sh CONFIG [--first]
#
#   --first   no night came before this one; without it that is an error, so that lost results are seen. Where one
#             did, it is ignored
#   RESULTS   folder of every night's records, kept from night to night (results/nightly/<config>)
#   OUT       folder for what is made of this night: pages, summary, benchmark.json, records (reports/nightly)
#   BASELINE  what is compared with (last:14)
#   REFERENCE measure CONFIG in turns with this one (harness ab), in place of comparing with the nights before: another
#             config, or options of side A, such as --package-a llama-cpp-python==0.3.35
#   FAIL_ON   the regressions that fail (slower:2% memory:2%)
#
# Exit codes: 0 all ran, all was compared, no regression; 1 a cell is not ok, or was not compared, or a page is
# missing; 2 nothing was started, or nothing compared; 3 a regression, which is not one bad night; 130 interrupted.
set -euo pipefail

stop() {
  echo "nightly: $1" >&2
  exit 2
}

config="" first=""
for argument in "$@"; do
  case $argument in
    --first) first=yes ;;
    -*) stop "$argument: no such option; usage: ci/nightly.sh CONFIG [--first]" ;;
    *)
      [ -z "$config" ] || stop "one config a night: $config, or $argument"
      config=$argument
      ;;
  esac
done
[ -n "$config" ] || stop "name a config: ci/nightly.sh CONFIG [--first]"

name=$(basename "$config" .yaml)
results=${RESULTS:-results/nightly/$name}
out=${OUT:-reports/nightly}
against=("$results" --baseline "${BASELINE:-last:14}")
reference=()
if [ -n "${REFERENCE:-}" ]; then
  read -ra reference <<<"$REFERENCE"
  against=("$results" --ab)
fi
for regression in ${FAIL_ON-slower:2% memory:2%}; do against+=(--fail-on "$regression"); done

PATH="$(cd "$(dirname "$0")/.." && pwd)/.venv/bin:$PATH"
command -v harness >/dev/null || stop "no harness command: run make setup"
command -v flock >/dev/null || stop "no flock command: it is of util-linux"

# Preflight: a mistake, or a device that is not here, ends it before anything is measured.
doctor=$(harness doctor "$config")
# The options of the comparison are looked at before the folder is, and a config is never one.
said=$(harness compare "$config" "${against[@]:1}" 2>&1) || true
[[ $said == *": not a results folder" ]] || stop "FAIL_ON or BASELINE: ${said##*$'\n'}"
echo "$doctor"

# Another night on the same OUT is let finish: its files would be taken from it, and it would compare our records.
mkdir -p "$out"
out=$(cd "$out" && pwd)
exec 9>"$out/.lock"
flock -n 9 || { echo "nightly: waiting for the night that has $out" >&2 && flock 9; }

before=$(find "$results/" -name record.json 2>/dev/null | head -n 1) || true
if [ -z "$before" ] && [ -z "$first" ] && [ -z "${REFERENCE:-}" ]; then
  stop "$results has no records to compare with; where this is the first night, say so: --first"
elif [ -n "$before" ] && [ -n "$first" ]; then
  echo "nightly: --first is ignored: $results has records of earlier nights" >&2
  first=""
fi

mkdir -p "$results"
rm -rf "$out"/{pages,run.txt,summary.md,benchmark.json,records.tar.gz}
mkdir "$out/pages"
(cd "$results" && find . -name record.json | LC_ALL=C sort >"$out/.before")

# A device that another campaign has is waited for: two at once would measure each other.
ran=0
if [ -z "${REFERENCE:-}" ]; then
  harness run "$config" --fresh --wait -o "$results" | tee "$out/run.txt" || ran=$?
elif [[ ${reference[0]} == -* ]]; then
  harness ab "$config" "${reference[@]}" --wait -o "$results" | tee "$out/run.txt" || ran=$?
else
  harness ab "${reference[@]}" "$config" --wait -o "$results" | tee "$out/run.txt" || ran=$?
fi
[ "$ran" -le 1 ] || exit "$ran"
tonight=$(cd "$results" && find . -name record.json | LC_ALL=C sort | LC_ALL=C comm -13 "$out/.before" -)
[ -n "$tonight" ] || stop "the run left no record, so nothing was compared"
sed 's|/record.json$||' <<<"$tonight" | tar -czf "$out/records.tar.gz" -C "$results" -T -
# Not the latest by its date: a clock may be wrong. What an earlier night left may have been recovered too.
id=$(cd "$results" && python -c '
import json, sys
campaigns = [json.load(open(path.rstrip("\n")))["campaign"] for path in sys.stdin]
print(max((each.get("order", each["id"]), each["id"]) for each in campaigns)[1])' <<<"$tonight")
against+=(--campaign "$id")

compared=0
harness compare "${against[@]}" --format md >"$out/summary.md" 2>"$out/.said" || compared=$?
cat "$out/.said" >&2
why=$(tail -n 1 "$out/.said")

# The pages are made however the cells came out. The comparison in another form must come to the same end.
broken=0
again() {
  local code=0
  harness compare "${against[@]}" "$@" 2>"$out/.said" || code=$?
  [ "$code" -eq "$compared" ] || { cat "$out/.said" >&2 && broken=1; }
}
if [ -z "${REFERENCE:-}" ]; then
  page=$(sed -n 's/^report: //p' "$out/run.txt")
  cp "$page" "$out/pages/report.html" || broken=1
else
  harness report "$results" -o "$out/pages/report.html" >/dev/null || broken=1
fi
harness report "$results" --history -o "$out/pages/history.html" || broken=1
if [ "$compared" -eq 2 ]; then
  {
    echo "### $name: nothing was compared${first:+, this is the first night}"
    echo "${why#harness: }"
    echo "~~~"
    cat "$out/run.txt"
    echo "~~~"
  } >>"$out/summary.md"
  cat "$out/summary.md" >>"${GITHUB_STEP_SUMMARY:-/dev/stdout}"
else
  again --format html -o "$out/pages/compare.html"
  if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then # annotations are printed, the job's summary is written
    again --format gha -o "$out/benchmark.json"
  else
    again --format gha -o "$out/benchmark.json" >/dev/null
    cat "$out/summary.md"
  fi
fi
{
  title=$(python -c 'import html, sys; print(html.escape(sys.argv[1]))' "$name")
  echo "<!doctype html><meta charset=utf-8><title>$title</title><h1>$title, $(date -u +%F)</h1>"
  for each in compare history report; do
    [ ! -e "$out/pages/$each.html" ] || echo "<p><a href=$each.html>$each</a>"
  done
} >"$out/pages/index.html"

if [ "$compared" -eq 2 ] && [ -n "$first" ]; then
  echo "nightly: the first night of $name: the next one is compared with it" >&2
  compared=0
fi
[ "$compared" -ne 2 ] || stop "nothing was compared: ${why#harness: }"
[ "$compared" -le 1 ] || exit "$compared"
exit $((ran | compared | broken))
