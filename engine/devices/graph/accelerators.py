"""The devices cuda, rocm, xpu, hpu and neuron.

Nothing here imports torch, or a vendor's package, before a model is loaded.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ...cancellation import Cancellation
from ...errors import DeviceError
from ...models.spec import DecoderSpec
from ...weights.tensor import WeightSource
from ..executor import Executor
from ..limits import ExecutorOptions
from ..memory_options import MemoryOptions
from ..parallel_options import ParallelOptions
from .device import GraphDevice, Kind
from .hpu_options import HpuOptions, is_lazy
from .options import GraphOptions
from .ranks import variables_of

_CUDA = Kind("cuda", ".cuda", "CudaAdapter", True, ("bfloat16", "float16", "float32"), "CUDA graphs")
_ROCM = Kind("rocm", ".rocm", "RocmAdapter", True, ("bfloat16", "float16", "float32"), "HIP graphs")
_XPU = Kind("xpu", ".xpu", "XpuAdapter", True, ("bfloat16", "float16", "float32"), "XPU graphs")
_HPU = Kind("hpu", ".hpu", "HpuAdapter", True, ("bfloat16", "float16", "float32"), "HPUGraphs", "HPU Graph")
_NEURON = Kind("neuron", ".neuron", "NeuronAdapter", True, ("bfloat16", "float16"))

_COLLECTIVES = "PT_HPU_ENABLE_LAZY_COLLECTIVES"
_NEFF_FOLDER = "TORCH_NEURONX_NEFF_CACHE_DIR"
_DEFAULT_NEFF_FOLDER = "~/.cache/tidewheel/neff"
# What does not compile or lies on the CPU is an error, and not computed in another way: the first is the default of
# newer releases only. https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/reference/env-vars.html
_NEURON_FAILURES = ("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY")

logger = logging.getLogger(__name__)


def cuda(
    options: GraphOptions | None, memory: MemoryOptions | None = None, parallel: ParallelOptions | None = None
) -> GraphDevice:
    """The first of the GPUs that CUDA_VISIBLE_DEVICES leaves, or as many as share the model."""
    return GraphDevice(_CUDA, options, memory, parallel)


def rocm(
    options: GraphOptions | None, memory: MemoryOptions | None = None, parallel: ParallelOptions | None = None
) -> GraphDevice:
    """The first of the AMD GPUs that HIP_VISIBLE_DEVICES leaves, or as many as share the model."""
    return GraphDevice(_ROCM, options, memory, parallel)


def xpu(options: GraphOptions | None, memory: MemoryOptions | None = None) -> GraphDevice:
    """The first of the Intel GPUs that ZE_AFFINITY_MASK leaves."""
    return GraphDevice(_XPU, options, memory)


class HpuDevice(GraphDevice):
    """The first of the Gaudi cards that HABANA_VISIBLE_MODULES leaves, or as many as share the model."""

    def __init__(
        self,
        options: GraphOptions | None = None,
        memory: MemoryOptions | None = None,
        own: HpuOptions | None = None,
        parallel: ParallelOptions | None = None,
    ) -> None:
        super().__init__(_HPU, options, memory, parallel)
        self._own = own or HpuOptions()

    def load(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        cancellation: Cancellation | None = None,
    ) -> Executor:
        """Load it, and have its steps watched if the options want it.

        Raises DeviceError as other devices do, and if variables do not let several cards share the model.
        """
        if not is_lazy():  # vllm-gaudi's default: the graphs of a compiled function are compiled in parallel
            os.environ.setdefault("FUSER_ENABLE_MULTI_THREADED_INVOCATIONS", "1")
        if self._size > 1:
            _prepare_cards(self._size, captures=is_lazy() and not self._options.enforce_eager)
        executor = super().load(spec, weights, options, cancellation)
        if not self._own.watches:
            return executor
        from .hpu_watch import WatchedExecutor

        return WatchedExecutor(executor, self._own)


class NeuronDevice(GraphDevice):
    """The first logical core of those that NEURON_RT_VISIBLE_CORES leaves, or as many as share the model."""

    def __init__(
        self,
        options: GraphOptions | None = None,
        memory: MemoryOptions | None = None,
        parallel: ParallelOptions | None = None,
    ) -> None:
        super().__init__(_NEURON, options, memory, parallel)

    def load(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        cancellation: Cancellation | None = None,
    ) -> Executor:
        """Load it, with a folder that keeps compiled graphs for the next start.

        Raises DeviceError as other devices do, and if variables do not leave enough cores to share the model.
        """
        _keep_compiled_graphs()
        for variable in _NEURON_FAILURES:
            os.environ.setdefault(variable, "1")
        if self._size == 1 and not os.environ.get("NEURON_RT_VISIBLE_CORES"):
            os.environ.setdefault("NEURON_RT_NUM_CORES", "1")  # or the runtime reserves all cores of the machine
        return super().load(spec, weights, options, cancellation)


def _prepare_cards(size: int, *, captures: bool) -> None:
    """Set what Intel's package reads when it is imported, which torch may do: the first card is this process's.

    The other processes inherit it, and are given cards of their own. HPU graphs need lazy collectives:
    https://docs.habana.ai/en/latest/PyTorch/Inference_on_PyTorch/Inference_Using_HPU_Graphs.html
    """
    variables = variables_of("hpu", 0, size)
    if captures and _COLLECTIVES not in os.environ:
        variables[_COLLECTIVES] = "true"
        logger.info("%s is set to true: HPU graphs of several cards need it", _COLLECTIVES)
    elif captures and (given := os.environ[_COLLECTIVES]).lower() not in ("true", "1"):
        raise DeviceError(
            f"{_COLLECTIVES}={given} does not allow HPU graphs on {size} cards: unset it, or take --enforce-eager"
        )
    os.environ.update(variables)


def _keep_compiled_graphs() -> None:
    """Set the folder's variable if it is not set: the vendor's package reads it when torch is imported."""
    folder = Path(os.environ.get(_NEFF_FOLDER) or _DEFAULT_NEFF_FOLDER).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceError(
            f"the folder of compiled graphs cannot be made: {error}. Name another in {_NEFF_FOLDER}"
        ) from error
    os.environ[_NEFF_FOLDER] = str(folder)
    if os.environ.get("TORCH_NEURONX_NEFF_DISABLE_CACHE") == "1":
        logger.warning("TORCH_NEURONX_NEFF_DISABLE_CACHE is set: every start compiles all graphs again")
    else:
        logger.info("Compiled graphs are kept in %s", folder)
