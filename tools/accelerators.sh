#!/usr/bin/env bash
# Builds the images for accelerators as their Dockerfiles say, and starts them on a machine that has no accelerator.
#
#   tools/accelerators.sh [tpu] [hpu] [neuron] [cuda] [rocm] [xpu]
#
# As root on Debian 12 for x86-64, with: apt-get install buildah debootstrap
# No container registry is used. The image for TPUs is built on a base made with debootstrap, and serves the embedded model
# with JAX on the CPU. The others are built on the same base with the torch of $PYTHON, instead of the vendors' bases. They
# must say what is missing, and serve with --device cpu. Bases and layers are kept; `buildah rmi --all` removes them.
#
#   PYTHON=.venv/bin/python  has tidewheel, openai and torch for CPUs installed (make test), and is Python 3.11
#   MIRROR=                  Debian's mirror; by default the one of this machine's apt
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(realpath -s "${PYTHON:-.venv/bin/python}")
. tools/image/container.sh

# What each image says when its accelerator is missing.
declare -A refusals=(
    [tpu]='/dev/vfio/0 is missing'
    [hpu]='habana_frameworks is not installed'
    [neuron]='/dev/neuron0 is missing'
    [cuda]='/dev/nvidia0 is missing'
    [rocm]='/dev/kfd, or an AMD GPU in /dev/dri, is missing'
    [xpu]='an Intel GPU in /dev/dri is missing'
)
[ "$#" -gt 0 ] || set -- tpu hpu neuron cuda rocm xpu
for device in "$@"; do
    [ -n "${refusals[$device]:-}" ] || fail "name one of these, or none for all: ${!refusals[*]}"
done
needs

# The base with torch in the same place as in a vendor's base: among the packages of the system's Python, which has the
# same version.
torch_base() {
    debian_base amd64 bookworm
    local debian=$base
    base=localhost/tidewheel-base:torch
    ! exists "$base" || return 0
    mounted amd64 "$debian"
    buildah run --isolation chroot "$container" -- sh -ec 'apt-get update
        apt-get install -y --no-install-recommends python3
        rm -rf /var/lib/apt/lists/*'
    (cd / && "$python" - "$root/usr/local/lib/python3.11/dist-packages") <<'EOF'
import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info[:2] != (3, 11):
    sys.exit(f"{sys.executable} is not Python 3.11, which Debian 12 has")
target, wanted, seen = Path(sys.argv[1]), ["torch", "numpy"], set()
while wanted:
    name = wanted.pop()
    if name in seen:
        continue
    seen.add(name)
    found = distribution(name)
    requirements = map(Requirement, found.requires or ())
    wanted += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    for file in found.files or ():
        if ".." not in file.parts:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found.locate_file(file), target / file)
print("The base has", *sorted(seen))
EOF
    buildah commit --quiet "$container" "$base"
}

# built DEVICE ARGUMENTS...: builds its image on $base, and opens it.
built() {
    image=localhost/tidewheel:$1
    buildah build --isolation chroot --layers --format docker --build-arg BASE="$base" "${@:2}" -f "Dockerfile.$1" -t "$image" .
    open_image amd64 "$image"
    "$python" - "$root/opt/tidewheel/sbom.cdx.json" <<'EOF'
import json
import sys

names = {component["purl"].partition("@")[0] for component in json.load(open(sys.argv[1]))["components"]}
frameworks = names & {"pkg:pypi/torch", "pkg:pypi/jax"}
if not frameworks or not names >= {"pkg:pypi/numpy", "pkg:deb/debian/tini"}:
    sys.exit(f"the list of packages is not complete: {sorted(names)}")
EOF
}

# refuses DEVICE: the image's server ends at once and says what is missing.
refuses() {
    ! (contained timeout 60 "${entrypoint[@]}") >"$scratch/refusal.log" 2>&1 || fail "$1: the server ended as if all were well"
    grep -F "${refusals[$1]}" "$scratch/refusal.log" || fail "$1: the server does not say: ${refusals[$1]}"
}

for device in "$@"; do
    if [ "$device" = tpu ]; then
        debian_base amd64
        built tpu
        refuses tpu
        same_answers JAX_PLATFORMS=cpu -- --dtype float32 --max-model-len 512 --max-num-seqs 8
        echo "tpu: says what is missing; the same answers with JAX on the CPU, and a clean end"
    else
        torch_base
        built "$device" --build-arg EXTRAS=
        own=$(find "$root/opt/tidewheel/lib" -maxdepth 3 \( -name torch -o -name numpy \))
        [ -z "$own" ] || fail "$device: the image has packages that the base has too: $own"
        refuses "$device"
        same_answers TIDEWHEEL_DEVICE=cpu -- --dtype float32 --kv-cache-space 1
        echo "$device: says what is missing; the same answers with --device cpu, and a clean end"
    fi
done
