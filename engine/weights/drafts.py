"""Layers that predict further tokens (MTP), which checkpoints ship and nothing here computes."""

from __future__ import annotations

import re
from collections.abc import Iterable

FOR_DRAFTS = "layers that predict further tokens (MTP), which are not used"

_MTP = re.compile(r"(?:model\.|language_model\.)*mtp\.")
_LAYER = re.compile(r"(.*\.layers\.)(\d{1,6})\.")


def draft_tensors(names: Iterable[str], layers: str, num_layers: int) -> list[str]:
    """Those that belong to them: below `mtp.`, or in layers behind the model's own, whose names begin with `layers`."""

    def is_for_drafts(name: str) -> bool:
        found = _LAYER.match(name)
        behind = found is not None and found[1] == layers and int(found[2]) >= num_layers
        return behind or _MTP.match(name) is not None

    return [name for name in names if is_for_drafts(name)]
