#!/bin/sh
# Check a pull request of a leaderboard: it adds one bundle and nothing else, and `harness share --verify` accepts it.
#
#   check.sh BASE HEAD        commits of this repository; HEAD is never checked out, only its one new file is read
#
# Exit codes: 0 accepted; 1 refused, with the reason; 2 a mistake in the call. HARNESS: the command (harness).
set -eu

HARNESS=${HARNESS:-harness}
[ $# -eq 2 ] || { echo "usage: check.sh BASE HEAD" >&2; exit 2; }
base=$(git rev-parse --verify --quiet "$1^{commit}") || { echo "no commit $1" >&2; exit 2; }
head=$(git rev-parse --verify --quiet "$2^{commit}") || { echo "no commit $2" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

refuse() {
    echo "refused: $1"
    exit 1
}

# Raw lines, as :000000 100644 0000... 89ab... A<TAB>bundles/NAME.tar.zst; odd names are quoted, and match nothing.
git diff --raw --no-renames --no-abbrev "$base...$head" >"$work/changes"
[ "$(wc -l <"$work/changes")" -eq 1 ] || refuse "a pull request adds one bundle and changes nothing else"
tab=$(printf '\t')
path=$(cut -d "$tab" -f 2 "$work/changes")
case $(cut -d "$tab" -f 1 "$work/changes") in
":000000 100644 "*" A") ;;
*) refuse "$path is not a new regular file: a bundle that was accepted is never changed or removed" ;;
esac
printf '%s\n' "$path" | grep -Eqx 'bundles/[a-z0-9][a-z0-9._-]{0,99}\.tar\.zst' ||
    refuse "a bundle is named bundles/NAME.tar.zst, NAME of a to z, 0 to 9 and . _ -"

git cat-file blob "$head:$path" >"$work/new.tar.zst"
mkdir "$work/accepted"
for name in $(git ls-tree --name-only "$base" bundles/ | grep '\.tar\.zst$' || true); do
    git cat-file blob "$base:$name" >"$work/accepted/$(basename "$name")"
done
set -- "$work"/accepted/*.tar.zst
[ -e "$1" ] || set --
code=0
"$HARNESS" share --verify "$work/new.tar.zst" ${1:+--beside "$@"} || code=$?
[ "$code" -eq 0 ] || exit 1
