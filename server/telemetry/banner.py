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
    lines = [f"  {dim(name.ljust(8))}{value}" for name, value in rows.items() if value]
    return "\n".join(["", f"  Tidewheel {__version__}", *lines, ""])


_MEMORY = {"weights": "weight_bytes", "KV cache": "kv_cache_bytes"}


def _size(num_bytes: str) -> str:
    mib = int(num_bytes) / _MIB
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"
