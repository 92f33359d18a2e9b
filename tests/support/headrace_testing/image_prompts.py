"""Prompts with images: transformers' greedy tokens for them, and the engine's requests."""

import inspect
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from headrace_common.images.layout import ImageFormat, PromptTokens, expand
from headrace_common.images.llama4 import Llama4Images
from headrace_common.wire.images import image_digest
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.core.images import PromptImage
from headrace_engine.core.request import EngineRequest
from headrace_engine.models.vision.image_reader import ImageReader, read_format
from headrace_engine.models.vision.llama4_tiles import llama4_tiles

from .checkpoints import MARGIN, make_tokenizer, save_checkpoint
from .draft_heads import change_config
from .engines import greedy

IMAGE_TOKEN = "<|image_pad|>"
_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role + ' ' }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}<|image_pad|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}<s>assistant"
)
_KINDS = frozenset({"token_type_ids", "mm_token_type_ids"})
# In place of an image in a prompt; no random text has it.
NO_TEXT = -1
# Ids of tokens, and images.
Prompt = Sequence[int | Image.Image]


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A random picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def save_chat_model(
    folder: Path,
    name: str,
    placeholder: str = IMAGE_TOKEN,
    field: str = "image_token_id",
    **options: Any,
) -> Path:
    """A checkpoint whose tokenizer has this placeholder and a token of two line breaks, and with a
    chat template. `field` of config.json has the placeholder's id; `options` are those of
    save_checkpoint."""
    save_checkpoint(folder, name, **options)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(placeholder, special=True)])
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    change_config(folder, **{field: tokenizer.token_to_id(placeholder)})
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace(IMAGE_TOKEN, placeholder))
    return folder


class ImageRequests:
    """Prompts of one checkpoint, for the engine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, prompt: Prompt) -> tuple[list[int], tuple[PromptImage, ...]]:
        images = [part for part in prompt if not isinstance(part, int)]
        form = self._form
        short = [part if isinstance(part, int) else NO_TEXT for part in prompt]
        found = [(image_digest(each.tobytes(), b""), form.layout(*each.size)) for each in images]
        ids, spans = expand(NO_TEXT, short, found)
        return ids, self._reader.read(spans, images)

    @cached_property
    def _form(self) -> ImageFormat:
        tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        tokens = PromptTokens(tokenizer.token_to_id, lambda text: tokenizer.encode(text).ids)
        form = read_format(load_checkpoint(str(self._folder)), tokens)
        assert form is not None
        return form

    @cached_property
    def _reader(self) -> ImageReader:
        return ImageReader(self._folder, self._form)


class ImagePrompts(ImageRequests):
    """Prompts of one checkpoint, for transformers and for the engine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        kind: Any = transformers.AutoModelForImageTextToText
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model = model.eval()
        self.image_token: int = self._model.config.image_token_id
        # The argument that says which tokens are of images, if the model asks.
        self._kinds = _KINDS & inspect.signature(self._model.forward).parameters.keys()
        self._right: set[tuple[object, ...]] = set()  # prompts with outputs that were checked

    def check(self, prompt: Prompt, output: Sequence[int]) -> None:
        """Fails unless each of these tokens has transformers' largest logit after those before it,
        but for the end of the sequence. Of a near-tie, either token may follow."""
        parts = (each if isinstance(each, int) else (each.size, each.tobytes()) for each in prompt)
        checked = (*parts, tuple(output))
        if checked in self._right:
            return
        ids, images = self._inputs(prompt)
        known = torch.tensor([[*ids, *output[:-1]]])
        kinds = {name: (known == self.image_token).int() for name in self._kinds}
        with torch.inference_mode():
            found = self._model(known, **kinds, **images).logits[0]
        logits = found[len(ids) - 1 :].clone()
        logits[:, [self._model.generation_config.eos_token_id, self.image_token]] = -torch.inf
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        worse = logits.max(dim=1).values - chosen
        assert float(worse.max()) < MARGIN, f"token {int(worse.argmax())} is another one"
        self._right.add(checked)

    def states(self, prompt: Prompt) -> torch.Tensor:
        """transformers' last hidden states [tokens, hidden size]."""
        ids, images = self._inputs(prompt)
        known = torch.tensor([ids])
        kinds = {name: (known == self.image_token).int() for name in self._kinds}
        with torch.inference_mode():
            found: torch.Tensor = self._model.model(known, **kinds, **images).last_hidden_state
        return found[0]

    def request(self, name: str, prompt: Prompt, length: int, **options: Any) -> EngineRequest:
        """The engine's request for as many greedy tokens."""
        ids, images = self.read(prompt)
        params = greedy(length, logit_bias={self.image_token: -100.0}, **options)
        return EngineRequest(
            request_id=name, prompt_token_ids=tuple(ids), params=params, seed=0, images=images
        )

    @cached_property
    def _processor(self) -> Any:
        kind: Any = transformers.AutoImageProcessor
        return kind.from_pretrained(self._folder, backend="pil")

    def _inputs(self, prompt: Prompt) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Ids with the tokens of images, and what the model reads of them."""
        form, ids = self._form, list[int]()
        for part in prompt:
            ids += [part] if isinstance(part, int) else form.token_ids(form.grid(*part.size))
        images = [part for part in prompt if not isinstance(part, int)]
        if not images:
            return ids, {}
        if isinstance(form, Llama4Images):  # transformers' own needs torchvision
            tiles = [torch.from_numpy(llama4_tiles(form, each)["pixel_values"]) for each in images]
            return ids, {"pixel_values": torch.cat(tiles)}
        made = self._processor(images=images, return_tensors="pt", **form.processor_options)
        return ids, dict(made)


def text(seed: int, length: int) -> Iterator[int]:
    """Random ids of tokens that are none of the special ones."""
    return iter(np.random.default_rng(seed).integers(3, 250, length).tolist())
