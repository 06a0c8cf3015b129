#!/usr/bin/env bash
# Builds an image as its Dockerfile says, for another architecture under emulation, serves the embedded model from it and
# compares its answers with those of the server that is installed here.
#
#   tools/emulate.sh arm64|s390x|amd64 [ARGUMENTS FOR BOTH SERVERS...]
#
# As root on Debian 12 for x86-64, with: apt-get install binfmt-support buildah debootstrap g++-aarch64-linux-gnu g++-s390x-linux-gnu qemu-user-static
# No container registry is used: the base image is made with debootstrap. It is kept, and so are the image's layers, so that
# a second run builds only what has changed; `buildah rmi --all` removes them.
#
#   PYTHON=.venv/bin/python  has tidewheel and openai installed (make serve, make test)
#   QEMU_CPU=                the CPU that qemu emulates: cortex-a76, z14, ...; by default the largest that qemu has
#   TIDEWHEEL_ISA=           the level of kernels for the image's server; by default the best that this CPU has
#   EMULATE_COMPILER=1       emulates the compiler too, which takes hours; by default this machine's cross compiler is used
#   MIRROR=                  Debian's mirror; by default the one of this machine's apt
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(realpath -s "${PYTHON:-.venv/bin/python}")
. tools/image/container.sh

arch=${1:-}
case $arch in
    amd64) machine=x86_64 dockerfile=Dockerfile.cpu ;;
    arm64) machine=aarch64 dockerfile=Dockerfile.arm ;;
    s390x) machine=s390x dockerfile=Dockerfile.s390x ;;
    *) fail "name an architecture: arm64, s390x or amd64" ;;
esac
shift
triple=$machine-linux-gnu
image=localhost/tidewheel:$arch

if [ "$arch" = amd64 ]; then
    needs
else
    needs "$triple-g++"
    grep -qs '^flags: .*F' "/proc/sys/fs/binfmt_misc/qemu-$machine" || update-binfmts --enable "qemu-$machine" \
        || fail "the kernel does not run $machine programs: install qemu-user-static and binfmt-support, mount binfmt_misc"
fi

# The base with this machine's cross compiler: the same gcc, as a native program, ahead of the one that the Dockerfile
# installs.
make_build_base() {
    mounted "$arch" "$base"
    mkdir -p "$root"/{lib64,opt/cross/{bin,lib/gcc-cross,"$triple"},usr/lib/x86_64-linux-gnu}
    cp -a "/usr/lib/gcc-cross/$triple" "$root/opt/cross/lib/gcc-cross/"
    cp -aL "/usr/$triple/." "$root/opt/cross/$triple/"
    ln -s "/opt/cross/$triple" "$root/usr/$triple"  # as the C library's linker script calls it
    local tool name
    for tool in cpp gcc g++ gcc-ar gcc-ranlib; do cp -L "/usr/bin/$triple-$tool" "$root/opt/cross/bin/$triple-$tool"; done
    for tool in ar as ld nm objcopy objdump ranlib readelf strip; do ln -s "../$triple/bin/$tool" "$root/opt/cross/bin/$triple-$tool"; done
    for tool in "$root"/opt/cross/bin/*; do
        name=$(basename "$tool")
        ln -s "$name" "$root/opt/cross/bin/${name#"$triple"-}"
    done
    ln -s gcc "$root/opt/cross/bin/cc"
    ln -s g++ "$root/opt/cross/bin/c++"
    # The libraries of these programs, where this machine's loader looks for them.
    cp -L /lib64/ld-linux-x86-64.so.2 "$root/lib64/"
    find -L "/usr/bin/$triple-gcc" "/usr/lib/gcc-cross/$triple" "/usr/$triple/bin" -type f -executable -exec ldd {} + 2>/dev/null \
        | sed -n 's/.*=> \(\/.*\) (.*/\1/p' | sort -u | xargs cp -L -t "$root/usr/lib/x86_64-linux-gnu"
    buildah config --env PATH=/opt/cross/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    buildah commit --quiet "$container" "$build_base"
}

debian_base "$arch"
build_base=$base
if [ "$arch" != amd64 ] && [ -z "${EMULATE_COMPILER:-}" ]; then
    build_base=localhost/tidewheel-build-base:$arch
    exists "$build_base" || make_build_base
fi
buildah build --isolation chroot --layers --format docker --arch "$arch" --build-arg BASE="$base" --build-arg BUILD_BASE="$build_base" \
    -f "$dockerfile" -t "$image" .

open_image "$arch" "$image"
same_answers ${QEMU_CPU:+"QEMU_CPU=$QEMU_CPU"} ${TIDEWHEEL_ISA:+"TIDEWHEEL_ISA=$TIDEWHEEL_ISA"} \
    -- --dtype float32 --kv-cache-space 1 "$@"
echo "$arch: the same answers, and a clean end"
