"""Small random checkpoints of ColQwen2 and ColPali, and transformers' vectors of their inputs."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from .checkpoints import SHAPES, SIGLIP_TOWER, make_tokenizer, randomise

NAMES = ("colqwen2", "colpali")
SIZE = 24
IMAGE_TOKENS = {"colqwen2": "<|image_pad|>", "colpali": "<image>"}
_PREFIXES = {
    "colqwen2": {"query_prefix": "the ", "visual_prompt_prefix": "a<|image_pad|>cat</s>"},
    "colpali": {"query_prefix": "the ", "visual_prompt_prefix": "a cat"},
}
_KINDS = {"colqwen2": "ColQwen2", "colpali": "ColPali"}
_SIGLIP: dict[str, Any] = {
    "image_processor_type": "SiglipImageProcessor",
    "size": {"height": 16, "width": 16},
    "image_seq_length": 16,
}
_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>"}


def save_late_interaction(folder: Path, name: str = "colqwen2") -> Path:
    """A checkpoint of one of `NAMES`."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(IMAGE_TOKENS[name], special=True)])
    kind: Any = getattr(transformers, f"{_KINDS[name]}Config")
    config = kind(vlm_config=_inner(name, tokenizer), embedding_dim=SIZE)
    torch.manual_seed(7)
    model = getattr(transformers, f"{_KINDS[name]}ForRetrieval")(config)
    randomise(model)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    processor = SHAPES["qwen2-vl"].processor if name == "colqwen2" else _SIGLIP
    for file, content in (
        ("preprocessor_config.json", processor),
        ("processor_config.json", _PREFIXES[name]),
        ("tokenizer_config.json", _SPECIAL),
    ):
        (folder / file).write_text(json.dumps(content))
    return folder


def _inner(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """The configuration of the model inside."""
    image = tokenizer.token_to_id(IMAGE_TOKENS[name])
    if name == "colqwen2":
        options = SHAPES["qwen2-vl"].options
        return {"model_type": "qwen2_vl", **options, "image_token_id": image}
    text = {**SHAPES["gemma"].options, "model_type": "gemma"}
    return {
        "model_type": "paligemma",
        "text_config": text,
        "vision_config": SIGLIP_TOWER,
        "image_token_index": image,
        "projection_dim": text["hidden_size"],
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
    }


class Reference:
    """transformers' model of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = json.loads((folder / "config.json").read_text())["model_type"]
        kind: Any = getattr(transformers, f"{_KINDS[self._name]}ForRetrieval")
        self._model = kind.from_pretrained(folder).eval()

    def vectors(self, ids: Sequence[int], image: Image.Image | None = None) -> torch.Tensor:
        """The vectors [tokens, SIZE] of a prompt. `ids` have all tokens of the image."""
        known = torch.tensor([ids])
        given: dict[str, Any] = {"attention_mask": torch.ones_like(known)}
        if self._name == "colpali":
            given["token_type_ids"] = torch.zeros_like(known)
        if image is not None:
            given |= self._pixels(known, image)
        with torch.inference_mode():
            found: torch.Tensor = self._model(known, **given).embeddings[0]
        return found

    def _pixels(self, known: torch.Tensor, image: Image.Image) -> dict[str, Any]:
        made = self.processor.image_processor(images=[image], return_tensors="pt")
        if self._name == "colpali":
            return {"pixel_values": made["pixel_values"]}
        grid = made["image_grid_thw"]
        # transformers lost the positions that these models were trained with
        positions, _ = self._model.vlm.get_rope_index(
            known,
            image_grid_thw=grid,
            mm_token_type_ids=(known == self.processor.image_token_id).int(),
        )
        return {
            "pixel_values": made["pixel_values"][None],
            "image_grid_thw": grid,
            "position_ids": positions,
        }

    def of_query(self, text: str) -> torch.Tensor:
        """The vectors of a text as transformers' processor reads it."""
        (ids,) = self.processor.process_queries([text])["input_ids"].tolist()
        return self.vectors(ids)

    def of_image(self, image: Image.Image) -> torch.Tensor:
        """The vectors of an image as transformers' processor reads it."""
        (ids,) = self.processor.process_images([image])["input_ids"].tolist()
        return self.vectors(ids, image)

    @cached_property
    def processor(self) -> Any:
        kind: Any = transformers.AutoImageProcessor
        fast: Any = transformers.PreTrainedTokenizerFast
        tokenizer = fast(tokenizer_file=str(self._folder / "tokenizer.json"), **_SPECIAL)
        images = kind.from_pretrained(self._folder, backend="pil")
        made = getattr(transformers, f"{_KINDS[self._name]}Processor")
        return made(images, tokenizer, **_PREFIXES[self._name])
