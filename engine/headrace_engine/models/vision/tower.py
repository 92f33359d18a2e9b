"""The vision tower of a multimodal checkpoint, computed by its code in transformers."""

import inspect
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace_common.images.layout import ImageFormat

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.tensor_files import WHOLE, TensorFiles
from ...core.errors import CheckpointError, ConfigError
from ...core.images import PromptImage
from ..transformers.transformers_model import auto_config
from .image_reader import ImageReader

logger = logging.getLogger(__name__)

# The images that a prompt may have if nothing is configured, as in vLLM.
MOST_IMAGES = 999
# What a tower reads of a frame that it does not read as an image.
_VIDEO = "pixel_values_videos"
_READ_IMAGE, _READ_VIDEO = "get_image_features", "get_video_features"
# The parts of transformers' multimodal models that images do not need.
_OTHER_PARTS = ("language_model", "text_model", "audio_tower", "embed_audio")


class VisionTower:
    """A tower and its projector, with their weights. A token of an image has `levels` embeddings.

    The first replaces the token's own. With DeepStack (https://arxiv.org/abs/2406.04334) the others
    are added after the decoder's first layers. `token_bytes` are those of all levels. Embeddings
    replace the tokens `placeholders`. `reader` makes the images that the tower reads.
    """

    def __init__(
        self,
        model: Any,
        placeholders: Sequence[int],
        levels: int,
        hidden_size: int,
        reader: ImageReader,
    ) -> None:
        self._model, self.placeholders, self.reader = model, placeholders, reader
        self._names = {
            method: frozenset(inspect.signature(getattr(model, method)).parameters)
            for method in (_READ_IMAGE, _READ_VIDEO)
            if hasattr(model, method)
        }
        self.token_bytes = levels * hidden_size * model.dtype.itemsize

    def encode(self, image: PromptImage) -> torch.Tensor:
        """The embeddings [levels, tokens, hidden size] of an image.

        Each image is computed alone, so that they do not depend on other requests.
        """
        arrays = image.pixels.arrays
        method = _READ_VIDEO if _VIDEO in arrays else _READ_IMAGE
        given = {
            name: self._placed(torch.from_numpy(array))
            for name, array in arrays.items()
            if name in self._names[method]
        }
        output = getattr(self._model, method)(**given)
        deeper = getattr(output, "deepstack_features", None) or ()
        first = output.pooler_output
        if first is None:  # of Llama 4
            first = self._model.multi_modal_projector(output.last_hidden_state)
        levels = torch.stack([_joined(level) for level in (first, *deeper)])
        if _VIDEO in arrays:  # only the last frame of LLaVA-OneVision keeps the end of a video
            levels = levels[:, : image.span.length]
        # The image's only vector is that of each of its tokens.
        return levels.expand(-1, image.span.length, -1) if self.reader.alone else levels

    def _placed(self, given: torch.Tensor) -> torch.Tensor:
        dtype = self._model.dtype if given.is_floating_point() else given.dtype
        return given.to(self._model.device, dtype)


def _joined(level: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """The embeddings [tokens, hidden size] of one image, which may come in parts."""
    parts = [level] if isinstance(level, torch.Tensor) else level
    return torch.cat([part.flatten(0, -2) for part in parts])


def load_tower(
    checkpoint: Checkpoint, form: ImageFormat, dtype: torch.dtype, device: torch.device
) -> VisionTower:
    """Loads the tower. Raises CheckpointError for tensors that are missing or of another shape,
    ConfigError for a tower that does not fit the decoder."""
    config = auto_config(checkpoint)
    config = getattr(config, "vlm_config", config)
    decoder = config.get_text_config()
    levels = 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    if levels > decoder.num_hidden_layers:
        raise ConfigError(
            f"{checkpoint.folder / 'config.json'}: vision_config.deepstack_visual_indexes must be "
            f"fewer than the {decoder.num_hidden_layers} layers of the decoder"
        )
    placeholders = {getattr(config, "image_token_id", form.placeholder)}
    if form.video is not None:
        placeholders.add(form.video.placeholder)
    model = _load(config, checkpoint.folder, dtype, device)
    reader = ImageReader(checkpoint.folder, form)
    logger.info("vision tower loaded", extra={"parameters": model.num_parameters()})
    size = getattr(config, "projection_dim", decoder.hidden_size)
    return VisionTower(model, tuple(placeholders), levels, size, reader)


def _load(config: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' model without the parts that `get_image_features` does not compute with."""
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    mapping: Any = AutoModel
    kind: Any = mapping._model_mapping[type(config)]
    with no_init_weights(), torch.device("meta"):
        model = kind._from_config(config, dtype=dtype, attn_implementation="sdpa")
    for name in _OTHER_PARTS:
        if hasattr(model, name):
            setattr(model, name, None)
    model.to_empty(device=device)
    tensors = model.state_dict(keep_vars=True)
    _read(tensors, folder)
    # As from_pretrained does: makes the buffers that are in no file, such as those of rotations.
    for tensor in tensors.values():
        tensor._is_hf_initialized = True
    model.initialize_weights()
    return model.eval()


def _read(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Copies the tensors of the files into the tower's."""
    files = TensorFiles(folder)
    stored_names = {}
    for name, tensor in tensors.items():
        stored_name = next((each for each in _names(name) if each in files.tensors), None)
        if stored_name is None:
            raise CheckpointError(f"{folder}: the vision tower's {name} is missing")
        stored = files.tensors[stored_name]
        if stored.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{stored.file}: {stored_name} has shape {list(stored.shape)}, but config.json "
                f"asks for {list(tensor.shape)}"
            )
        stored_names[name] = stored_name
    files.plan(dict.fromkeys(stored_names.values(), WHOLE))
    for name, stored_name in stored_names.items():
        tensors[name].copy_(files.load(stored_name))


def _names(name: str) -> Iterator[str]:
    """The names that published checkpoints, and those that transformers writes, have for a
    tensor."""
    older = name.replace("vision_tower.", "vision_tower.vision_model.")
    for each in (name, older):
        for part in ("model.", "", "vlm.", "vlm.model."):
            yield part + each
