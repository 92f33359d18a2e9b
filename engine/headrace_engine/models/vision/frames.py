"""Frames of a video that a vision tower reads together, from those of each frame alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]
# PIL.Image.Resampling.BICUBIC, as transformers' video processors resize. Pillow is loaded when the
# first image comes.
BICUBIC = 3
_PATCHES, _COLOURS = "pixel_values", 3


def together(frames: Sequence[Arrays]) -> dict[str, npt.NDArray[Any]]:
    """What the tower reads of frames of equal size, of which each was made for it as an image.

    An image's patches [patches, colours x frames x pixels] have it in place of all frames.
    """
    arrays = dict(frames[0])
    if len(frames) > 1:
        of_frames = [
            frame[_PATCHES].reshape(len(frame[_PATCHES]), _COLOURS, len(frames), -1)[:, :, number]
            for number, frame in enumerate(frames)
        ]
        arrays[_PATCHES] = np.stack(of_frames, axis=2).reshape(arrays[_PATCHES].shape)
    return arrays


def whole_square(image: Arrays) -> dict[str, npt.NDArray[Any]]:
    """A video of one frame, from what LLaVA-OneVision's tower reads of it as an image: the first
    square is the whole image."""
    return {"pixel_values_videos": image[_PATCHES][:, :1]}
