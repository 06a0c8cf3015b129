#!/bin/sh
# Builds the server on the Python of an accelerator's base image. The Dockerfiles of accelerators run it, in this order:
#
#   EXTRAS="..." tools/image/build.sh packages   wheels of the pinned packages that the server and these extras need
#   EXTRAS="..." tools/image/build.sh server     the server in /opt/tidewheel, with those of the wheels that the base lacks
#   tools/image/build.sh sbom STATUS             what the image is made of, with the Debian packages of dpkg's file STATUS
#
# /opt/tidewheel is a virtual environment that sees the packages of the base. So the vendor's torch is the one that runs.
set -eu

EXTRAS=${EXTRAS:-}
python=/opt/tidewheel/bin/python
build=/opt/build/bin

packages() {
    apt-get update
    apt-get install -y --no-install-recommends ca-certificates g++
    # A Python that is not Debian's, like conda's, brings its own headers.
    python3 -c 'import ensurepip, os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' \
        || apt-get install -y --no-install-recommends python3-dev python3-venv
    rm -rf /var/lib/apt/lists/*
    python3 -m venv /opt/build
    python3 -m venv --system-site-packages --without-pip /opt/tidewheel
    # A base may have its packages in a virtual environment, as AMD's and vLLM's have. Another one does not see those.
    if python3 -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
        site_packages python3 >"$(site_packages $python)/base.pth"
    fi
    $build/pip install --no-cache-dir --require-hashes -r requirements/build.txt
    set -- -r requirements/server.txt
    for extra in $EXTRAS; do set -- "$@" -r "requirements/$extra.txt"; done
    $build/pip wheel --no-cache-dir --no-deps --no-build-isolation --require-hashes --wheel-dir /wheels "$@"
}

site_packages() {
    "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

server() {
    PATH=$build:$PATH $build/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .
    # A package of the base stays unless it is too old for the server. All other packages come from /wheels.
    $build/pip --python $python install --no-cache-dir --no-index --find-links /wheels --no-compile \
        "tidewheel[$(echo "$EXTRAS" | tr -s ' ' ,)]"
    # The base's packages may conflict with each other. Only conflicts of the packages that were just installed are
    # errors here.
    $build/pip --python $python check || echo "The lines above that name no package of the server are the base image's."
    # The server's user could not write bytecode. It is never checked against its source, which does not change.
    # Packages may have files for newer versions of Python only, which do not compile here.
    $python -m compileall -qq --invalidation-mode unchecked-hash /opt/tidewheel/lib || true
    /opt/tidewheel/bin/tidewheel devices
}

sbom() {
    # The environment's own folder comes first in the path of its Python, the folders of the base follow.
    $python -c 'import sys; print("\0".join(path for path in sys.path if path.endswith("-packages")), end="")' \
        | xargs -0 $build/python tools/sbom.py --python /opt/tidewheel --output /opt/tidewheel/sbom.cdx.json --debian "$1" --base
}

"$@"
