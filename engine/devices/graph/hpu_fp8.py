"""FP8 by what Intel Neural Compressor (INC) has measured: the files of vllm-gaudi's calibration, named by QUANT_CONFIG.

https://github.com/vllm-project/vllm-gaudi/blob/main/docs/configuration/calibration/calibration.md. The formulas and
defaults are those of neural_compressor_pt 3.10 (torch/algorithms/fp8_quant, in _core/scale_methods, _core/fp_utils.py
and _quant_common/quant_config.py). Values are E4M3. A matrix has one scale, as have its inputs: `maxabs / (largest *
backoff)`, rounded as the method says. `largest` is 240 on Gaudi 2 and 448 on Gaudi 3.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import DeviceError, ModelError
from ...files.folder import read_json
from ..grouped_weights import GroupedMatrix

logger = logging.getLogger(__name__)

VARIABLE = "QUANT_CONFIG"

_MAX_BYTES = 64 << 20  # of each file
_MAX_INPUT = 1e38  # bfloat16 goes a little further
_LARGEST = {"GAUDI2": 240.0, "GAUDI3": 448.0}
_HARDWARE = {"GAUDI2": (-8, 4, 4), "GAUDI3": (-55, 7, 1)}  # exponents of scales: the least, the greatest, the step
_WEIGHT_BACKOFF, _INPUT_BACKOFF = 0.5, 0.25
_ATTENTION, _MLP = "self_attn", "mlp"
_COLUMNS, _ROWS = "ColumnParallelLinear", "RowParallelLinear"
_QKV, _GATE_UP = ("qkv_proj", "QKVParallelLinear"), ("gate_up_proj", "MergedColumnParallelLinear")
# vLLM's modules that have a weight, fused or not: where they are, their names and classes.
_MODULES: dict[str, tuple[str, dict[str, str]]] = {
    "q": (_ATTENTION, dict([_QKV, ("q_proj", _COLUMNS)])),
    "k": (_ATTENTION, dict([_QKV, ("k_proj", _COLUMNS)])),
    "v": (_ATTENTION, dict([_QKV, ("v_proj", _COLUMNS)])),
    "o": (_ATTENTION, {"o_proj": _ROWS}),
    "gate": (_MLP, dict([_GATE_UP, ("gate_proj", _COLUMNS)])),
    "up": (_MLP, dict([_GATE_UP, ("up_proj", _COLUMNS)])),
    "down": (_MLP, {"down_proj": _ROWS}),
}
_WEIGHT = re.compile(rf"layers\.(\d+)\.({'|'.join(_MODULES)})\.weight")
_NAMES = "|".join({rf"{where}\.{name}" for where, classes in _MODULES.values() for name in classes})
_MODULE = re.compile(rf"(?:(?:language_)?model\.)*(layers\.\d+\.(?:{_NAMES})|lm_head)")
# What is done whatever is given, and what changes no number.
_ONLY = {
    "mode": "QUANTIZE",
    "observer": "MAXABS",
    "method": "HOOKS",
    "fp8_config": "E4M3",
    "hp_dtype": "BF16",
    "dynamic_quantization": "FALSE",
    "fake_quant": "FALSE",
    "row_parallel_linear_allreduce_quantization": "FALSE",
    "scale_params": "{}",
}
_WITHOUT_EFFECT = (
    "use_qdq scale_format recalc_scales seperate_measure_files measure_exclude measure_on_hpu "
    "calibration_sample_interval"
).split()


class Fp8Matrix:
    """A matrix `[N, K]` in FP8, for inputs that are rounded to FP8 too. Scales are bfloat16, as is what is computed."""

    dtype = torch.bfloat16

    def __init__(self, values: Tensor, scale: Tensor, input_scale: Tensor) -> None:
        self._values, self._scale, self._input_scale = values, scale, input_scale
        self._inverse = 1.0 / input_scale

    def multiply(self, x: Tensor) -> Tensor:
        """`x W^T` of `x [..., K]`."""
        narrow, _ = torch.ops.hpu.cast_to_fp8_v2(
            x.reshape(-1, x.shape[-1]), self._inverse, False, False, self._values.dtype
        )
        y: Tensor = torch.ops.hpu.fp8_gemm_v2(
            narrow, False, self._values, True, None, self.dtype, self._input_scale, self._scale, None, False
        )
        return y.view(*x.shape[:-1], -1)

    def dense(self) -> Tensor:
        """All weights."""
        return self._values.to(self.dtype) * self._scale


class Fp8:
    """Which matrices a card of `card` ("GAUDI2" or "GAUDI3") keeps in FP8, and with what scales.

    `path` is INC's configuration. Raises DeviceError if it asks for what is not done here, or measures are missing.
    """

    def __init__(self, path: Path, card: str, device: torch.device) -> None:
        self._path, self._device = path, device
        config = self._read(path)
        self._check(config)
        scales_of = str(config.pop("device_for_scales", None) or card).upper()
        if card not in _LARGEST or scales_of not in (card, "GAUDI2"):
            raise self._error(f"there is no FP8 with scales of {scales_of} on {card}")
        self._largest, self._greatest = _LARGEST[scales_of], _LARGEST[card]
        method = str(config.pop("scale_method", "maxabs_hw")).lower()
        rounded = _methods(_HARDWARE[scales_of])
        if method not in rounded:
            raise self._error(f"scale_method must be {', '.join(sorted(rounded))}, not {method[:60]!r}")
        self._is_unit, self._rounded = method == "unit_scale", rounded[method]
        self._allowed = self._list(config, "allowlist", "whitelist")
        self._blocked = self._list(config, "blocklist", "blacklist")
        self._skips_unmeasured = str(config.pop("ignore_modules_wo_measures", False)).upper() == "TRUE"
        stats = str(config.pop("dump_stats_path", "stats"))
        if config:
            raise self._error(f"{next(iter(config))[:60]!r} is not known here: take it out")
        self._measures = {} if self._is_unit else self._read_measures(Path(f"{stats}_hooks_maxabs"))
        logger.info("Linear layers compute in FP8 (E4M3), with scales by %s of %s: %s", method, scales_of, path)

    def store(self, name: str, weight: Tensor | GroupedMatrix) -> Fp8Matrix | None:
        """The matrix of that name in FP8, or None if it stays as it is."""
        if (found := _WEIGHT.fullmatch(name)) is not None:
            where, classes = _MODULES[found[2]]
            candidates = {f"layers.{found[1]}.{where}.{module}": kind for module, kind in classes.items()}
        elif name == "head.weight":
            candidates = {"lm_head": "ParallelLMHead"}
        else:
            return None
        measured = [module for module in candidates if module in self._measures]
        if not all(self._wants(module, candidates[module]) for module in measured or candidates):
            return None
        if not measured and not self._is_unit:
            if self._skips_unmeasured:
                return None
            raise self._error(
                f"there is no measure of {' or '.join(candidates)}: calibrate with this model, block the name in "
                "blocklist, or set ignore_modules_wo_measures"
            )
        if isinstance(weight, GroupedMatrix):
            raise self._error(
                f"{name} is quantized already: unset {VARIABLE}, or take the unquantized checkpoint without "
                "--quantization"
            )
        scale = self._scale(weight.abs().max().item() or 1.0, _WEIGHT_BACKOFF)
        largest_input = max((self._measures[module][1] for module in measured), default=1.0)
        input_scale = self._scale(largest_input, _INPUT_BACKOFF)
        values = (weight.to(torch.bfloat16) / scale).clamp(-self._greatest, self._greatest)
        return Fp8Matrix(*(x.to(self._device) for x in (values.to(torch.float8_e4m3fn), scale, input_scale)))

    def _scale(self, maxabs: float, backoff: float) -> Tensor:
        return self._rounded(torch.tensor(maxabs, dtype=torch.bfloat16) / (self._largest * backoff))

    def _wants(self, module: str, kind: str) -> bool:
        def lists(patterns: tuple[list[re.Pattern[str]], list[str]]) -> bool:
            names, kinds = patterns
            return kind in kinds or any(name.search(full) for name in names)

        full, _ = self._measures.get(module, (f"model.{module}" if "." in module else module, 0.0))
        return (lists(self._allowed) or not any(self._allowed)) and not lists(self._blocked)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            return read_json(path, _MAX_BYTES)
        except ModelError as error:
            raise DeviceError(f"{VARIABLE}: {error}") from error

    def _check(self, config: dict[str, Any]) -> None:
        for key, known in _ONLY.items():
            if str(value := config.pop(key, known)).upper() != known:
                hint = ": calibrate with vllm-gaudi's calibrate_model.sh" if key == "mode" else ""
                raise self._error(f"{key} must be {known}, not {str(value)[:60]}{hint}")
        for key in _WITHOUT_EFFECT:
            config.pop(key, None)

    def _list(self, config: dict[str, Any], *keys: str) -> tuple[list[re.Pattern[str]], list[str]]:
        """Regular expressions of names, and classes."""
        names: list[re.Pattern[str]] = []
        kinds: list[str] = []
        for key in keys:
            try:
                given = config.pop(key, {})
                names += [re.compile(name) for name in given.get("names", [])]
                kinds += [str(kind) for kind in given.get("types", [])]
            except (AttributeError, TypeError, re.error) as error:
                raise self._error(f"{key} must have lists of names and types: {error}") from error
        return names, kinds

    def _read_measures(self, stats: Path) -> dict[str, tuple[str, float]]:
        """Of each module, its full name and its largest input on any card that measured, of which each had a part."""
        pattern = re.compile(re.escape(stats.name) + r"(_\d+_\d+)?\.json")
        files = [file for file in stats.parent.glob("*.json") if pattern.fullmatch(file.name)]
        if not files:
            raise self._error(f"there is no {stats}_RANK_SIZE.json, which calibration writes: see dump_stats_path")
        measures: dict[str, tuple[str, float]] = {}
        for file in files:
            nodes = self._read(file).get("Nodes")
            if not isinstance(nodes, dict):
                raise self._error(f"{file} has no Nodes")
            for name, node in nodes.items():
                if (found := _MODULE.fullmatch(name)) is None:
                    continue
                largest = _largest_number(node.get("inputs") if isinstance(node, dict) else None)
                if not 0 < largest < math.inf:
                    raise self._error(f"the inputs of {name} in {file} are not positive numbers")
                measures[found[1]] = name, max(largest, measures.get(found[1], ("", 0.0))[1])
        return measures

    def _error(self, what: str) -> DeviceError:
        return DeviceError(f"{VARIABLE} {self._path}: {what}")


def find_fp8(card: str, device: torch.device) -> Fp8 | None:
    """What QUANT_CONFIG asks for, if it is set."""
    path = os.environ.get(VARIABLE)
    return Fp8(Path(path), card, device) if path else None


def _methods(hardware: tuple[int, int, int]) -> dict[str, Callable[[Tensor], Tensor]]:
    """How each method rounds a scale."""
    least, greatest, step = hardware

    def power(scale: Tensor) -> Tensor:
        return scale.log2().ceil().exp2()

    def of_hardware(scale: Tensor) -> Tensor:
        return ((scale.log2().ceil() / step).ceil() * step).clamp(least, greatest).exp2()

    return {
        "maxabs_hw": of_hardware,
        "maxabs_pow2": power,
        "maxabs_arbitrary": lambda scale: scale,
        "unit_scale": torch.ones_like,
    }


def _largest_number(tree: object) -> float:
    """The largest of nested lists of numbers, 0 if there are none, infinite if there is anything else."""
    if isinstance(tree, list):
        return max(map(_largest_number, tree), default=0.0)
    return float(tree) if isinstance(tree, int | float) and 0 <= tree < _MAX_INPUT else math.inf
