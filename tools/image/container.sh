# How tools/emulate.sh and tools/accelerators.sh build an image without a container registry, and run it. They set
# $python first, and this machine is Debian 12 for x86-64.
#
# shellcheck shell=bash disable=SC2034,SC2154  # variables of the scripts that read this file

fail() { echo "$0: $*" >&2; exit 1; }

exists() { buildah inspect --type image "$1" >/dev/null 2>&1; }

# needs COMMAND...: fails unless this machine can build and run images with them.
needs() {
    [ "$(id -u)" = 0 ] || fail "has to be root, for chroot and mount"
    [ "$(uname -m)" = x86_64 ] || fail "runs on x86-64"
    (cd / && "$python" -c 'import openai, tidewheel') || fail "$python lacks tidewheel or openai: run make test, or name another with PYTHON="
    local command
    for command in buildah debootstrap "$@"; do
        command -v "$command" >/dev/null || fail "$command is missing; the first lines of this file say what to install"
    done
    mirror=${MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | sed -n '\|/debian/$|{p;q}')}
    mirror=${mirror%/}
    [ -n "$mirror" ] || fail "apt knows no mirror of Debian 12: name one with MIRROR="
}

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

# mounted ARCHITECTURE IMAGE: a new container of the image; sets $container and $root.
mounted() {
    container=$(buildah from --arch "$1" "$2")
    containers+=("$container")
    root=$(buildah mount "$container")
}

# debian_base ARCHITECTURE [SUITE]: makes the image $base of Debian 13 or another suite, unless it is there. It has Debian's
# smallest set of packages without manuals, as in debian:trixie-slim, and the certificates that this machine trusts beside
# Debian's.
debian_base() {
    local suite=${2:-trixie}
    base=localhost/tidewheel-base:$1-$suite
    ! exists "$base" || return 0
    debootstrap --arch="$1" --variant=minbase "$suite" "$scratch/root" "$mirror"
    for archive in "$suite-updates $mirror" "$suite-security ${mirror/%debian/debian-security}"; do
        echo "deb ${archive#* } ${archive% *} main" >>"$scratch/root/etc/apt/sources.list"
    done
    rm -rf "$scratch"/root/{usr/share/{doc,info,locale,man},var/cache/apt/*,var/lib/apt/lists/*,var/log/*}
    printf 'path-exclude /usr/share/%s/*\n' doc info locale man >"$scratch/root/etc/dpkg/dpkg.cfg.d/slim"
    mkdir -p "$scratch/root/usr/local/share/ca-certificates"
    find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t "$scratch/root/usr/local/share/ca-certificates" {} +
    mounted "$1" scratch
    cp -a "$scratch/root/." "$root"
    rm -rf "$scratch/root"
    buildah config --arch "$1" --cmd bash "$container"
    buildah commit --quiet "$container" "$base"
}

# open_image ARCHITECTURE IMAGE: mounts it at $root, reads its settings, and says how large it is.
open_image() {
    mounted "$1" "$2"
    mapfile -t environment < <(setting "$2" '{{range .Docker.Config.Env}}{{println .}}{{end}}')
    mapfile -t entrypoint < <(setting "$2" '{{range .Docker.Config.Entrypoint}}{{println .}}{{end}}')
    mapfile -t health_check < <(setting "$2" '{{range .Docker.Config.Healthcheck.Test}}{{println .}}{{end}}')
    mapfile -t volumes < <(setting "$2" '{{range $path, $_ := .Docker.Config.Volumes}}{{println $path}}{{end}}')
    user=$(setting "$2" '{{.Docker.Config.User}}')
    user=${user:-0:0}
    folder=$(setting "$2" '{{.Docker.Config.WorkingDir}}')
    folder=${folder:-/}
    echo "$2 takes $(mib "$root") MiB unpacked, $(mib "$root/opt/tidewheel") of them in /opt/tidewheel"
}
setting() { buildah inspect --type image --format "$2" "$1" | sed '/^$/d'; }
mib() { du -s --block-size=1M "$1" | cut -f1; }

free_port() { "$python" -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])'; }

# contained VARIABLE=VALUE... COMMAND...: becomes the command in the opened image, as a container engine would run it with
# --read-only and --tmpfs /tmp: in the image's environment, as its user and as process 1, with empty volumes.
contained() {
    # shellcheck disable=SC2016  # the inner shell's variables
    exec unshare --mount --pid --fork --kill-child bash -euc '
        root=$1 user=$2 folder=$3 volumes=$4; shift 4
        mount --bind "$root" "$root"
        mount --rbind /dev "$root/dev"
        mount -t proc proc "$root/proc"
        mount -t tmpfs tmpfs "$root/tmp"
        for volume in $volumes; do mount -t tmpfs -o "uid=${user%:*},gid=${user#*:}" tmpfs "$root$volume"; done
        mount -o remount,bind,ro "$root"
        exec chroot --userspec="$user" "$root" /usr/bin/env -i -C "$folder" "$@"
    ' bash "$root" "$user" "$folder" "${volumes[*]}" "${environment[@]}" "$@"
}

# same_answers VARIABLE=VALUE... [-- ARGUMENTS...]: serves the embedded model from the opened image and from this machine's
# installation, both with the arguments, and compares their answers. Then the image's server must end on SIGTERM.
same_answers() {
    local variables=() port here_port server here
    while [ "$#" -gt 0 ] && [ "$1" != -- ]; do variables+=("$1"); shift; done
    [ "$#" = 0 ] || shift
    port=$(free_port) here_port=$(free_port)
    variables+=("TIDEWHEEL_HOST=127.0.0.1" "TIDEWHEEL_PORT=$port")
    contained "${variables[@]}" "${entrypoint[@]}" "$@" >"$scratch/image.log" 2>&1 &
    server=$!
    (cd / && exec env -u TIDEWHEEL_ISA "$python" -m tidewheel serve --device cpu --host 127.0.0.1 --port "$here_port" "$@") >"$scratch/here.log" 2>&1 &
    here=$!
    "$python" tools/same_answers.py "http://127.0.0.1:$here_port" "http://127.0.0.1:$port"
    kill "$here"
    chroot --userspec="$user" "$root" /usr/bin/env -i "${environment[@]}" "${variables[@]}" "${health_check[@]:1}" \
        || fail "the image's health check finds no healthy server"
    kill -TERM "$(cat "/proc/$server/task/$server/children")"
    wait "$server" || fail "the server in the image ended with exit code $? after SIGTERM"
}
