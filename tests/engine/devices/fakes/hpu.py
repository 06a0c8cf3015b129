"""habana_frameworks.torch as Intel describes it, for one card of a process. The rules, and where they are from:

- Graphs have static shapes, all on the card, no flow that depends on data, no in-place updates of views.
  https://docs.habana.ai/en/latest/PyTorch/Inference_on_PyTorch/Inference_Using_HPU_Graphs.html
- In lazy mode operations accumulate until `mark_step`, and what accumulated is compiled if it is new. HPU graphs exist
  there only, and `hpu_backend` elsewhere only, where each operation outside of it is compiled for itself.
  https://docs.habana.ai/en/latest/PyTorch/Reference/PyTorch_Support_Matrix.html
- The host has no pinned memory: `is_pin_memory_available` in vllm_gaudi/platform.py
  (https://github.com/vllm-project/vllm-gaudi).
- What the fused kernels take: each kernel says it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from engine.devices.fakes.accelerator import GIB, Accelerator, DeviceTensor, FakeDeviceError
from engine.devices.fakes.recording import Recording
from torch import Tensor

_all_reduce_on_host = torch.distributed.all_reduce


class FakeHpu:
    """What replaces habana_frameworks and torch.hpu. `fallbacks` is how often an operation ran on the CPU."""

    def __init__(self, total_bytes: int = GIB, *, lazy: bool, card: str = "GAUDI2") -> None:
        self.card = card
        self.accelerator = Accelerator(
            "hpu", total_bytes, compiles_operations=not lazy, capture_refuses_parts=True, pins_memory=False
        )
        self.graphs: list[FakeHpuGraph] = []
        self.fallbacks = 0
        self._lazy = lazy

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeHpu:
        """Make `import habana_frameworks.torch` find this."""
        fake, accelerator = self, self.accelerator

        class HPUGraph(FakeHpuGraph):
            def __init__(self) -> None:
                super().__init__(fake)

        def compile_function(function: Any, *, backend: str, fullgraph: bool, dynamic: bool) -> Any:
            assert (backend, fullgraph, dynamic) == ("hpu_backend", True, False)
            assert not self._lazy, "hpu_backend needs PT_HPU_LAZY_MODE=0"
            return accelerator.compiled_function(function)

        def module(name: str, **members: Any) -> ModuleType:
            made = ModuleType(name)
            vars(made).update(members)
            monkeypatch.setitem(sys.modules, name, made)
            return made

        metrics = module("habana_frameworks.torch.hpu.metrics", metric_localcontext=self._metric)
        hpu = module(
            "habana_frameworks.torch.hpu",
            HPUGraph=HPUGraph,
            Stream=object,
            stream=nullcontext,
            set_device=lambda device: accelerator.enter(),
            synchronize=self._synchronize,
            mem_get_info=lambda device=None: accelerator.memory,
            is_available=lambda: True,
            get_device_name=lambda device=None: self.card,
            metrics=metrics,
        )
        kernels = module(
            "habana_frameworks.torch.hpex.kernels",
            FusedSDPA=FusedSDPA,
            RotaryPosEmbeddingMode=RotaryPosEmbeddingMode,
            apply_rotary_pos_emb=apply_rotary_pos_emb,
        )
        normalization = module("habana_frameworks.torch.hpex.normalization", FusedRMSNorm=FusedRMSNorm)
        hpex = module("habana_frameworks.torch.hpex", kernels=kernels, normalization=normalization)
        core = module("habana_frameworks.torch.core", mark_step=accelerator.flush)
        distributed = module("habana_frameworks.torch.distributed", __path__=[str(Path(__file__).with_name("hccl"))])
        package = module("habana_frameworks.torch", hpu=hpu, core=core, hpex=hpex, distributed=distributed)
        monkeypatch.delitem(sys.modules, "habana_frameworks.torch.distributed.hccl", raising=False)
        monkeypatch.setattr(torch.distributed, "all_reduce", self._all_reduce)
        module("habana_frameworks", torch=package)
        monkeypatch.setattr(torch, "hpu", hpu, raising=False)
        monkeypatch.setattr(torch, "compile", compile_function)
        monkeypatch.setenv("PT_HPU_LAZY_MODE", str(int(self._lazy)))
        if self._lazy:
            accelerator.be_lazy()
        return self

    def _all_reduce(self, x: Tensor, *args: Any) -> None:
        if not isinstance(x, DeviceTensor):
            _all_reduce_on_host(x, *args)
            return
        collectives = os.environ.get("PT_HPU_ENABLE_LAZY_COLLECTIVES", "false")
        if self.accelerator.recording is not None and collectives != "true":
            raise FakeDeviceError("HPU graphs on several cards need PT_HPU_ENABLE_LAZY_COLLECTIVES=true")
        torch.ops.fake_hccl.all_reduce(x)

    def _synchronize(self) -> None:
        self.accelerator.flush()
        self.accelerator.synchronized += 1

    @contextmanager
    def _metric(self, name: str) -> Iterator[Metric]:
        metric = Metric(self, name)
        yield metric
        metric.stop()


class Metric:
    """How often something happened within a context: `stats()[0]` is the name and the number of it."""

    def __init__(self, hpu: FakeHpu, name: str) -> None:
        assert name in ("graph_compilation", "cpu_fallback")
        self._hpu, self._name = hpu, name
        self._start = self._now()
        self._stop: int | None = None

    def stop(self) -> None:
        """The context was left."""
        self._stop = self._now()

    def stats(self) -> list[tuple[str, int]]:
        """What was counted."""
        return [("TotalNumber", (self._now() if self._stop is None else self._stop) - self._start)]

    def _now(self) -> int:
        return len(self._hpu.accelerator.compiled) if self._name == "graph_compilation" else self._hpu.fallbacks


class FakeHpuGraph:
    """A graph, which keeps its memory for itself."""

    def __init__(self, hpu: FakeHpu) -> None:
        self._hpu, self._accelerator = hpu, hpu.accelerator
        self.recording = Recording(hpu.accelerator)
        hpu.graphs.append(self)

    def capture_begin(self) -> None:
        """Record what follows."""
        assert self._hpu._lazy, "HPU graphs need PT_HPU_LAZY_MODE=1"
        self._accelerator.begin_capture(self.recording)

    def capture_end(self) -> None:
        """The graph is complete."""
        self._accelerator.take(self._accelerator.end_capture())
        self._accelerator.compile(self)

    def replay(self) -> None:
        """Do it again, behind what has accumulated."""
        self._accelerator.flush()
        self.recording.replay()


class FusedSDPA:
    """Attention, as in python_packages/habana_frameworks/torch/hpex/kernels/FusedSDPA.py.

    It is published at https://github.com/HabanaAI/gaudi-pytorch-bridge. Tensors are `[batch, heads, tokens, D]`. K and
    V may have fewer heads, which divide those of Q. The mask is added to the scores.
    """

    calls: ClassVar[int] = 0

    @classmethod
    def apply(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Tensor | None = None,
        seq_padding_type: str = "left",
    ) -> Tensor:
        """`[batch, heads, tokens, D]`, in the type of Q."""
        assert q.dim() == k.dim() == v.dim() == 4
        assert q.dtype == k.dtype == v.dtype
        assert q.shape[1] % k.shape[1] == 0
        assert dropout_p == 0.0
        assert softmax_mode.lower() in ("none", "fast", "fp32")
        assert seq_padding_type.lower() in ("left", "right")
        assert attn_mask is not None, "this model of the kernel has no other way to hide tokens"
        assert not is_causal, "a mask together with is_causal is not supported yet"
        assert valid_seq_len is None, "the length of sequences is for causal masks without attn_mask"
        assert attn_mask.dtype == q.dtype
        assert attn_mask.shape[1] in (1, q.shape[1])
        cls.calls += 1
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1).float() for x in (k, v))
        scores = q.float() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        return ((scores + attn_mask.float()).softmax(-1) @ v).to(q.dtype)


class FusedRMSNorm:
    """RMSNorm, as in hpex/normalization/FusedRMSNorm.py of the same repository.

    vllm_gaudi/ops/hpu_layernorm.py (https://github.com/vllm-project/vllm-gaudi): the input has three dimensions.
    """

    calls: ClassVar[int] = 0

    @classmethod
    def apply(cls, data_in: Tensor, gamma: Tensor, eps: float) -> Tensor:
        """In the shape of the input."""
        assert data_in.dim() == 3
        assert gamma.shape == data_in.shape[-1:]
        cls.calls += 1
        return data_in * torch.rsqrt(data_in.square().mean(-1, keepdim=True) + eps) * gamma


class RotaryPosEmbeddingMode(Enum):
    """Of `apply_rotary_pos_emb`, in hpex/kernels/RotaryPosEmbeddingHelper.py."""

    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(p: Tensor, *args: Any) -> Tensor:
    """Rope, as in hpex/kernels/RotaryPosEmbeddingHelper.py.

    vllm_gaudi/ops/hpu_rotary_embedding.py: the cosines and sines are as wide as the input, there are no position ids,
    and the offset is 0.
    """
    cos, sin, position_ids, offset, mode = args
    assert position_ids is None
    assert offset == 0
    assert p.dim() == 3
    assert cos.shape == sin.shape == (p.shape[0], 1, p.shape[-1])
    assert p.dtype == cos.dtype == sin.dtype
    apply_rotary_pos_emb.calls += 1  # type: ignore[attr-defined]
    if mode is RotaryPosEmbeddingMode.BLOCKWISE:
        a, b = p.chunk(2, -1)
        turned = torch.cat((-b, a), -1)
    else:
        turned = torch.stack((-p[..., 1::2], p[..., ::2]), -1).flatten(-2)
    return p * cos + turned * sin


apply_rotary_pos_emb.calls = 0  # type: ignore[attr-defined]


def _cast_to_fp8_v2(
    x: Tensor, scale: Tensor | None, stochastic_rounding: bool, is_amax: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`x` times the scale, saturated at what Gaudi 2 has (it keeps the greatest exponent for infinity), and amax.

    Schemas: the TORCH_LIBRARY of https://github.com/HabanaAI/gaudi-pytorch-bridge. Use: apply_fp8_linear_hpu in
    vllm_gaudi/extension/ops.py, with 1 / the input's scale.
    """
    assert not stochastic_rounding
    assert not is_amax
    assert scale is not None
    assert scale.dtype == x.dtype == torch.bfloat16
    return (x * scale).clamp(-240, 240).to(dtype), torch.zeros(())


def _fp8_gemm_v2(*args: Any) -> Tensor:
    """A product of matrices, times the scales of both, which the schema calls inverse."""
    a, transposes_a, b, transposes_b, d, out_dtype, a_scale, b_scale, bias, accumulate = args
    assert (transposes_a, transposes_b, d, bias, accumulate) == (False, True, None, None, False)
    assert a.dim() == b.dim() == 2
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    product = a.float() @ b.float().T * a_scale.float() * b_scale.float()
    result: Tensor = product.to(out_dtype)
    return result


_library = torch.library.Library("hpu", "DEF")
_library.define(
    "cast_to_fp8_v2(Tensor input, Tensor? scale, bool stochastic_rounding, bool is_amax, ScalarType dtype) -> "
    "(Tensor, Tensor)"
)
_library.define(
    "fp8_gemm_v2(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, Tensor? A_scale_inv, "
    "Tensor? B_scale_inv, Tensor? bias, bool accumulate) -> Tensor"
)
_library.impl("cast_to_fp8_v2", _cast_to_fp8_v2, "CPU")
_library.impl("fp8_gemm_v2", _fp8_gemm_v2, "CPU")
