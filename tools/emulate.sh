#!/usr/bin/env bash
# Builds an image as its Dockerfile says, for another architecture under emulation, serves the embedded model from it and
# compares its answers with those of the server that is installed here.
#
#   tools/emulate.sh arm64|s390x|amd64 [ARGUMENTS FOR BOTH SERVERS...]
#
# As root on Debian 12 for x86-64, with: apt-get install binfmt-support buildah debootstrap g++-aarch64-linux-gnu g++-s390x-linux-gnu qemu-user-static
# No container registry is asked: the base image is made with debootstrap. It is kept, and so are the image's layers, so that
# a second run builds only what has changed; `buildah rmi --all` forgets them.
#
#   PYTHON=.venv/bin/python  has tidewheel and openai installed (make serve, make test)
#   QEMU_CPU=                the CPU that qemu plays: cortex-a76, z14, ...; by default it has all that qemu knows
#   TIDEWHEEL_ISA=           the level of kernels for the image's server; by default the best that this CPU has
#   EMULATE_COMPILER=1       emulates the compiler too, which takes hours; else it is this machine's cross compiler
#   MIRROR=                  Debian's mirror; by default the one of this machine's apt
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "tools/emulate.sh: $*" >&2; exit 1; }

arch=${1:-}
case $arch in
    amd64) machine=x86_64 dockerfile=Dockerfile.cpu ;;
    arm64) machine=aarch64 dockerfile=Dockerfile.arm ;;
    s390x) machine=s390x dockerfile=Dockerfile.s390x ;;
    *) fail "name an architecture: arm64, s390x or amd64" ;;
esac
shift
triple=$machine-linux-gnu
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
mirror=${MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | sed -n '\|/debian/$|{p;q}')}
mirror=${mirror%/}
[ -n "$mirror" ] || fail "apt knows no mirror of Debian 12: name one with MIRROR="
base=localhost/tidewheel-base:$arch
build_base=$base
image=localhost/tidewheel:$arch

[ "$(id -u)" = 0 ] || fail "has to be root, for chroot and mount"
[ "$(uname -m)" = x86_64 ] || fail "runs on x86-64"
(cd / && "$python" -c 'import openai, tidewheel') || fail "$python lacks tidewheel or openai: run make test, or name another with PYTHON="
needed=(buildah debootstrap)
[ "$arch" = amd64 ] || needed+=("$triple-g++")
for command in "${needed[@]}"; do
    command -v "$command" >/dev/null || fail "$command is missing; the first lines of this file say what to install"
done
if [ "$arch" != amd64 ]; then
    grep -qs '^flags: .*F' "/proc/sys/fs/binfmt_misc/qemu-$machine" || update-binfmts --enable "qemu-$machine" \
        || fail "the kernel does not run $machine programs: install qemu-user-static and binfmt-support, mount binfmt_misc"
fi

scratch=$(mktemp -d)
containers=()
finish() {
    local code=$?
    for pid in $(jobs -p); do kill "$pid" 2>/dev/null || true; done
    wait
    [ "$code" = 0 ] || tail -n 50 "$scratch"/*.log 2>/dev/null || true
    [ "${#containers[@]}" = 0 ] || buildah rm "${containers[@]}" >/dev/null
    rm -rf "$scratch"
}
trap finish EXIT

# mounted IMAGE: a new container of the image; sets $container and $root.
mounted() {
    container=$(buildah from --arch "$arch" "$1")
    containers+=("$container")
    root=$(buildah mount "$container")
}

# Debian's smallest set of packages without manuals, as in debian:bookworm-slim, and the certificates that this machine
# trusts beside Debian's.
make_base() {
    debootstrap --arch="$arch" --variant=minbase bookworm "$scratch/root" "$mirror"
    for archive in "bookworm-updates $mirror" "bookworm-security ${mirror/%debian/debian-security}"; do
        echo "deb ${archive#* } ${archive% *} main" >>"$scratch/root/etc/apt/sources.list"
    done
    rm -rf "$scratch"/root/{usr/share/{doc,info,locale,man},var/cache/apt/*,var/lib/apt/lists/*,var/log/*}
    printf 'path-exclude /usr/share/%s/*\n' doc info locale man >"$scratch/root/etc/dpkg/dpkg.cfg.d/slim"
    mkdir -p "$scratch/root/usr/local/share/ca-certificates"
    find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t "$scratch/root/usr/local/share/ca-certificates" {} +
    mounted scratch
    cp -a "$scratch/root/." "$root"
    rm -rf "$scratch/root"
    buildah config --arch "$arch" --cmd bash "$container"
    buildah commit --quiet "$container" "$base"
}

# The base with this machine's cross compiler: the same gcc, at home on this CPU, before the one that the Dockerfile installs.
make_build_base() {
    mounted "$base"
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
    # What these programs are linked with, where this machine's loader looks for it.
    cp -L /lib64/ld-linux-x86-64.so.2 "$root/lib64/"
    find -L "/usr/bin/$triple-gcc" "/usr/lib/gcc-cross/$triple" "/usr/$triple/bin" -type f -executable -exec ldd {} + 2>/dev/null \
        | sed -n 's/.*=> \(\/.*\) (.*/\1/p' | sort -u | xargs cp -L -t "$root/usr/lib/x86_64-linux-gnu"
    buildah config --env PATH=/opt/cross/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    buildah commit --quiet "$container" "$build_base"
}

