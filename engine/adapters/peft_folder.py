"""A folder that peft saved an adapter to, as a LoraAdapter."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from ..errors import ModelError, quoted
from ..files.reading import is_there
from ..files.wording import shown
from ..models.description import ModelDescription
from ..models.spec import tensor_shapes
from ..models.tensor_ref import TensorRef
from ..models.text_part import text_name
from ..weights.checkpoint import open_copy
from ..weights.lora import EMBED, HEAD, LoraAdapter, LowRankUpdate
from ..weights.stored import StoredTensor
from ..weights.tensor import DenseTensor, WeightSource, to_float32
from .biases import BiasDifference, OwnBiases, with_differences
from .expert_stacks import expert_stacks, orientations, swapped_by_version, unstacked
from .long_context import LongContexts
from .modules import adaptable_modules, not_adaptable
from .own_matrices import equals_base, merged, own_matrix
from .peft_config import CONFIG, PeftConfig, read_peft_config
from .updates import AdapterTensor, updates_of

logger = logging.getLogger(__name__)

WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_MIN_TENSORS = 1 << 10  # at least this many are read of any file, to name one that is none of the model's
_LINEAR, _EMBEDDING = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")
_OWN, _BASE = "weight", "base_layer.weight"
_BIASES = ("bias", "base_layer.bias")  # as peft saves them, and as it did before it wrapped layers
_AROUND = ".base_layer"  # of what peft has wrapped again
# What checkpoints call modules that transformers calls otherwise.
_CHECKPOINTS_CALL = (
    (".mlp.", ".block_sparse_moe."),
    (".block_sparse_moe.router", ".block_sparse_moe.router.layer"),
    ("model.layers.", "backbone.layers."),
)
_TENSOR = re.compile(
    r"(.+?)\.(lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B|base_layer\.weight|weight"
    r"|base_layer\.bias|bias)"
)


def read_peft_folder(
    folder: Path,
    description: ModelDescription,
    max_rank: int,
    base: WeightSource | None = None,
    contexts: LongContexts | None = None,
) -> LoraAdapter:
    """The adapter in `folder`. Raises ModelError for one that is broken, not of this model, or of a rank above
    `max_rank`.

    Where peft has saved the model's own embedding, head or biases too, they are left out if they equal those of `base`,
    the model's own weights. A file with biases cannot be read without them. An adapter for longer contexts than the
    model's must be for one of `contexts`.
    """
    require_folder(folder)
    config = read_peft_config(folder)
    reader = _Reader(adapter_file(folder), config, description, base)
    by_module = reader.by_module(open_copy(reader.path, max_tensors(description)))
    if read_peft_config(folder) != config:
        raise ModelError(f"{folder / CONFIG} changed while the adapter was read; load it again when it is complete")
    if not by_module and not reader.biases:
        raise ModelError(f"{reader.path} has no tensors")
    updates = [
        update
        for module, parts in by_module.items()
        if not {_OWN, _BASE} >= parts.keys()
        for update in reader.updates(module, parts, max_rank)
    ]
    updates = with_differences(updates, reader.differences())
    matrices = reader.matrices(by_module, base)
    if HEAD in matrices and (added := [update for update in updates if update.name == HEAD]):
        matrices[HEAD] = merged(matrices[HEAD], added)
        updates = [update for update in updates if update.name != HEAD]
    contexts = contexts or LongContexts(description.spec.max_positions)
    return LoraAdapter(tuple(updates), matrices, contexts.factor(folder / CONFIG, config.context_length))


def max_tensors(description: ModelDescription) -> int:
    """The most tensors of an adapter. A matrix may have an A, a B, a bias of B and the model's own weight."""
    return 4 * len(description.tensors) + _MIN_TENSORS


def require_folder(path: Path) -> None:
    """Raises ModelError unless `path`, which is no GGUF file, is a folder."""
    if not os.path.isdir(path):
        wrong = "is neither a folder nor a .gguf file" if is_there(path) else "does not exist"
        raise ModelError(f"{path} {wrong}")


def adapter_file(folder: Path) -> Path:
    """The file with the adapter's tensors. Raises ModelError if there is none."""
    path = folder / WEIGHTS
    if not is_there(path):
        raise without_weights(folder, lambda name: is_there(folder / name))
    return path


