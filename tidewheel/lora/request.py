"""LoRARequest: which adapter answers a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from tidewheel.engine.errors import InvalidRequestError

_PARAM = "lora_request"


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, with vLLM's fields. `lora_path` is a folder that peft has saved, a GGUF file, or a hub id.

    The name tells adapters apart. `lora_int_id`, which does so in vLLM, must be above 0 and means nothing else. Raises
    InvalidRequestError.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        for field in ("lora_name", "lora_path"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field):
                raise InvalidRequestError(f"{field} must be a text that is not empty", _PARAM)
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
