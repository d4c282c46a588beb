#!/usr/bin/env bash
# Try the Raspberry Pi profile on an emulated Arm machine: Debian bookworm for arm64, of which Raspberry Pi OS is made,
# in a chroot whose programs qemu-user runs. See docs/start/raspberry-pi.md. Needs root, Debian on x86-64, a network, 15 GB.
#
#   ci/arm64-chroot.sh [FOLDER] [--short] [--again STEP]...
#
#   FOLDER    keeps the system, logs and records (arm64 in the harness's cache folder, ~/.cache/harness)
#   --short   no set-up, no network: the checks that take a minute each, in the system that is there (make test-all)
#   --again   do a step again that has passed: one of emulator, debian, packages, install, llamacpp, llamacpp-rpi4, hf
#
# A step that has passed is not done again; the checks are, when the project's files have changed. Packages come from
# where this machine gets its own: its Debian mirror, its certificates, and its variables PIP_*, UV_* and *_PROXY.
# Exit codes: 0 nothing failed; 1 something failed; 2 nothing was started.
set -euo pipefail

stop() {
  echo "arm64: $1" >&2
  exit 2
}

project=$(cd "$(dirname "$0")/.." && pwd)
folder=${HARNESS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/harness}/arm64
short="" again=()
while [ $# -gt 0 ]; do
  case $1 in
    --short) short=yes ;;
    --again)
      [ $# -gt 1 ] || stop "--again: name a step"
      again+=("$2")
      shift
      ;;
    -*) stop "$1: no such option; usage: ci/arm64-chroot.sh [FOLDER] [--short] [--again STEP]..." ;;
    *) folder=$1 ;;
  esac
  shift
done
[ "$(uname -m)" = x86_64 ] || stop "this machine is $(uname -m): the emulation is for x86-64"
[ -z "$short" ] || [ -e "$folder/passed/install" ] || stop "no emulated Arm machine in $folder: run ci/arm64-chroot.sh"
for step in ${again[@]+"${again[@]}"}; do
  [ -e "$folder/passed/$step" ] || stop "--again $step: has not passed in $folder"
done
[ "$(id -u)" = 0 ] || stop "needs root, for mounts and chroot"
mkdir -p "$folder"/{logs,passed}
folder=$(cd "$folder" && pwd)
root=$folder/root
exec 9>"$folder/lock"
flock -n 9 || stop "another run has $folder"
for step in ${again[@]+"${again[@]}"}; do rm "$folder/passed/$step"; done

# What the emulated programs get of this machine's settings: where packages come from. Folders of wheels are for x86-64.
board="" compilers="" settings=()
while IFS= read -r each; do settings+=("$each"); done < <(
  env | grep -E '^(PIP_|UV_|SSL_CERT_|REQUESTS_CA_BUNDLE=|CURL_CA_BUNDLE=|[A-Za-z]+_(PROXY|proxy)=)' |
    grep -vE '^(PIP|UV)_(FIND_LINKS|CACHE_DIR|CONFIG_FILE)='
)

