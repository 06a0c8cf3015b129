"""Bodies of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from .decode import Body


class LoadLoraRequest(Body):
    """The adapter in the folder `lora_path` of the server's machine is served as `lora_name`.

    `load_inplace` replaces an adapter of that name.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadLoraRequest(Body):
    """The adapter `lora_name` is served no more. `lora_int_id` is not looked at."""

    lora_name: str
    lora_int_id: int | None = None