exists() { buildah inspect --type image "$1" >/dev/null 2>&1; }

exists "$base" || make_base
if [ "$arch" != amd64 ] && [ -z "${EMULATE_COMPILER:-}" ]; then
    build_base=localhost/tidewheel-build-base:$arch
    exists "$build_base" || make_build_base
fi
buildah build --isolation chroot --layers --format docker --arch "$arch" --build-arg BASE="$base" --build-arg BUILD_BASE="$build_base" \
    -f "$dockerfile" -t "$image" .

# As a container engine would run it with --read-only --tmpfs /tmp: its environment, its user, its entry point as process 1.
mounted "$image"
config() { buildah inspect --type image --format "$1" "$image"; }
mib() { du -s --block-size=1M "$1" | cut -f1; }
echo "$image takes $(mib "$root") MiB unpacked, $(mib "$root/opt/tidewheel") of them in /opt/tidewheel"
words() { config "{{range $1}}{{println .}}{{end}}" | sed '/^$/d'; }
mapfile -t environment < <(words .Docker.Config.Env)
mapfile -t entrypoint < <(words .Docker.Config.Entrypoint)
mapfile -t health_check < <(words .Docker.Config.Healthcheck.Test)
user=$(config '{{.Docker.Config.User}}')
arguments=(--dtype float32 --kv-cache-space 1 "$@")
read -r port here_port < <("$python" -c 'import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(s.getsockname()[1] for s in sockets))')
environment+=("TIDEWHEEL_HOST=127.0.0.1" "TIDEWHEEL_PORT=$port" ${QEMU_CPU:+"QEMU_CPU=$QEMU_CPU"} ${TIDEWHEEL_ISA:+"TIDEWHEEL_ISA=$TIDEWHEEL_ISA"})
# shellcheck disable=SC2016  # the inner shell's variables
unshare --mount --pid --fork --kill-child bash -euc '
    root=$1 user=$2; shift 2
    mount --bind "$root" "$root"
    mount --rbind /dev "$root/dev"
    mount -t proc proc "$root/proc"
    mount -t tmpfs tmpfs "$root/tmp"
    mount -t tmpfs -o "uid=${user%:*},gid=${user#*:}" tmpfs "$root/var/cache/huggingface"
    mount -o remount,bind,ro "$root"
    exec chroot --userspec="$user" "$root" /usr/bin/env -i "$@"
' bash "$root" "$user" "${environment[@]}" "${entrypoint[@]}" "${arguments[@]}" >"$scratch/image.log" 2>&1 &
server=$!
(cd / && exec env -u TIDEWHEEL_ISA "$python" -m tidewheel serve --host 127.0.0.1 --port "$here_port" "${arguments[@]}") >"$scratch/here.log" 2>&1 &
here=$!
"$python" tools/same_answers.py "http://127.0.0.1:$here_port" "http://127.0.0.1:$port"
kill "$here"
chroot --userspec="$user" "$root" /usr/bin/env -i "${environment[@]}" "${health_check[@]:1}" || fail "the image's health check finds no healthy server"

# A server that is asked to stop as process 1 does so, with exit code 0.
kill -TERM "$(cat "/proc/$server/task/$server/children")"
wait "$server" || fail "the server in the image ended with exit code $? after SIGTERM"
echo "$arch: the same answers, and a clean end"
