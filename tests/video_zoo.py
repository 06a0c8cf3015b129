"""Videos for the models of `vision_zoo`, as transformers processes them: its own code, but Pillow resizes."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import numpy as np
import torch
import transformers
from PIL import Image as Pillow
from transformers.image_utils import SizeDict
from transformers.video_utils import VideoMetadata
from vision_zoo import CASES, Image, VisionModel, photo

from tidewheel.engine.media.frames import Frames
from tidewheel.engine.media.picture import Picture

VIDEO_CASES = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "glm4.1v")
# Of the video processor, which differs from that of images in all of them.
SETTINGS = {
    "size": {"shortest_edge": 400, "longest_edge": 4000},
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3, 0.25, 0.2],
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
_CLASSES = {"qwen3-vl": "Qwen3VL", "qwen3.5": "Qwen3VL", "glm4.1v": "Glm4v"}
_MODULES = {"Qwen2VL": "qwen2_vl", "Qwen3VL": "qwen3_vl", "Glm4v": "glm4v"}


class Video(NamedTuple):
    """Frames of one size, of which `fps` are shown in a second."""

    frames: tuple[Image, ...]
    fps: float

    @property
    def taken(self) -> Frames:
        """As a decoder gives them."""
        height, width = self.frames[0].shape[:2]
        seconds = tuple(i / self.fps for i in range(len(self.frames)))
        return Frames(height, width, seconds, self.fps, map(Picture, self.frames))


def video(count: int, height: int, width: int, fps: float, seed: int = 0) -> Video:
    """Frames that differ."""
    return Video(tuple(photo(height, width, seed + i) for i in range(count)), fps)


VIDEOS: dict[str, Video] = {
    "two frames": video(2, 40, 60, 2.0),
    "three frames": video(3, 33, 31, 4.0),
    "a frame": video(1, 24, 50, 1.0),
    "many frames": video(9, 90, 40, 5.0),
    "tiny": video(4, 5, 9, 0.7),
    "wide": video(5, 12, 200, 24.0),
}


@functools.cache
def processor(name: str) -> Any:
    """The video processor of a case. `preprocess` would want torchvision; its parts do not."""
    kind = _CLASSES.get(name, "Qwen2VL")
    folder = _MODULES[kind]
    names = ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")
    with patch.dict(sys.modules, {f"torchvision{part}": MagicMock() for part in names}):
        module = importlib.import_module(f"transformers.models.{folder}.video_processing_{folder}")
    cls = getattr(module, f"{kind}VideoProcessor")
    return cls.__new__(cls)


def processed(name: str, given: Video) -> dict[str, Any]:
    """What the video processor gives for one video."""
    own, together = processor(name), int(SETTINGS["temporal_patch_size"])  # type: ignore[call-overload]
    frames = given.frames
    if len(frames) < together:  # it takes no fewer
        frames = (*frames, *frames[-1:] * (together - len(frames)))
    whole = torch.from_numpy(np.stack(frames).transpose(0, 3, 1, 2).copy())[None]
    base = sys.modules["transformers.video_processing_utils"].BaseVideoProcessor
    with patch.object(base, "resize", _resized):
        resized = own.resize(whole, SizeDict(**SETTINGS["size"]), 3, factor=8, temporal_factor=together)  # type: ignore[arg-type]
    mean, std = (torch.tensor(SETTINGS[field])[:, None, None] for field in ("image_mean", "image_std"))
    values = ((resized.double() / 255).float() - mean) / std
    patches, *grid = own.patchify(values, 4, 2, together)
    return {
        "pixel_values_videos": patches[0],
        "video_grid_thw": torch.tensor([grid]),
        "second_per_grid_ts": torch.tensor([together / given.fps]),
        "video_metadata": [
            VideoMetadata(
                total_num_frames=len(given.frames), fps=given.fps, frames_indices=list(range(len(given.frames)))
            )
        ],
    }


def _resized(own: Any, image: torch.Tensor, size: Any, **options: Any) -> torch.Tensor:
    frames = [Pillow.fromarray(frame.numpy().transpose(1, 2, 0).copy()) for frame in image[0]]
    smaller = [np.array(frame.resize((size.width, size.height), Pillow.Resampling.BICUBIC)) for frame in frames]
    return torch.from_numpy(np.stack(smaller).transpose(0, 3, 1, 2).copy())[None]


def features(made: VisionModel, inputs: dict[str, Any]) -> Any:
    """The video's embeddings, and what is added after layers of the decoder behind them."""
    with torch.no_grad():
        outputs = made.model.get_video_features(
            inputs["pixel_values_videos"], inputs["video_grid_thw"], return_dict=True
        )
    deepstack = [torch.cat(list(layer)) for layer in getattr(outputs, "deepstack_features", None) or []]
    return torch.cat([torch.cat(list(outputs.pooler_output)), *deepstack], -1).float().numpy()


def expanded(name: str, inputs: dict[str, Any]) -> str:
    """What transformers' processor puts in the place of the video, with a token for each embedding."""
    cls = getattr(transformers, CASES[name].processor)
    own = cls.__new__(cls)
    vars(own).update(
        image_token="<|image|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    own.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    replaced: str = own.replace_video_token(inputs, 0)
    return replaced


def chosen(name: str, count: int, fps: float) -> Sequence[int]:
    """Which frames the processor takes."""
    indices: Sequence[int] = processor(name).sample_frames(VideoMetadata(total_num_frames=count, fps=fps)).tolist()
    return indices
