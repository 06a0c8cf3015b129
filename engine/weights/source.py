"""ModelSource: all that a model is made of, wherever it is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..models import ModelDescription
from ..models.generation import GenerationConfig
from ..models.spec import TowerSpec
from ..models.tensor_ref import TensorRef
from .contents import Contents
from .tensor import WeightSource

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer


class ModelSource(Protocol):
    """A model. Each part is read when it is asked for. All methods raise ModelError, naming the file.

    `path` is the folder or file that it is read from.
    """

    path: Path

    @property
    def config(self) -> Mapping[str, Any]:
        """The config for `describe`, in the words of Hugging Face's config.json."""

    def generation(self, config: Mapping[str, Any] | None = None) -> GenerationConfig:
        """The tokens that end a sequence, and the sampling that the model's authors suggest. `config` is as in
        `weights`.
        """

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which has the chat template too."""

    def mistral_tokenizer(self) -> Tokenizer:
        """The tokenizer of `--tokenizer-mode mistral`, which encodes conversations itself."""

    def weights(self, description: ModelDescription, config: Mapping[str, Any] | None = None) -> WeightSource:
        """The tensors that `description` names; shapes are checked, data is not read. `config` is the config that
        `description` was made from, if not the source's own: it says how tensors are quantized.
        """


@runtime_checkable
class StoredSource(ModelSource, Protocol):
    """One whose weights lie in files."""

    def contents(self) -> Contents:
        """What the files hold."""


class TowerSource(Protocol):
    """A vision tower beside the decoder. All methods raise ModelError, naming the file.

    `origin` comes before what is wrong with the config, if it is not a config.json. One that `is_found` lies in a file
    that nobody named: without it, the model is served as well.
    """

    origin: str
    is_found: bool

    def vision_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of the tower and its language model in the words of config.json, given the language model's."""

    def processor(self) -> Mapping[str, Any]:
        """What the files say of how images are prepared, in the words of preprocessor_config.json; empty: nothing."""

    def tower_weights(self, spec: TowerSpec, tensors: Mapping[str, Sequence[TensorRef]]) -> WeightSource:
        """The tower's tensors; shapes are checked, data is not read. `tensors` are as for TowerWeights."""


@runtime_checkable
class VisionSource(ModelSource, Protocol):
    """One that may have a vision tower beside the decoder."""

    def tower(self, mmproj: str | None = None) -> TowerSource | None:
        """The tower; None: there is certainly none.

        `mmproj` names the GGUF file that has it. Raises ModelError if that cannot be, and for a file that is broken.
        """