# inside LIMIT [NAME=VALUE]... COMMAND: run a shell command in the chroot, in namespaces of its own, which end with it:
# no mount and no process is left. LIMIT is of `timeout`. `board=rpi4` or rpi5: it has that board's processor and
# /proc/cpuinfo, else this machine's /proc/cpuinfo. `compilers=yes`: this machine's compilers are there too.
inside() (
  limit=$1 variables=("${@:2:$#-2}") command=${*: -1} mounts=() processor=cortex-a76
  cp /etc/resolv.conf /etc/hosts "$root/etc/"
  [ -z "$compilers" ] || mounts=(/usr:/host/usr /usr/aarch64-linux-gnu /usr/lib/x86_64-linux-gnu /lib64)
  [ -z "$board" ] || mounts+=("$project/ci/arm64/$board.cpuinfo:/proc/cpuinfo")
  [ "$board" != rpi4 ] || processor=cortex-a72
  # Not through `env`, whose command line others could read: an index may have a password in its URL.
  for name in $(compgen -e); do export -n "$name"; done
  export HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin QEMU_CPU=$processor
  [ -z "${settings[*]-}${variables[*]-}" ] || export ${settings[@]+"${settings[@]}"} ${variables[@]+"${variables[@]}"}
  # shellcheck disable=SC2016
  exec nice timeout --foreground --kill-after=10 "$limit" unshare --mount --pid --fork --kill-child bash -c '
    set -eu
    root=$1
    mount -t proc proc "$root/proc"
    mount -t binfmt_misc binfmt_misc "$root/proc/sys/fs/binfmt_misc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    for each in "${@:3}"; do
      [ -e "$root${each#*:}" ] || mkdir -p "$root${each#*:}"
      mount --bind -o ro "${each%:*}" "$root${each#*:}"
    done
    exec chroot "$root" /bin/bash -c "$2"
  ' bash "$root" "$command" ${mounts[@]+"${mounts[@]}"} </dev/null
)

failed=""
# step NAME COMMAND...: a step of the set-up, unless it has passed. One that fails ends it; stacks are independent.
step() {
  local name=$1 start=$SECONDS code=0 state=passed log=$folder/logs/$1
  [ -z "$failed" ] || [ -e "$folder/passed/install" ] || return 0
  if [ ! -e "$folder/passed/$name" ]; then
    echo "arm64: $name; its log: $log.log" >&2
    set +e
    (
      set -e
      "${@:2}"
    ) >"$log.log" 2>&1
    code=$?
    set -e
    [ $code = 0 ] || state=failed
    [ $code != 124 ] || echo "not done within its limit" >>"$log.log"
    printf '%-13s %-22s %6s s  %s\n' $state "$name" $((SECONDS - start)) \
      "$(grep -v '^ *$' "$log.log" | tail -n 1 | cut -c 1-200)" >"$log.line"
    [ $state = failed ] && failed=yes || touch "$folder/passed/$name"
  fi
  cat "$log.line"
}

emulator() {
  local packages=(qemu-user-static binfmt-support debootstrap crossbuild-essential-arm64)
  dpkg -s "${packages[@]}" >/dev/null || {
    timeout 300 apt-get update
    DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y --no-install-recommends "${packages[@]}"
  }
  registered
  echo "$(qemu-aarch64-static --version | head -n 1); $(aarch64-linux-gnu-g++ --version | head -n 1)"
}

# The kernel forgets at each boot which programs qemu runs. F: it keeps the interpreter open, so a chroot needs no copy.
registered() {
  local formats=/proc/sys/fs/binfmt_misc
  mountpoint -q $formats || mount -t binfmt_misc binfmt_misc $formats
  [ -e $formats/qemu-aarch64 ] || update-binfmts --enable qemu-aarch64
  grep -q '^flags: .*F' $formats/qemu-aarch64
}

mirror() {
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' | grep -vi security | head -n 1
}

debian() {
  local uri
  uri=$(mirror)
  rm -rf "$root" "$root.part"
  nice timeout 3600 debootstrap --arch=arm64 --variant=minbase --include=ca-certificates \
    bookworm "$root.part" "${uri:-http://deb.debian.org/debian/}"
  apt-config dump | grep -E '^Acquire::(http|https|Check-|Retries)' >"$root.part/etc/apt/apt.conf.d/99host" || true
  mkdir -p "$root.part/usr/local/share/ca-certificates"
  find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t "$root.part/usr/local/share/ca-certificates" {} +
  mv "$root.part" "$root"
  inside 300 update-ca-certificates
  inside 60 'echo "Debian $(cat /etc/debian_version), $(uname -m), kernel $(cat /proc/sys/kernel/arch)"'
}

