"""Small random checkpoints of CLIP and SigLIP, and transformers' vectors of their inputs."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch.nn import functional as F

from .checkpoints import VOCAB, make_tokenizer

POSITIONS, PAD, EOS = 20, 0, 2
NAMES = ("clip", "siglip")
_PART: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
    "initializer_factor": 8.0,
}
_TEXT: dict[str, Any] = {
    **_PART,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_VISION: dict[str, Any] = {**_PART, "image_size": 16, "patch_size": 4}
CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "clip": ("CLIPConfig", {"projection_dim": 24}, "CLIPImageProcessor"),
    "siglip": ("SiglipConfig", {}, "SiglipImageProcessor"),
}
Input = list[int] | Image.Image


def save_dual_encoder(folder: Path, name: str) -> Path:
    """A checkpoint of one of `NAMES`."""
    kind, options, processor = CONFIGS[name]
    config = getattr(transformers, kind)(text_config=_TEXT, vision_config=_VISION, **options)
    torch.manual_seed(5)
    auto: Any = transformers.AutoModel
    model = auto.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    crop = {"crop_size": {"height": 16, "width": 16}} if name == "clip" else {}
    size = {"shortest_edge": 16} if name == "clip" else {"height": 16, "width": 16}
    preprocessor = {"image_processor_type": processor, "size": size, **crop}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    return folder


def features(folder: Path, name: str, one: Input) -> torch.Tensor:
    """transformers' vector of a text or an image, normalised."""
    auto: Any = transformers.AutoModel
    model = auto.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        if isinstance(one, Image.Image):
            kind: Any = transformers.AutoImageProcessor
            pixels = kind.from_pretrained(folder, backend="pil")(images=[one], return_tensors="pt")
            found = model.get_image_features(**pixels)
        else:
            padded = one + [PAD] * (POSITIONS - len(one) if name == "siglip" else 0)
            found = model.get_text_features(input_ids=torch.tensor([padded]))
    vector: torch.Tensor = F.normalize(found.pooler_output[0], dim=0)
    return vector
