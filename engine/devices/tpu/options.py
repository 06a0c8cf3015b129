"""The options that only the TPU device has."""

from __future__ import annotations

from ...declaring.option import Options, option
from ...declaring.record import record
from ...declaring.values import count

_SMALLEST_BUCKET = 16


def _gap(value: float) -> str | None:
    if value >= 0 and value % _SMALLEST_BUCKET == 0:
        return None
    return f"must be 0 or a multiple of {_SMALLEST_BUCKET}"


@record(frozen=True)
class TpuOptions(Options):
    """Which sizes of step are compiled, and where compiled programs are kept between starts (None: nowhere)."""

    xla_cache_path: str | None = option(
        "~/.cache/vllm/xla_cache",
        "a folder for compiled programs, for faster starts; an empty value keeps none",
        parse=lambda text: text or None,
        metavar="FOLDER",
        env_aliases=("VLLM_XLA_CACHE_PATH",),
    )
    tpu_bucket_padding_gap: int = option(
        0,
        "compile steps of every multiple of this many tokens, and of powers of two below it; 0: only of powers of two",
        parse=count,
        check=_gap,
        metavar="TOKENS",
        env_aliases=("VLLM_TPU_BUCKET_PADDING_GAP",),
    )