# As docs/start/raspberry-pi.md installs them.
packages() {
  inside 3600 DEBIAN_FRONTEND=noninteractive \
    'apt-get update && apt-get install -y --no-install-recommends git build-essential python3-venv'
  inside 60 'python3 --version && c++ --version | head -n 1'
}

# The files of this checkout, changed ones as they are. Prints a hash of them.
copied() {
  local to=$root/root/harness
  mkdir -p "$to"
  find "$to" -mindepth 1 -maxdepth 1 ! -name .venv ! -name '*.egg-info' -exec rm -rf {} +
  (cd "$project" && git ls-files -z --cached --others --exclude-standard |
    tar --null --ignore-failed-read --sort=name -T - -cf - 2>/dev/null) | tar -x -C "$to"
  (cd "$to" && find . -path ./.venv -prune -o -type f ! -path './*.egg-info/*' -print0 | sort -z | xargs -0 sha256sum) |
    sha256sum | cut -c 1-16
}

install() {
  copied
  cp "$project/requirements/dev.txt" "$folder/installed"
  inside 5400 'set -e
    cd /root/harness && rm -rf .venv
    python3 -m venv .venv
    .venv/bin/python -m pip install --quiet uv
    .venv/bin/uv pip install --constraints requirements/dev.txt --editable .
    .venv/bin/harness --version'
}

# llama.cpp is compiled by the cross compiler, which this machine runs itself; all else of the build is emulated. It
# knows no -mcpu=native: that is the board's processor.
compilers() {
  local name
  mkdir -p "$root/opt/cross"
  for name in {cc,gcc,aarch64-linux-gnu-gcc}:gcc {c++,g++,aarch64-linux-gnu-g++}:g++; do
    cat >"$root/opt/cross/${name%:*}" <<END
#!/bin/sh
for each; do
  shift
  case \$each in -mcpu=native | -march=native) each=-mcpu=\$QEMU_CPU ;; esac
  set -- "\$@" "\$each"
done
exec /host/usr/bin/aarch64-linux-gnu-${name#*:} "\$@"
END
    chmod 755 "$root/opt/cross/${name%:*}"
  done
}

llamacpp() {
  compilers
  compilers=yes inside 7200 PATH=/opt/cross:/usr/local/bin:/usr/sbin:/usr/bin:/bin CMAKE_BUILD_PARALLEL_LEVEL=2 \
    '/root/harness/.venv/bin/harness env create llamacpp && echo "compiled for $QEMU_CPU"'
}

# Torch for CPUs is on PyTorch's own index alone. Where that cannot be reached, PyPI's build, which needs NVIDIA's
# libraries: 2.7 GB.
hf() {
  inside 10800 'set -e
    cd /root/harness
    reach="import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=20)"
    if ! .venv/bin/python -c "$reach" https://download.pytorch.org/whl/cpu/; then
      torch=$(grep -o -m 1 "torch==[0-9.]*" runners/stacks/hf.py)
      .venv/bin/python -m pip download --quiet --no-deps --dest /root/wheels "$torch"
      export UV_FIND_LINKS=/root/wheels
    fi
    .venv/bin/harness env create hf'
}

if [ -z "$short" ]; then
  cmp -s "$project/requirements/dev.txt" "$folder/installed" || rm -f "$folder/passed/install"
  step emulator emulator
  step debian debian
  step packages packages
  step install install
  board=rpi5 step llamacpp llamacpp
  board=rpi4 step llamacpp-rpi4 llamacpp
  step hf hf
fi

checks=$root/root/checks${short:+-short}
if [ -e "$folder/passed/install" ]; then
  registered
  now=$(copied)
  # What other files showed does not count.
  [ "$(cat "$checks/files" 2>/dev/null)" = "$now" ] || rm -rf "$checks"
  mkdir -p "$checks"
  echo "$now" >"$checks/files"
  inside 14400 "cd /root/harness && .venv/bin/python -m ci.arm64 ${checks#"$root"} ${short:+--short}" || failed=yes
fi
[ -n "$failed" ] && exit 1 || exit 0
