#!/usr/bin/env bash
# Runs a few of the registered tests of the Torch ops on the emulated Sapphire Rapids, on its AMX tier.
#
# usage: test_torch.sh PYTHON IMAGE
#
# PYTHON is the interpreter that wrote IMAGE with torch_disk.py. A test that is no longer there is a
# failure. Torch takes half a minute to import there, and each test takes seconds: keep the list short.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

case "${1:-}" in
  -h | --help) usage && exit ;;
esac
[ $# -eq 2 ] || die "needs an interpreter and a disk image (see --help)" 2
python=$1
image=$2

gemm=$repository/test/registered/cpu/test_kernel_gemm.py
packing=$repository/test/registered/cpu/test_kernel_packing.py
ops=$repository/test/registered/cpu/test_kernel_ops.py
tests=(
  "$packing"
  "$gemm::test_every_code_is_exact[amx-False-9]"
  "$gemm::test_per_tensor_grid[amx-33-64]"
  "$gemm::test_per_channel_and_linear[amx-33]"
  "$gemm::test_block_scales[amx-128x128]"
  "$gemm::test_block_scales[amx-7x5]"
  "$gemm::test_one_block_is_a_per_tensor_scale_bit_for_bit[amx]"
  "$gemm::test_bmm[amx-weight_dtype0-act_dtype0]"
  "$gemm::test_bmm[amx-weight_dtype1-act_dtype0]"
  "$gemm::test_strided_rows_are_read_in_place[amx]"
  "$gemm::test_nan_and_infinity_reach_only_their_outputs[amx]"
  "$ops::test_schemas_are_the_documented_ones"
  "$ops::test_cpu_info_tells_tier_and_reasons"
)

# PYTHONPATH: srt is installed as a link to the repository, which import hooks of the environment follow.
"$emulator_dir/run.sh" --disk "$image" --memory 2048 --timeout 1500 \
  --env "PYTHONPATH=$repository" --env PYTHONDONTWRITEBYTECODE=1 \
  "$python" -m pytest -p no:cacheprovider --rootdir "$repository" --color no "${tests[@]}"
