"""The vision tower of a multimodal checkpoint, computed by its code in transformers."""

import importlib
import logging
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.config import ModelConfig
from ...checkpoints.tensor_files import WHOLE, TensorFiles
from ...core.errors import CheckpointError, ConfigError
from ...core.images import PromptImage
from ..transformers.transformers_model import auto_config
from .image_reader import ImageReader

logger = logging.getLogger(__name__)

# The images that a prompt may have if nothing is configured, as in vLLM.
MOST_IMAGES = 999
# Module and class of each architecture's tower.
TOWERS = {
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", "Qwen2VisionTransformerPretrainedModel"),
    "Qwen2_5_VLForConditionalGeneration": (
        "qwen2_5_vl",
        "Qwen2_5_VisionTransformerPretrainedModel",
    ),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "Qwen3VLVisionModel"),
}
# The prefixes of its tensors, in published checkpoints and in those that transformers writes.
_PREFIXES = ("visual.", "model.visual.")


class VisionTower:
    """A tower with its weights. A token of an image has `levels` embeddings.

    The first replaces the token's own. With DeepStack (https://arxiv.org/abs/2406.04334) the others
    are added after the decoder's first layers. `token_bytes` are those of all levels. `placeholder`
    is the token that embeddings replace. `reader` makes the images that the tower reads.
    """

    def __init__(
        self, module: Any, placeholder: int, levels: int, hidden_size: int, reader: ImageReader
    ) -> None:
        self._module, self.placeholder, self.reader = module, placeholder, reader
        self.token_bytes = levels * hidden_size * module.dtype.itemsize

    def encode(self, image: PromptImage) -> torch.Tensor:
        """The embeddings [levels, tokens, hidden size] of an image.

        Each image is computed alone, so that they do not depend on other requests.
        """
        module = self._module
        patches = torch.from_numpy(image.patches).to(module.device, module.dtype)
        grid = torch.tensor([image.span.grid], device=module.device)
        output = module(patches, grid_thw=grid)
        return torch.stack((output.pooler_output, *getattr(output, "deepstack_features", ())))


def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """Loads the tower. Raises CheckpointError for tensors that are missing or of another shape,
    ConfigError for a tower that does not fit the decoder."""
    config, decoder = auto_config(checkpoint), ModelConfig.from_hf(checkpoint)
    vision = config.vision_config
    levels = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
    if levels > decoder.num_layers:
        raise ConfigError(
            f"{checkpoint.folder / 'config.json'}: vision_config.deepstack_visual_indexes must be "
            f"fewer than the {decoder.num_layers} layers of the decoder"
        )
    module = _make(checkpoint.architecture, vision, dtype, device)
    _read(module, checkpoint.folder)
    reader = ImageReader(checkpoint.folder, vision.spatial_merge_size)
    logger.info("vision tower loaded", extra={"parameters": module.num_parameters()})
    return VisionTower(module, config.image_token_id, levels, decoder.hidden_size, reader)


def _make(architecture: str, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The tower without its weights."""
    from transformers.initialization import no_init_weights

    family, name = TOWERS[architecture]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with no_init_weights(), torch.device(device):
        made = getattr(module, name)._from_config(config, dtype=dtype, attn_implementation="sdpa")
    return made.eval()


def _read(module: Any, folder: Path) -> None:
    """Copies the tensors of the files into the tower."""
    files, parameters = TensorFiles(folder), module.state_dict()
    prefix = next((each for each in _PREFIXES if _has(files, each)), _PREFIXES[0])
    for name, parameter in parameters.items():
        stored = files.tensors.get(prefix + name)
        if stored is None:
            raise CheckpointError(f"{folder}: the vision tower's {prefix}{name} is missing")
        if stored.shape != tuple(parameter.shape):
            raise CheckpointError(
                f"{stored.file}: {prefix}{name} has shape {list(stored.shape)}, but config.json "
                f"asks for {list(parameter.shape)}"
            )
    files.plan({prefix + name: WHOLE for name in parameters})
    for name, parameter in parameters.items():
        parameter.copy_(files.load(prefix + name))


def _has(files: TensorFiles, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in files.tensors)