def without_weights(where: object, has: Callable[[str], bool]) -> ModelError:
    """The error for a folder or a repository that has a configuration, but no tensors as safetensors."""
    pickle = f": {_PICKLE} is a pickle, which can run code and is never loaded" if has(_PICKLE) else ""
    return ModelError(f"{where} has no {WEIGHTS}{pickle}; save the adapter as safetensors")


_Parts = dict[str, StoredTensor]


class _Reader:
    def __init__(
        self, path: Path, config: PeftConfig, description: ModelDescription, base: WeightSource | None
    ) -> None:
        self.path = path
        self._config = config
        self._description = description
        tensors = {**description.tensors, "head.weight": TensorRef(description.head_name)}
        self._modules = dict(adaptable_modules(description.spec, tensors))
        self._own_biases = OwnBiases(path, tensors, self._modules, base)
        self.biases: dict[str, StoredTensor] = {}  # by module
        self._stacks = expert_stacks(description.spec, tensors)
        self._stack_of = {module: stack for stack in self._stacks.values() for module in stack.modules.values()}
        self._names: dict[str, str] = {}  # of modules, as peft's patterns know them
        self._swapped: bool | None = None  # see `unstacked`
        names = {targets[0].name: module for module, targets in self._modules.items()}
        self._whole = {module: name for name in (EMBED, HEAD) if (module := names.get(name))}
        self._check_saved()

    def _check_saved(self) -> None:
        last = {module.rpartition(".")[2] for module in self._whole}
        for name in self._config.modules_to_save:
            if name.rpartition(".")[2] not in last:
                raise ModelError(
                    f"{self.path.with_name(CONFIG)}: modules_to_save names {shown(name)}, which an adapter cannot have "
                    f"of its own here; it can have {' and '.join(sorted(last))}. Merge the adapter into its model"
                )

    def by_module(self, checkpoint: Mapping[str, StoredTensor]) -> dict[str, _Parts]:
        """The tensors of each module, by what is behind its name."""
        found: dict[str, _Parts] = {}
        for name, stored in checkpoint.items():
            match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
            if match is None:
                raise ModelError(f"{self.path}: {shown(name)} is not an A or B of a LoRA adapter of linear layers")
            if match[2] in _BIASES:
                self._keep_bias(match[1], stored)
                continue
            module = self._module(match[1]) or self._expert_parameter(match[1])
            if module is None:
                raise not_adaptable(self.path, match[1])
            is_embedding = self._whole.get(module) == EMBED
            allowed = {*(_EMBEDDING if is_embedding else (*_LINEAR, "lora_B.bias"))}
            if self._modules[module][0].ref.index is not None:
                allowed.remove("lora_B.bias")
            if module in self._whole:
                allowed |= {_OWN, _BASE}
            if match[2] not in allowed:
                raise ModelError(f"{self.path}: {shown(name)} is not an A or B of a LoRA adapter of that layer")
            found.setdefault(module, {})[match[2]] = stored
        self._swapped = self._find_swapped(found)
        self._warn_of_lost_biases(found)
        return found

    def _keep_bias(self, name: str, stored: StoredTensor) -> None:
        module = next((module for module in self._candidates(name) if self._own_biases.has(module)), None)
        if module is None:
            raise not_adaptable(self.path, f"{name}.bias")
        if module in self.biases:
            raise ModelError(f"{self.path}: {shown(name)} has two biases")
        self.biases[module] = stored

    def differences(self) -> list[BiasDifference]:
        """How far the file's biases are from the model's."""
        return [
            found for module, stored in self.biases.items() for found in self._own_biases.differences(module, stored)
        ]

    def _warn_of_lost_biases(self, by_module: dict[str, _Parts]) -> None:
        # Peft 0.19 trained the biases of `lora_only` and left them out of the file.
        lost = [module for module in by_module if module not in self.biases and self._own_biases.in_base(module)]
        if self._config.trains_biases and lost:
            logger.warning(
                "%s: bias is set in %s, but the file has no bias of %s: the model's own is used, as peft does with it",
                self.path,
                CONFIG,
                quoted(lost[0]),
            )

    def _find_swapped(self, by_module: dict[str, _Parts]) -> bool | None:
        """How a file's parameters are read, the same for all: the first whose shape tells it decides."""
        is_swapped = None
        for module, parts in by_module.items():
            if module in self._stack_of and parts.keys() >= {*_LINEAR}:
                a, b = (self._tensor(module, part, parts[part]) for part in _LINEAR)
                found = orientations(a, b, self._modules[module])
                if len(found) == 1:
                    return found.pop()
                is_swapped = swapped_by_version(self._config.version, self._stack_of[module].transposed)
        return is_swapped

    def _module(self, name: str) -> str | None:
        """What the family calls a module."""
        module = next((module for module in self._candidates(name) if module in self._modules), None)
        if module is not None:
            self._names[module] = f"{name}.weight" if self._config.targets(f"{name}.weight") else module
        return module

    def _expert_parameter(self, name: str) -> str | None:
        """The family's name, real or possible, of the experts' parameter that a wrapper of their module changes."""
        experts = name.partition(_AROUND)[0]
        around = name.count(_AROUND)
        stack = next((self._stacks[found] for found in self._candidates(experts) if found in self._stacks), None)
        if stack is None or name != experts + around * _AROUND:
            return None
        wrapped = [parameter for parameter in stack.parameters if self._config.targets(f"{experts}.{parameter}")]
        if around >= len(wrapped):
            raise ModelError(
                f"{self.path}: {shown(name)} is of a parameter of experts, and target_parameters in {CONFIG} does not "
                f"say which; it must name those that were trained, of {', '.join(stack.parameters)}"
            )
        parameter = wrapped[-1 - around]  # the last one is outside
        if parameter not in stack.modules:
            return None
        module = stack.modules[parameter]
        if module not in self._modules:
            self._modules[module] = stack.targets(parameter)
        self._names[module] = f"{experts}.{parameter}"
        return module

    def _candidates(self, name: str) -> Iterator[str]:
        """What checkpoints may call a module. It may be named as in a model that takes images too."""
        yield name
        yield self._description.base_prefix + name
        if self._description.text_part and (alone := text_name(f"{name}.weight", self._description)):
            yield alone.removesuffix(".weight")
        yield from (name.replace(theirs, checkpoints) for theirs, checkpoints in _CHECKPOINTS_CALL if theirs in name)

    def updates(self, module: str, parts: _Parts, max_rank: int) -> list[LowRankUpdate]:
        """What A and B of a module change."""
        needed = _EMBEDDING if self._whole.get(module) == EMBED else _LINEAR
        for part in needed:
            if part not in parts:
                raise ModelError(f"{self.path}: {module} has no {part}")
        a, b = (self._tensor(module, part, parts[part]) for part in needed)
        bias = self._tensor(module, "lora_B.bias", parts["lora_B.bias"]) if "lora_B.bias" in parts else None
        targets = self._modules[module]
        if module in self._stack_of:
            a, b = unstacked(a, b, targets, self._swapped)
        return updates_of(targets, a, b, bias, partial(self._config.scale, self._names[module]), max_rank)

    def matrices(self, by_module: dict[str, _Parts], base: WeightSource | None) -> dict[str, DenseTensor]:
        """The embedding and the head that the adapter has of its own."""
        shape = tensor_shapes(self._description.spec)["embed.weight"]
        tied = self._description.spec.head.tied
        found: dict[str, DenseTensor] = {}
        of_base: dict[str, DenseTensor] = {}
        saved = {name.rpartition(".")[2] for name in self._config.modules_to_save}
        for module, parts in by_module.items():
            for part in {_OWN, _BASE} & parts.keys():
                matrix = own_matrix(f"{module}.{part}", parts[part], shape)
                is_saved = part == _OWN and module.rpartition(".")[2] in saved
                (found if is_saved else of_base)[self._whole[module]] = matrix
        # Weights that were not trained replace the model's weight, which embedding and head may share.
        for name, matrix in of_base.items():
            weight = "embed.weight" if tied else f"{name}.weight"
            if base is None or not equals_base(matrix, base[weight]):
                for replaced in (EMBED, HEAD) if tied else (name,):
                    found.setdefault(replaced, matrix)
        return found

    def _tensor(self, module: str, part: str, stored: StoredTensor) -> AdapterTensor:
        name = f"{module}.{part}"
        return AdapterTensor(self.path, name, stored.shape, lambda: to_float32(stored.floats(name)))
