# Sourced by the scripts of this folder: where things are, and what they have in common.
# shellcheck shell=bash

emulator_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$emulator_dir/../.." && pwd)
cache=${EMULATOR_CACHE:-$repository/.cache/emulator}

die() {
  echo "$(basename "$0"): $1" >&2
  exit "${2:-1}"
}

# The comment at the top of the calling script.
usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
}

# need COMMAND=PACKAGE...: ends with the list of Debian packages to install when a command is absent.
need() {
  local missing=() pair
  for pair in "$@"; do
    command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
  done
  [ ${#missing[@]} -eq 0 ] || die "missing; as root: apt-get install ${missing[*]}"
}

# What the built machine depends on: another answer than the one in the cache means that it is stale.
build_inputs() {
  (cd "$emulator_dir" && sha256sum build.sh init.c bochs-*.patch | sha256sum | cut -d ' ' -f 1)
}

require_emulator() {
  [ "$(cat "$cache/inputs" 2>/dev/null)" = "$(build_inputs)" ] ||
    die "no emulator in $cache, or an old one; run $emulator_dir/build.sh" 125
}
