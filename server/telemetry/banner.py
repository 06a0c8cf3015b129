"""The text on a terminal once the server is ready: what is served, with which software, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidewheel import __version__

from .logs import dim

_MIB = 2**20


def banner(names: Sequence[str], info: Mapping[str, str], max_model_len: int, address: str, *, page: bool) -> str:
    """A few lines. `info` is the engine's; what it does not say is left out."""
    kernels = f", {info['isa']} kernels" if info.get("isa") else ""
    sizes = [f"{what} {_size(info[name])}" for what, name in _MEMORY.items() if info.get(name)]
    model = [info[name] for name in ("architecture", "weights") if info.get(name)]
    rows = {
        "model": ", ".join(names) + (f" ({', '.join(model)})" if model else ""),
        "device": f"{info.get('device', '')}{kernels}",
        "stages": info.get("stages", ""),
        "memory": ", ".join(sizes),
        "context": f"{max_model_len} tokens",
        "page": f"{address}/" if page else "",
        "API": f"{address}/v1",
    }
    return _text(rows)


def hosting_banner(names: Sequence[str], memory_bytes: int, address: str, *, page: bool) -> str:
    """The same for a server of several models, none of which is loaded yet. 0 bytes are unknown."""
    rows = {
        "models": few(names) or "none yet",
        "memory": f"{_size(str(memory_bytes))} for all that are loaded" if memory_bytes else "",
        "page": f"{address}/" if page else "",
        "API": f"{address}/v1",
    }
    return _text(rows)


def few(names: Sequence[str], most: int = 16) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _text(rows: Mapping[str, str]) -> str:
    lines = [f"  {dim(name.ljust(8))}{value}" for name, value in rows.items() if value]
    return "\n".join(["", f"  Tidewheel {__version__}", *lines, ""])


_MEMORY = {"weights": "weight_bytes", "KV cache": "kv_cache_bytes"}


def _size(num_bytes: str) -> str:
    mib = int(num_bytes) / _MIB
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"
