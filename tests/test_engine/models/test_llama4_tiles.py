"""Llama 4's tiles and tokens equal those of transformers' processor, which needs torchvision. The
few functions of it that are called there are given here, as torchvision computes them.
"""

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers.image_utils import SizeDict
from transformers.models.llama4.processing_llama4 import Llama4Processor

from headrace_common.images.family import FamilyFiles
from headrace_common.images.layout import PromptTokens
from headrace_common.images.llama4 import Llama4Images
from headrace_engine.models.vision.llama4_tiles import llama4_tiles
from headrace_testing.image_prompts import noise

SIDES = (1, 7, 15, 16, 17, 31, 33, 64, 99, 250)
TILE = 16
NAMES = (
    *("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
)
TOKENS = PromptTokens(lambda name: NAMES.index(name) if name in NAMES else None, lambda _: ())


def normalize(
    images: torch.Tensor, mean: Sequence[float], std: Sequence[float], inplace: bool
) -> torch.Tensor:
    parts = (torch.tensor(each, dtype=images.dtype)[:, None, None] for each in (mean, std))
    return images.sub(next(parts)).div_(next(parts))


def pad(images: torch.Tensor, padding: Sequence[int], fill: object) -> torch.Tensor:
    return F.pad(images, (padding[0], padding[2], padding[1], padding[3]))


@pytest.fixture
def transformers_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' module of Llama 4's image processor."""
    functional = SimpleNamespace(pad=pad, normalize=normalize)
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        module = ModuleType(name)
        module.functional = functional  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("transformers.image_processing_backends.tvF", functional, raising=False)
    name = "transformers.models.llama4.image_processing_llama4"
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = __import__(name, fromlist=["x"])
    monkeypatch.delitem(sys.modules, name)
    return found


def resize(images: torch.Tensor, size: SizeDict, resample: object) -> torch.Tensor:
    assert size.height and size.width
    return F.interpolate(images, (size.height, size.width), mode="bilinear", antialias=True)


@pytest.mark.parametrize("most", [1, 4, 16])
@pytest.mark.parametrize("enlarged", [False, True])
def test_tiles_and_tokens(most: int, enlarged: bool, transformers_module: Any) -> None:
    options = {
        "size": {"height": TILE, "width": TILE},
        "max_patches": most,
        "resize_to_max_canvas": enlarged,
    }
    config = {"vision_config": {"patch_size": 4}, "image_token_index": NAMES.index("<|patch|>")}
    files = FamilyFiles(
        config=config, processor={}, image_processor=options, video_processor={}, tokens=TOKENS
    )
    ours = Llama4Images.from_files(files)
    kind = transformers_module.Llama4ImageProcessor
    theirs = kind.__new__(kind)  # its __init__ asks for torchvision
    theirs.resize = resize
    processor: Any = Llama4Processor
    given = {
        **options,
        "size": SizeDict(height=TILE, width=TILE),
        "do_resize": True,
        "resample": None,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "disable_grouping": False,
        "return_tensors": "pt",
    }
    for width in SIDES:
        for height in SIDES:
            image = noise(width, height)
            pixels = torch.tensor(list(image.tobytes()), dtype=torch.uint8)
            pixels = pixels.view(height, width, 3).permute(2, 0, 1)
            made = theirs._preprocess([pixels], **given)
            found = llama4_tiles(ours, image)["pixel_values"]
            assert torch.equal(torch.from_numpy(found), made["pixel_values"].float())
            text = processor._prompt_split_image(None, made["aspect_ratios"][0].tolist(), 4)
            layout = ours.layout(width, height)
            assert "".join(NAMES[each] for each in layout.token_ids) == text, (width, height)
            assert layout.grid[0] == len(found)
