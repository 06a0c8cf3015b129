"""AMD GPUs. Torch has them under CUDA's names: https://docs.pytorch.org/docs/stable/notes/hip.html."""

from __future__ import annotations

from .cuda import CudaAdapter


class RocmAdapter(CudaAdapter):
    """One GPU, with graphs of HIP. Raises DeviceError if torch finds no GPU."""

    name = "rocm"

    _built_for = ("hip", "ROCm")
    _where_to_look = (
        "amd-smi lists one (docker run --device=/dev/kfd --device=/dev/dri) and that HIP_VISIBLE_DEVICES, "
        "ROCR_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES does not hide it"
    )
