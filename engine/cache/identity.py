"""The identity of a KV block's content: its tokens, the tokens before them, and all else that decides its values."""

from __future__ import annotations

import hashlib

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Digest = bytes

_DIGEST_BYTES = 16


class Identity(Struct, frozen=True):
    """What decides the content of a sequence's blocks in addition to its tokens.

    Sequences with different `salt` or `adapter` share no block. `media` are images and the like, each as the position
    of its first token and a digest of its content. Sequences share the blocks before the first medium that differs.
    """

    salt: str | None = None
    adapter: str | None = None
    media: tuple[tuple[int, bytes], ...] = ()

    @property
    def root(self) -> Digest:
        """The parent of a sequence's first block."""
        content = b""
        if self.adapter is not None:
            name = self.adapter.encode("utf-8", "surrogatepass")
            content += b"adapter:" + len(name).to_bytes(8, "little") + name
        if self.salt is not None:
            content += b"salt:" + self.salt.encode("utf-8", "surrogatepass")
        return _digest(content, b"kv-root")

    def block_digest(self, parent: Digest, start: int, token_ids: NDArray[np.int32]) -> Digest:
        """The digest of a full block that follows the block (or root) `parent` and begins at position `start`.

        Cryptographic, so that no prompt can be made up that collides into the KV cache of another, and the same in
        every process.
        """
        content = parent + token_ids.tobytes()
        for position, digest in self.media:
            if start <= position < start + len(token_ids):
                content += position.to_bytes(8, "little") + len(digest).to_bytes(8, "little") + digest
        return _digest(content, b"kv-block")


def _digest(content: bytes, purpose: bytes) -> Digest:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES, person=purpose).digest()
