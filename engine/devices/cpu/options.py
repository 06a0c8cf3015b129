"""The options that only the CPU device has."""

from __future__ import annotations

from ...declaring.option import Options, option
from ...declaring.record import record
from ...declaring.values import at_least, count


def _check_binding(cores: str) -> str | None:
    return "must name cores or be auto: threads are always bound to cores" if cores == "nobind" else None


@record(frozen=True)
class CpuOptions(Options):
    """Which cores to compute on, and where packed weights are kept between starts (None: nowhere)."""

    threads_bind: str = option(
        "auto",
        "cores to compute on, e.g. 0-29, or 0-31|32-63 for groups of threads: one for each NUMA node, or one for "
        "each stage of a pipeline (with --tensor-parallel-size, all groups of the first stage, then those of the "
        "next); auto makes the groups from all cores that the process may use",
        parse=lambda text: {"all": "auto"}.get(text, text),  # vLLM's default, up to 0.8
        check=_check_binding,
        metavar="CORES",
        env_aliases=("VLLM_CPU_OMP_THREADS_BIND",),
    )
    reserved_cpus: int | None = option(
        None,
        "cores that --threads-bind auto leaves to others [one of 8 or more]",
        parse=count,
        check=at_least(0),
        metavar="N",
        env_aliases=("VLLM_CPU_NUM_OF_RESERVED_CPU",),
    )
    cache_dir: str | None = option(
        None,
        "a folder for packed weights, for faster starts; any file in it may be deleted [none]",
        metavar="FOLDER",
    )
