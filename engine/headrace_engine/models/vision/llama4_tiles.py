"""Makes an image into the tiles that Llama 4's tower reads, as transformers does with torchvision.

transformers' image processor for Llama 4 needs torchvision, which Headrace does not.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from headrace_common.images.llama4 import Llama4Images

if TYPE_CHECKING:
    from PIL.Image import Image


def llama4_tiles(form: Llama4Images, image: "Image") -> Mapping[str, npt.NDArray[Any]]:
    """`pixel_values` float32 [tiles, 3, side, side] of an image in RGB: its tiles, and the whole
    image last if there are several."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    rows, columns = form.canvas(*image.size)
    side = form.tile
    found = _resized(pixels, *form.resized(*image.size))
    padding = columns * side - found.shape[3], rows * side - found.shape[2]
    found = F.pad(found, (0, padding[0], 0, padding[1]))
    tiles = found.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).flatten(0, 1)
    if len(tiles) > 1:
        tiles = torch.cat([tiles, _resized(pixels, side, side)])
    return {"pixel_values": _normalised(form, tiles).float().numpy()}


def _resized(pixels: torch.Tensor, width: int, height: int) -> torch.Tensor:
    return F.interpolate(pixels, (height, width), mode="bilinear", antialias=True)


def _normalised(form: Llama4Images, tiles: torch.Tensor) -> torch.Tensor:
    """In bfloat16, as the family was trained."""
    mean, std = (
        torch.tensor(values, dtype=torch.bfloat16)[:, None, None]
        for values in (form.mean, form.std)
    )
    return (tiles.to(torch.bfloat16) * (1 / 255) - mean) / std
