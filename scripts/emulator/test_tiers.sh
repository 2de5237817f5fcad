#!/usr/bin/env bash
# Runs the kernels' C++ tests on emulated machines that lack one feature after another.
#
# usage: test_tiers.sh SGL_KERNEL_TESTS [TEST]
#
# SGL_KERNEL_TESTS is the test binary, linked statically unless it has sanitizers. On each machine it must choose the expected
# tier by itself; it then runs the tests on that tier (all, or those with TEST in their name).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

case "${1:-}" in
  -h | --help) usage && exit ;;
  '') die "no test binary named (see --help)" 2 ;;
esac
binary=$1
tests=${2:-}
require_emulator

amx=amx,amx_int8,amx_bf16
# A processor may have what the operating system does not offer: only the choice of the tier differs.
dispatch=every_kernel

machines=0
failed=()

# machine TIER TESTS DESCRIPTION [run.sh's options...]
machine() {
  local tier=$1 selected=$2 description=$3 status=0 start=$SECONDS
  shift 3
  echo "== $description: $tier"
  # Tests under sanitizers take longer, and more memory.
  "$emulator_dir/run.sh" --timeout 3600 --memory 2048 "$@" "$binary" --best "$tier" ${selected:+"$selected"} || status=$?
  machines=$((machines + 1))
  [ $status -eq 0 ] || failed+=("$tier ($description, status $status)")
  echo "== $((SECONDS - start)) s"
}

machine amx "$tests" "Sapphire Rapids"
machine avx512_bf16 "$tests" "without AMX" --hide "$amx"
machine avx512 "$tests" "without AMX and AVX512_BF16" --hide "$amx,avx512bf16"
machine avx512_bf16 $dispatch "the system saves no tiles" --kernel-args clearcpuid=amx_tile
machine avx2 $dispatch "the system saves no AVX-512 registers" --kernel-args clearcpuid=avx512f
machine scalar $dispatch "the system saves no AVX registers" --kernel-args clearcpuid=avx

[ ${#failed[@]} -eq 0 ] || die "failed on ${#failed[@]} of $machines machines: ${failed[*]}"
echo "test_tiers.sh: $machines machines, each chose its tier and passed"
