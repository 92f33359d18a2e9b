"""The number of tokens of an image equals what transformers' processor makes."""

from typing import Any

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from headrace_common.images.formats import image_format
from headrace_common.images.layout import NO_TOKENS

SIDES = (1, 13, 14, 27, 28, 29, 42, 55, 70, 99, 223, 224, 225, 501, 640, 1080)
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"min_pixels": 3136, "max_pixels": 28 * 28 * 20},
    {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 400_000}},
    {"patch_size": 8, "merge_size": 1, "min_pixels": 4000, "max_pixels": 9000},
)


@pytest.mark.parametrize("config", CONFIGS)
def test_grids_equal_those_of_transformers(config: dict[str, Any]) -> None:
    theirs = Qwen2VLImageProcessorPil(**config, do_rescale=False, do_normalize=False)
    files = {"model_type": "qwen2_vl", "image_token_id": 7}
    ours = image_format(files, {}, {"image_processor_type": "any", **config}, {}, NO_TOKENS)
    assert ours is not None
    sizes = [(w, h) for w in SIDES for h in SIDES if max(w, h) <= 200 * min(w, h)]

    for width, height in sizes[:: 1 if config else 3]:
        image = np.zeros((height, width, 3), dtype=np.uint8)
        grid = theirs(images=[image], return_tensors="np", input_data_format="channels_last")
        expected = tuple(grid["image_grid_thw"][0].tolist())
        found = ours.layout(width, height)
        assert found.grid == expected, (width, height)
        assert len(found.token_ids) == np.prod(expected) // config.get("merge_size", 2) ** 2
        assert set(found.token_ids) == {7}


def test_very_long_images_are_refused_as_by_transformers() -> None:
    theirs = Qwen2VLImageProcessorPil()
    image = np.zeros((401, 2, 3), dtype=np.uint8)

    with pytest.raises(ValueError, match="aspect ratio"):
        theirs(images=[image], return_tensors="np", input_data_format="channels_last")
