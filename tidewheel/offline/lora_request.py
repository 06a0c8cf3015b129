"""LoRARequest: which adapter answers a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tidewheel.engine.errors import InvalidRequestError

from .vllm_calls import say_once

_PARAM = "lora_request"
_IDLE = {
    "long_lora_max_len": "the adapter's own context_length says it",
    "is_3d_lora_weight": "the adapter's own tensors say it",
}
_NOT_SERVED = {
    "tensorizer_config_dict": "lora_path names a folder with safetensors, or a GGUF file",
    "load_inplace": "give the changed adapter another name",
}


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, with vLLM's fields. `lora_path` is a folder that peft has saved, a GGUF file, or a hub id.

    The name tells adapters apart. `lora_int_id`, which does so in vLLM, must be above 0 and means nothing else.
    `lora_local_path` is an older name of `lora_path`. What follows it has no effect, or is not supported. Raises
    InvalidRequestError.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    lora_local_path: str | None = field(default=None, kw_only=True, repr=False, compare=False)
    long_lora_max_len: int | None = field(default=None, kw_only=True, repr=False, compare=False)
    is_3d_lora_weight: bool | None = field(default=None, kw_only=True, repr=False, compare=False)
    tensorizer_config_dict: Any = field(default=None, kw_only=True, repr=False, compare=False)
    load_inplace: bool = field(default=False, kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.lora_local_path and not self.lora_path:
            object.__setattr__(self, "lora_path", self.lora_local_path)
        for name, why in _IDLE.items():
            if getattr(self, name):
                say_once(f"{name} has no effect: {why}")
        for name, instead in _NOT_SERVED.items():
            if getattr(self, name):
                raise InvalidRequestError(f"{name} is not supported: {instead}", _PARAM)
        for name in ("lora_name", "lora_path"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise InvalidRequestError(f"{name} must be a text that is not empty", _PARAM)
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise InvalidRequestError(f"lora_int_id must be a whole number above 0, got {self.lora_int_id!r}", _PARAM)

    @property
    def name(self) -> str:
        """The same as `lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The same as `lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """The same as `lora_path`."""
        return self.lora_path
