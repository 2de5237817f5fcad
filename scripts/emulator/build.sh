#!/usr/bin/env bash
# Builds the emulated Sapphire Rapids for run.sh, once, into a cache folder.
#
# usage: build.sh
#
# Does nothing when the cache is up to date. Fetches, through apt, the source of Bochs and a kernel of
# Debian 13; the machine's own apt configuration, packages and lists stay as they are. Ends with the
# self-test of the emulated machine.
#
#   EMULATOR_CACHE   the folder (default: .cache/emulator of the repository)
#   EMULATOR_MIRROR  URL of a Debian mirror (default: the one that this machine's apt uses)
#   JOBS             compilers at once (default: one a core)
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

bochs_version=3.0
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
# Drivers of the emulated disk, in the order of their dependencies; all else is built into the kernel.
kernel_modules=(scsi_common scsi_mod libata ata_piix sd_mod)

case "${1:-}" in
  '') ;;
  -h | --help) usage && exit ;;
  *) die "unknown argument '$1' (see --help)" 2 ;;
esac

if [ "$(cat "$cache/inputs" 2>/dev/null)" = "$(build_inputs)" ]; then
  exit 0
fi

[ "$(uname -m)" = x86_64 ] || die "the emulator's boot loader needs an x86-64 host, this is $(uname -m)"
need apt-get=apt dpkg-deb=dpkg g++=g++ make=make patch=patch xz=xz-utils cpio=cpio gzip=gzip \
  xorriso=xorriso mformat=mtools grub-mkrescue=grub-common
[ -e /usr/lib/grub/i386-pc/boot.img ] || die "missing; as root: apt-get install grub-pc-bin"
[ -e "$keyring" ] || die "missing; as root: apt-get install debian-archive-keyring"

# shellcheck disable=SC2016  # $(REPO_URI) is apt's
mirror=${EMULATOR_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' | sed -n '\,/debian/\?$,{p;q;}')}
[ -n "$mirror" ] || die "this machine's apt knows no Debian mirror; set EMULATOR_MIRROR to the URL of one"

mkdir -p "$cache"
rm -f "$cache/inputs"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() {
  echo "emulator: $1"
}

# An apt of our own, which knows nothing but Debian 13 and checks its signatures.
setup_apt() {
  mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial"
  : >"$work/apt/status"
  printf '%s\n' "deb [signed-by=$keyring] $mirror trixie main" \
    "deb-src [signed-by=$keyring] $mirror trixie main" >"$work/apt/sources.list"
  cat >"$work/apt/apt.conf" <<CONF
Dir::State "$work/apt";
Dir::State::status "$work/apt/status";
Dir::Cache "$work/apt/cache";
Dir::Etc::SourceList "$work/apt/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
APT::Architecture "amd64";
APT::Architectures { "amd64"; };
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Retries "3";
CONF
  export APT_CONFIG=$work/apt/apt.conf
  apt-get -qq update
}

build_bochs() {
  mkdir "$work/source" "$work/bochs"
  (cd "$work/source" && apt-get -qq source --tar-only bochs)
  local tarball
  tarball=$(echo "$work/source"/bochs_*.orig.tar.*)
  [[ $tarball == */bochs_"$bochs_version"[+.]* ]] ||
    die "the patch is for Bochs $bochs_version, Debian has $(basename "$tarball")"
  tar -xf "$tarball" -C "$work/bochs" --strip-components 1
  cd "$work/bochs"
  patch -s -p1 <"$emulator_dir/bochs-$bochs_version-amx.patch"
  # No -march: the cache may be used on other machines. No show-ips: that logs from a signal handler,
  # which now and then waits for ever for the lock of the log that it interrupted.
  local flags="-O3 -fomit-frame-pointer -pipe"
  ./configure --enable-cpu-level=6 --enable-x86-64 --enable-avx --enable-evex --enable-amx \
    --enable-fpu --enable-long-phy-address --enable-pci --enable-handlers-chaining \
    --enable-repeat-speedups --enable-fast-function-calls --enable-trace-linking \
    --disable-show-ips --disable-plugins --disable-docbook --with-nogui \
    CFLAGS="$flags" CXXFLAGS="$flags" >"$work/configure.log" 2>&1 || { tail -n 20 "$work/configure.log" >&2; die "configuring Bochs failed"; }
  make -j "${JOBS:-$(nproc)}" >"$work/make.log" 2>&1 ||
    { tail -n 20 "$work/make.log" >&2; die "compiling Bochs failed"; }
  strip -o "$cache/bochs" bochs
}

# The kernel, its disk drivers, the firmware.
unpack_packages() {
  mkdir "$work/packages" "$work/root"
  local kernel package name
  kernel=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
  [ -n "$kernel" ] || die "Debian's linux-image-cloud-amd64 depends on no kernel image"
  (cd "$work/packages" && apt-get -qq download "$kernel" bochsbios vgabios)
  for package in "$work/packages"/*.deb; do dpkg-deb -x "$package" "$work/root"; done
  cp "$work/root"/boot/vmlinuz-* "$cache/vmlinuz"
  cp -L "$work/root/usr/share/bochs/BIOS-bochs-latest" "$work/root/usr/share/vgabios/vgabios.bin" "$cache/"
  rm -rf "$cache/modules" && mkdir "$cache/modules"
  for name in "${kernel_modules[@]}"; do
    find "$work/root" -name "$name.ko.xz" -exec xz -dc {} + >"$cache/modules/$name.ko"
    [ -s "$cache/modules/$name.ko" ] || die "$kernel has no module $name"
    echo "$name.ko" >>"$cache/modules/order"
  done
}

say "building it into $cache (a few minutes, once)"
setup_apt
unpack_packages
(build_bochs)
gcc -O2 -Wall -static -s -o "$cache/init" "$emulator_dir/init.c"
build_inputs >"$cache/inputs"

say "its self-test"
g++ -std=c++17 -O1 -static -march=sapphirerapids -o "$work/selftest" "$emulator_dir/selftest.cpp"
"$emulator_dir/run.sh" --timeout 300 "$work/selftest" || {
  rm -f "$cache/inputs"
  die "the self-test of the emulated machine failed"
}
