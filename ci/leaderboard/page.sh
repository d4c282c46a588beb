#!/bin/sh
# Make the page of a leaderboard anew, from every bundle that `harness share --verify` accepts today.
#
#   page.sh [PAGE]            in the leaderboard's repository; PAGE: site/index.html
#
# Exit codes: 0 the page has all bundles; 1 it has some, and the others are named. HARNESS: the command (harness).
set -eu

HARNESS=${HARNESS:-harness}
page=${1:-site/index.html}
code=0
set -- bundles/*.tar.zst
[ -e "$1" ] || { echo "no bundles yet"; exit 1; }
count=$#
while [ "$count" -gt 0 ]; do
    bundle=$1
    shift
    count=$((count - 1))
    if "$HARNESS" share --verify "$bundle" >/dev/null 2>&1; then
        set -- "$@" "$bundle"
    else
        echo "left out, since harness share --verify refuses it today: $bundle"
        code=1
    fi
done
[ $# -gt 0 ] || { echo "no bundle is accepted"; exit 1; }
"$HARNESS" report "$@" -o "$page"
exit "$code"
