"""The network that sees: a SigLIP tower and LLaVA's projector, with the weight names Hugging Face expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

PADDING = (127, 127, 127)


@dataclass(frozen=True)
class TowerShape:
    """The sizes of the network; ``outputs`` is the width of the decoder."""

    image: int = 112
    patch: int = 16
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    intermediate: int = 512
    outputs: int = 256
    epsilon: float = 1e-6

    @property
    def grid(self) -> int:
        """How many patches are along a side of an image."""
        return self.image // self.patch


def squared(image: Image.Image, side: int) -> NDArray[np.uint8]:
    """Return the image in the middle of a grey square of ``side`` pixels, as the image processor makes it."""
    width, height = image.size
    whole = max(image.size)
    square = Image.new("RGB", (whole, whole), PADDING)
    square.paste(image, ((whole - width) // 2, (whole - height) // 2))
    return np.asarray(square.resize((side, side), Image.Resampling.BICUBIC))


class TowerBlock(nn.Module):
    """One transformer layer, in which all patches of an image see each other."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.hidden, shape.epsilon)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)
        self.mlp_norm = nn.LayerNorm(shape.hidden, shape.epsilon)
        self.up = nn.Linear(shape.hidden, shape.intermediate)
        self.down = nn.Linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and the feed-forward network."""
        images, length, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(images, length, 3, self.heads, -1)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(2, 3)
        mixed = scores.float().softmax(-1).to(values.dtype) @ values
        x = x + self.out(mixed.transpose(1, 2).reshape(images, length, hidden))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Tower(nn.Module):
    """Patches, layers, projector."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.shape = shape
        self.patches = nn.Linear(3 * shape.patch**2, shape.hidden)
        self.positions = nn.Parameter(torch.randn(shape.grid**2, shape.hidden) * 0.02)
        self.blocks = nn.ModuleList(TowerBlock(shape) for _ in range(shape.layers))
        self.merge = nn.Linear(shape.hidden, shape.outputs)
        self.connector = nn.Linear(shape.outputs, shape.outputs)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5)
            elif parameter.dim() == 2 and name != "positions":
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def features(self, images: Tensor) -> Tensor:
        """Return what the layers make of images ``[images, side, side, 3]`` of bytes: ``[images, patches, hidden]``."""
        shape = self.shape
        pixels = images.float() / 127.5 - 1
        cut = pixels.view(-1, shape.grid, shape.patch, shape.grid, shape.patch, 3).permute(0, 1, 3, 5, 2, 4)
        x: Tensor = self.patches(cut.reshape(len(images), shape.grid**2, -1)) + self.positions
        for block in self.blocks:
            x = block(x)
        return x

    def embeddings(self, features: Tensor) -> Tensor:
        """Return the rows that take the place of tokens, ``[images, patches, outputs]``."""
        rows: Tensor = self.connector(functional.gelu(self.merge(features)))
        return rows

    def config(self) -> dict[str, Any]:
        """Return the ``vision_config`` of a LLaVA."""
        return {
            "attention_dropout": 0.0,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": self.shape.hidden,
            "image_size": self.shape.image,
            "intermediate_size": self.shape.intermediate,
            "layer_norm_eps": self.shape.epsilon,
            "model_type": "siglip_vision_model",
            "num_attention_heads": self.shape.heads,
            "num_channels": 3,
            "num_hidden_layers": self.shape.layers,
            "patch_size": self.shape.patch,
            "vision_use_head": False,
        }

    def hugging_face_weights(self) -> dict[str, Tensor]:
        """Return the weights in bfloat16 under the names of ``LlavaForConditionalGeneration``.

        The norm behind SigLIP's layers is not computed, because features are taken before it.
        """
        shape, at = self.shape, "vision_tower.vision_model."
        convolution = self.patches.weight.view(shape.hidden, 3, shape.patch, shape.patch)
        named = {
            at + "embeddings.patch_embedding.weight": convolution,
            at + "embeddings.patch_embedding.bias": self.patches.bias,
            at + "embeddings.position_embedding.weight": self.positions,
        }
        modules: dict[str, nn.Module] = {
            "multi_modal_projector.linear_1": self.merge,
            "multi_modal_projector.linear_2": self.connector,
        }
        for number, block in enumerate(self.blocks):
            assert isinstance(block, TowerBlock)
            layer = f"{at}encoder.layers.{number}."
            for kind in ("weight", "bias"):
                parts = getattr(block.qkv, kind).chunk(3)
                named |= {f"{layer}self_attn.{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
            modules |= {
                layer + "self_attn.out_proj": block.out,
                layer + "mlp.fc1": block.up,
                layer + "mlp.fc2": block.down,
                layer + "layer_norm1": block.attention_norm,
                layer + "layer_norm2": block.mlp_norm,
            }
        for name, module in modules.items():
            named |= {f"{name}.{kind}": parameter for kind, parameter in module.named_parameters()}
        return {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in named.items()}
