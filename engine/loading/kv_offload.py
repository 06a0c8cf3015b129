"""Opens the folder of --kv-offload for a model, or says why this model or device cannot have one."""

from __future__ import annotations

import hashlib
import json
import sys

from tidewheel import __version__

from ..cache.tiers.block_file import HEADER_BYTES
from ..cache.tiers.folder import BlockFolder, HeldFolders
from ..devices.base import Device
from ..errors import DeviceError, ModelError
from ..models.spec import DecoderSpec

_GIB = 2**30


def open_kv_folder(
    folder: str,
    space_gib: float,
    device: Device,
    spec: DecoderSpec,
    weights_identity: str | None,
    facts: object,
    block_bytes: int,
    shared: HeldFolders | None = None,
) -> BlockFolder:
    """The folder, taken for this process, whose other models have it too if it is `shared`.

    Blocks that it holds are used only if all is the same that decides their bits: this version and its native library,
    the instruction set level, the model and the files of its weights, and `facts`, which are JSON: how weights and
    cache are stored. Raises ModelError and DeviceError, saying what to change.
    """
    if not device.capabilities.kv_offload:
        raise DeviceError(f"the {device.name} device cannot keep KV blocks on disk: drop --kv-offload, or use the cpu")
    if spec.windows() != [None]:
        raise ModelError(
            f"--kv-offload is for models whose layers all see the whole context, and {spec.family} has layers with a "
            "sliding window: drop it, or add --disable-sliding-window"
        )
    if spec.state_bytes:
        raise ModelError(
            f"--kv-offload is for models whose layers all have K and V, and {spec.family} has recurrent layers: drop it"
        )
    if weights_identity is None:
        raise ModelError("--kv-offload needs weights from files: drop it, or drop --load-format dummy")
    space = int(space_gib * _GIB)
    if space < (least := block_bytes + HEADER_BYTES):
        raise ModelError(
            f"--kv-offload-space {space_gib:g} is less than one KV block, which takes {least} bytes: raise it"
        )
    known = [__version__, device.name, device.kv_version(), sys.byteorder, repr(spec), weights_identity, facts]
    identity = hashlib.blake2b(json.dumps(known).encode(), digest_size=16, person=b"kv-identity").digest()
    return BlockFolder(folder, identity, space, shared)
