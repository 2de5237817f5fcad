#!/usr/bin/env bash
# Runs an x86-64 program, with the shared libraries it needs, on the emulated Sapphire Rapids that build.sh made.
#
# usage: run.sh [OPTION...] PROGRAM [ARGUMENT...]
#
#   --hide FEATURES     processor features to hide: Bochs' names, separated by commas
#   --kernel-args ARGS  more arguments for the guest's Linux; may be repeated
#   --memory MB         (default 1024)
#   --timeout SECONDS   (default 600)
#   --disk IMAGE        ext4 image that becomes the root; PROGRAM is then a path in it. Not changed
#   --env NAME=VALUE    a variable of PROGRAM's environment; may be repeated
#   --keep FOLDER       keep the work folder: console.log is the kernel's, bochs.log the emulator's
#
# Prints what PROGRAM writes, both streams as one, and exits with its status: 128 + N when signal N
# killed it, 124 when the time is over, 125 when the emulated machine ended without a status.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

hide=la57 # Linux does not boot with Bochs' five-level page tables
kernel_args=
memory=1024
timeout=600
disk=
keep=
environment=(PATH=/usr/bin:/bin HOME=/tmp TMPDIR=/tmp LC_ALL=C.UTF-8)

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage && exit ;;
    --hide | --kernel-args | --memory | --timeout | --disk | --env | --keep)
      [ $# -ge 2 ] || die "$1 needs a value" 2
      ;;&
    --hide) hide+=,$2 ;;
    --kernel-args) kernel_args+=" $2" ;;
    --memory) memory=$2 ;;
    --timeout) timeout=$2 ;;
    --disk) disk=$(realpath -e "$2") || die "no disk image '$2'; torch_disk.py makes one" 2 ;;
    --env) environment+=("$2") ;;
    --keep) keep=$2 ;;
    -*) die "unknown option '$1' (see --help)" 2 ;;
    *) break ;;
  esac
  shift 2
done
[ $# -gt 0 ] || die "no program named (see --help)" 2
[ -n "$disk" ] || [ -f "$1" ] || die "no program '$1'" 2
require_emulator
need cpio=cpio gzip=gzip xorriso=xorriso mformat=mtools grub-mkrescue=grub-common

work=${keep:-$(mktemp -d)}
mkdir -p "$work"
work=$(realpath "$work")
emulator=
# shellcheck disable=SC2317  # the trap calls it
cleanup() {
  [ -z "$emulator" ] || kill "$emulator" 2>/dev/null || true
  [ -n "$keep" ] || rm -rf "$work"
}
trap cleanup EXIT

# What the guest starts from: init.c says what each file is for.
guest=$work/guest
rm -rf "$guest" "$work/iso"
mkdir -p "$guest/dev" "$work/iso/boot/grub"
cp "$cache/init" "$guest/init"
if [ -n "$disk" ]; then
  cp -r "$cache/modules" "$guest/modules"
  program=$1
else
  install -m 755 "$1" "$guest/program"
  program=/program
  # Sanitizers cannot be linked statically. ldd names no library of a static program, and fails.
  while read -r library; do
    install -D -m 755 "$library" "$guest$library"
  done < <(ldd "$1" 2>/dev/null | sed -n 's,^[^/]*\(/[^ ]*\) (0x.*,\1,p')
fi
printf '%s\0' "$program" "${@:2}" >"$guest/arguments"
printf '%s\0' "${environment[@]}" >"$guest/environment"
(cd "$guest" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/iso/boot/initrd.gz"
cp "$cache/vmlinuz" "$work/iso/boot/vmlinuz"

# The guest's clock runs with the count of instructions, so nothing may be calibrated against it.
# AddressSanitizer's shadow has a fixed place, which random addresses may take (norandmaps).
cat >"$work/iso/boot/grub/grub.cfg" <<CFG
set timeout=0
menuentry emulator {
  linux /boot/vmlinuz console=ttyS0 quiet loglevel=4 nokaslr norandmaps mitigations=off tsc=reliable lpj=1000000 no_timer_check cryptomgr.notests random.trust_cpu=on 8250.nr_uarts=2 $kernel_args
  initrd /boot/initrd.gz
}
CFG
grub-mkrescue -o "$work/boot.iso" "$work/iso" >"$work/grub.log" 2>&1 ||
  { cat "$work/grub.log" >&2; die "grub-mkrescue failed" 125; }

# Relative names: Bochs drops spaces from those in its configuration.
ln -sfn "$(realpath "$cache")" "$work/cache"
[ -z "$disk" ] || ln -sfn "$disk" "$work/disk.ext4"
cat >"$work/bochsrc" <<RC
megs: $memory
romimage: file=cache/BIOS-bochs-latest
vgaromimage: file=cache/vgabios.bin
cpu: model=sapphire_rapids, count=1, ips=30000000, reset_on_triple_fault=0, exclude_features="$hide"
ata0-master: type=cdrom, path=boot.iso, status=inserted
${disk:+ata0-slave: type=disk, mode=volatile, path=disk.ext4, journal=disk.redolog}
boot: cdrom
com1: enabled=1, mode=file, dev=console.log
com2: enabled=1, mode=file, dev=output.log
display_library: nogui
log: bochs.log
clock: sync=none
panic: action=fatal
RC

: >"$work/console.log"
: >"$work/output.log"
cd "$work"
timeout "$timeout" cache/bochs -q -f bochsrc </dev/null >bochs.out 2>&1 &
emulator=$!
tail -q -n +1 -s 0.2 -f --pid "$emulator" output.log
emulator_status=0
wait "$emulator" || emulator_status=$?
emulator=

status=$(tr -d '\r' <console.log | sed -n 's/^EMULATOR_EXIT \([0-9]*\)$/\1/p' | tail -n 1)
if [ -z "$status" ]; then
  echo "run.sh: the emulated machine ended without a status; the last lines of its console:" >&2
  tail -n 25 console.log >&2
  grep -a -A 2 'exiting with' bochs.out >&2 || true
  [ "$emulator_status" -ne 124 ] || die "out of time after $timeout s" 124
  exit 125
fi
exit "$status"
