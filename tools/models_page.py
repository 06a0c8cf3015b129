"""Writes the tables of docs/models.md from the code's own registries.

Usage, where Tidewheel is installed: python tools/models_page.py
"""

from __future__ import annotations

import re
import runpy
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from tidewheel.engine.devices import SERVING_DEVICES, get_device
from tidewheel.engine.devices.base import Device
from tidewheel.engine.devices.coverage import missing_kinds
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.media.families import FAMILIES as VISION_FAMILIES
from tidewheel.engine.models import SUPPORTED_ARCHITECTURES, describe
from tidewheel.engine.models.families import family_of
from tidewheel.engine.models.spec import DecoderSpec
from tidewheel.engine.models.text_part import WRAPPERS
from tidewheel.engine.weights.block_types import BLOCK_TYPES
from tidewheel.engine.weights.dtypes import KvCacheDType
from tidewheel.engine.weights.gguf.architectures import ARCHITECTURES as GGUF_ARCHITECTURES
from tidewheel.engine.weights.gguf.architectures import variants_of
from tidewheel.engine.weights.gguf.tokenizer import supported_pre
from tidewheel.engine.weights.quantized import readers

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
CONFIGS = ROOT / "tests" / "model_configs.py"  # the smallest config of every architecture


def main() -> None:
    """Write the page."""
    page = PAGE.read_text("utf-8")
    PAGE.write_text(made(page, runpy.run_path(str(CONFIGS))["CONFIGS"]), "utf-8")


def made(page: str, configs: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with its tables filled in.

    `configs` has one config of every architecture, which shows its layers. Raises ValueError if the page lacks the
    place of a table.
    """
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: made by tools/models_page.py -->\n", f"<!-- end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page must have one block from {begin.strip()} to {end}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{table(configs)}{end}{rest.partition(end)[2]}"
    return page


def families(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Every architecture: its models, the refused options, and the devices that run it."""
    in_gguf = defaultdict(list)
    for name in GGUF_ARCHITECTURES:
        for stored in variants_of(name):
            in_gguf[stored.name].append(f"`{name}`")
    rows = []
    for architecture in SUPPORTED_ARCHITECTURES:
        listing = family_of(architecture).ARCHITECTURES[architecture]
        spec = describe(configs[architecture]).spec
        able = [device for device in SERVING_DEVICES if not missing_kinds(device, spec)]
        rows.append(
            (listing.models, f"`{architecture}`", ", ".join(in_gguf[architecture]), _devices(able), listing.refused)
        )
    return _table(("models", "architecture in `config.json`", "in GGUF", "devices", "refused"), sorted(rows, key=_name))


def wrappers(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Models with other parts: those that see images, and those of which only the language model is served."""
    seeing = sorted(VISION_FAMILIES)
    names = (
        f"These models that take images [see them](media.md): {_code(seeing)}.",
        "Of other checkpoints that take images or sound, the language model is served, and requests are text only: "
        f"{_code(sorted({*WRAPPERS} - {*seeing}))}.",
    )
    return "\n".join("".join(f"{line}\n" for line in textwrap.wrap(text, 120)) for text in names)


def methods(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """The methods of quantized checkpoints."""
    rows = [(f"`{reader.name}`", reader.works, reader.refused) for reader in readers()]
    return _table(("`quant_method`", "what works", "refused"), rows)


def gguf(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """What GGUF files may hold."""
    types = [f"{kind.name} ({8 * kind.bytes / kind.elements:g})" for kind in BLOCK_TYPES.values()]
    pre = ", ".join(f"`{name}`" for name in supported_pre())
    return _table(
        ("what", "supported"),
        [
            ("architectures", ", ".join(f"`{name}`" for name in sorted(GGUF_ARCHITECTURES))),
            ("tensor types (bits a weight)", ", ".join(types)),
            ("tokenizers", f"SentencePiece (`llama`, `gemma4`); byte-level BPE with `pre` {pre}"),
            ("files", "versions 2 and 3, little-endian"),
        ],
    )


def devices(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """What each device keeps weights, K and V in."""
    spec = describe(next(iter(configs.values()))).spec
    rows = []
    for name in SERVING_DEVICES:
        device = get_device(name)
        kept = "dequantized to `--dtype`"
        if device.capabilities.quantizes:
            kept = f"[in the file's {'bits' if name == 'cpu' else 'numbers'}]({_KEPT_BY.get(name, _KEPT)})"
        quantization = _code(device.capabilities.quantizes) if device.capabilities.quantizes else "no effect"
        cached = [dtype for dtype in get_args(KvCacheDType) if _caches(device, spec, dtype)]
        rows.append((f"`{name}`", kept, quantization, _code(cached)))
    return _table(("device", "quantized files", "`--quantization`", "`--kv-cache-dtype`"), rows)


_KEPT, _KEPT_BY = "#quantized-weights-on-accelerators", {"cpu": "#quantized-weights-in-memory"}

TABLES: dict[str, Callable[[Mapping[str, Mapping[str, Any]]], str]] = {
    "families": families,
    "wrappers": wrappers,
    "methods": methods,
    "gguf": gguf,
    "devices": devices,
}


def _caches(device: Device, spec: DecoderSpec, dtype: KvCacheDType) -> bool:
    try:
        device.kv_bytes_per_token(spec, dtype)
    except DeviceError:
        return False
    return True


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _devices(able: Sequence[str]) -> str:
    return "all" if list(able) == list(SERVING_DEVICES) else ", ".join(able)


def _name(row: tuple[str, ...]) -> str:
    return re.sub(r"\W", "", row[0]).lower()


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (head, tuple("---" for _ in head), *rows)
    return "".join("| " + " | ".join(line).replace("|  |", "| |").rstrip() + " |\n" for line in lines)


if __name__ == "__main__":
    main()
