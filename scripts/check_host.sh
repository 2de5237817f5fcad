#!/bin/sh
# Says in one line what this machine lacks for setting up the environment (python) or building the kernels (compiler).
# usage: check_host.sh python PYTHON | compiler
set -eu

fail() {
  echo "error: $1" >&2
  exit 1
}

check_python() {
  command -v "$1" >/dev/null 2>&1 ||
    fail "'$1' was not found; install Python 3.10 or newer, or name it: make PYTHON=/path/to/python3"
  found=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "'$1' does not run"
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "Python 3.10 or newer is needed, '$1' is $found; name another: make PYTHON=/path/to/python3"
  "$1" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "'$1' ($found) lacks the venv module; install it (on Debian and Ubuntu: apt install python$found-venv)"
}

check_compiler() {
  cxx=${CXX:-c++}
  # CXX may carry a launcher or flags, as in "ccache g++": only its first word must be a command.
  command -v "${cxx%% *}" >/dev/null 2>&1 ||
    fail "no C++ compiler ('$cxx' was not found); install GCC or Clang, or name one: make CXX=/path/to/c++"
  # shellcheck disable=SC2086
  echo '#include <optional>
        int main() { return std::optional<int>(0).value(); }' |
    $cxx -std=c++17 -x c++ -fsyntax-only - >/dev/null 2>&1 ||
    fail "'$cxx' does not compile C++17 with its standard library; install a newer GCC (>= 9) or Clang (>= 10)"
}

case "${1:-}" in
  python) check_python "${2:?usage: check_host.sh python PYTHON}" ;;
  compiler) check_compiler ;;
  *) fail "usage: check_host.sh python PYTHON | compiler" ;;
esac
