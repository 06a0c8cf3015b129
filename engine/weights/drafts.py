"""Layers that predict further tokens (MTP), which checkpoints ship. They are used for drafts where that is asked."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import ModelError

_FOR_DRAFTS = "layers that predict further tokens (MTP)"
_MTP = re.compile(r"(?:model\.|language_model\.)*mtp\.")
_LAYER = re.compile(r"(.*\.layers\.)(\d{1,6})\.")


def draft_tensors(names: Iterable[str], layers: str, num_layers: int) -> list[str]:
    """The tensors of layers for drafts: below `mtp.`, or in `layers` whose numbers are behind the model's own."""

    def is_for_drafts(name: str) -> bool:
        found = _LAYER.match(name)
        behind = found is not None and found[1] == layers and int(found[2]) >= num_layers
        return behind or _MTP.match(name) is not None

    return [name for name in names if is_for_drafts(name)]


def not_loaded(count: int, *, usable: bool) -> str:
    """Says that `count` tensors of such layers are left out, and what would use them if they are `usable`."""
    if not usable:
        return f"{count} tensors of {_FOR_DRAFTS} are not loaded, because they are not used"
    use = '--speculative-config \'{"method": "mtp"}\' drafts with them'
    return f"{count} tensors of {_FOR_DRAFTS} are not loaded; {use}"


def no_mtp(where: str) -> ModelError:
    """The error for a checkpoint without the layer that is asked for."""
    return ModelError(
        f"--speculative-config: {where} has no layer that predicts further tokens (MTP); take a checkpoint that has "
        'it, or {"method": "ngram"}'
    )
