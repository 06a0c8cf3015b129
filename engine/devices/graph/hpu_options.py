"""The options that only Gaudi cards have: what to log of each step."""

from __future__ import annotations

import os

from ...declaring.option import Options, option
from ...declaring.record import record


def is_lazy() -> bool:
    """Whether Intel's package lets operations accumulate, which HPU graphs need."""
    return os.environ.get("PT_HPU_LAZY_MODE", "0") == "1"


@record(frozen=True)
class HpuOptions(Options):
    """What to log of steps, to find lost time."""

    hpu_profiler_enabled: bool = option(
        False,
        "write a trace of all steps, for Perfetto, to the file server_events_PID.json in the working directory",
        env_aliases=("VLLM_PROFILER_ENABLED",),
    )
    hpu_log_step_graph_compilation: bool = option(
        False, "log the steps that compiled a graph", env_aliases=("VLLM_HPU_LOG_STEP_GRAPH_COMPILATION",)
    )
    hpu_log_step_graph_compilation_all: bool = option(
        False,
        "log for every step how many graphs it compiled",
        env_aliases=("VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL",),
    )
    hpu_log_step_cpu_fallbacks: bool = option(
        False, "log the steps with operations that ran on the CPU", env_aliases=("VLLM_HPU_LOG_STEP_CPU_FALLBACKS",)
    )
    hpu_log_step_cpu_fallbacks_all: bool = option(
        False,
        "log for every step how many operations ran on the CPU",
        env_aliases=("VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL",),
    )

    @property
    def watches(self) -> bool:
        """Whether any of them is wanted."""
        return self.hpu_profiler_enabled or self.metrics != {}

    @property
    def metrics(self) -> dict[str, tuple[str, bool]]:
        """The wanted metrics of the vendor: each one's word in the log, and whether steps without any are logged."""
        found = {}
        if self.hpu_log_step_graph_compilation or self.hpu_log_step_graph_compilation_all:
            found["graph_compilation"] = "VLLM_HPU_STEP_GRAPH_COMPILATION", self.hpu_log_step_graph_compilation_all
        if self.hpu_log_step_cpu_fallbacks or self.hpu_log_step_cpu_fallbacks_all:
            found["cpu_fallback"] = "VLLM_HPU_STEP_CPU_FALLBACK", self.hpu_log_step_cpu_fallbacks_all
        return found
