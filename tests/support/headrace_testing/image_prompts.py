"""Prompts with images: transformers' greedy tokens for them, and the engine's requests."""

import inspect
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from headrace_common.images.frames import FrameGroup, group_frames
from headrace_common.images.gemma4 import Gemma4Images
from headrace_common.images.layout import ImageFormat, ImageLayout, PromptTokens, expand
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

IMAGE_TOKEN, VIDEO_TOKEN = "<|image_pad|>", "<|video_pad|>"
_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role + ' ' }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}<|image_pad|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}<s>assistant"
)
_KINDS = frozenset({"token_type_ids", "mm_token_type_ids"})
# In place of an image in a prompt; no random text has it.
NO_TEXT = -1
# Tokens between the groups of a video's frames; any text would do.
_BETWEEN = (7, 8)


@dataclass(frozen=True)
class Video:
    """Frames of one size, and the tokens after each group of them."""

    frames: tuple[Image.Image, ...]
    between: tuple[tuple[int, ...], ...] = ()

    def after(self, groups: int) -> tuple[tuple[int, ...], ...]:
        return self.between or (_BETWEEN,) * groups


# Ids of tokens, images and videos.
Prompt = Sequence[int | Image.Image | Video]


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A random picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def video(frames: int, width: int, height: int, seed: int = 0) -> Video:
    return Video(tuple(noise(width, height, seed + number) for number in range(frames)))


def save_chat_model(
    folder: Path,
    name: str,
    placeholder: str = IMAGE_TOKEN,
    field: str = "image_token_id",
    **options: Any,
) -> Path:
    """A checkpoint whose tokenizer has this placeholder, those of Qwen's videos, and a token of two
    line breaks, and with a chat template. `field` of config.json has the placeholder's id;
    `options` are those of save_checkpoint."""
    save_checkpoint(folder, name, **options)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(placeholder, special=True)])
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    around = ("<|vision_start|>", VIDEO_TOKEN, "<|vision_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in around])
    tokenizer.save(str(folder / "tokenizer.json"))
    video = tokenizer.token_to_id(VIDEO_TOKEN)
    change_config(folder, **{field: tokenizer.token_to_id(placeholder), "video_token_id": video})
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace(IMAGE_TOKEN, placeholder))
    return folder


class ImageRequests:
    """Prompts of one checkpoint, for the engine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, prompt: Prompt) -> tuple[list[int], tuple[PromptImage, ...]]:
        short: list[int] = []
        found: list[tuple[bytes, ImageLayout]] = []
        encoded: list[bytes] = []
        for part in prompt:
            if isinstance(part, int):
                short.append(part)
                continue
            if isinstance(part, Video):
                groups, layout = self.groups(part)
                for tokens in part.after(len(groups)):
                    short += (NO_TEXT, *tokens)
                data = [group.encode() for group in groups]
            else:
                layout = self._form.layout(*part.size)
                short.append(NO_TEXT)
                data = [png(part)]
            encoded += data
            found += [(image_digest(each, b""), layout) for each in data]
        ids, spans = expand({NO_TEXT}, short, found)
        pixels = [self._reader.decode(*pair) for pair in zip(spans, encoded, strict=True)]
        return ids, self._reader.place(spans, pixels)

    def groups(self, video: Video) -> tuple[list[FrameGroup], ImageLayout]:
        assert self._form.video is not None
        return group_frames(self._form.video, list(map(png, video.frames)), *video.frames[0].size)

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
        checked = (*map(_key, prompt), tuple(output))
        if checked in self._right:
            return
        ids, images = self._inputs(prompt)
        known = torch.tensor([[*ids, *output[:-1]]])
        with torch.inference_mode():
            found = self._model(known, **self._kinds_of(known, images), **images).logits[0]
        logits = found[len(ids) - 1 :].clone()
        ends = self._model.generation_config.eos_token_id
        logits[:, [ends, *self.placeholders]] = -torch.inf
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        worse = logits.max(dim=1).values - chosen
        assert float(worse.max()) < MARGIN, f"token {int(worse.argmax())} is another one"
        self._right.add(checked)

    def states(self, prompt: Prompt) -> torch.Tensor:
        """transformers' last hidden states [tokens, hidden size]."""
        ids, images = self._inputs(prompt)
        known = torch.tensor([ids])
        kinds = self._kinds_of(known, images)
        with torch.inference_mode():
            found: torch.Tensor = self._model.model(known, **kinds, **images).last_hidden_state
        return found[0]

    def request(self, name: str, prompt: Prompt, length: int, **options: Any) -> EngineRequest:
        """The engine's request for as many greedy tokens."""
        ids, images = self.read(prompt)
        params = greedy(length, logit_bias=dict.fromkeys(self.placeholders, -100.0), **options)
        return EngineRequest(
            request_id=name, prompt_token_ids=tuple(ids), params=params, seed=0, images=images
        )

    @property
    def placeholders(self) -> list[int]:
        form = self._form
        return [self.image_token, *(() if form.video is None else (form.video.placeholder,))]

    def _kinds_of(
        self, known: torch.Tensor, images: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Which tokens are of images, 1, and of videos, 2. GLM has one token for both."""
        kinds = (known == self.image_token).int()
        if "pixel_values_videos" in images:
            assert self._form.video is not None
            kinds[known == self._form.video.placeholder] = 2
        return dict.fromkeys(self._kinds, kinds)

    @cached_property
    def _processor(self) -> Any:
        kind: Any = transformers.AutoImageProcessor
        return kind.from_pretrained(self._folder, backend="pil")

    def _inputs(self, prompt: Prompt) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Ids with the tokens of images, and what the model reads of them."""
        form, ids = self._form, list[int]()
        for part in prompt:
            if isinstance(part, Video):
                groups, layout = self.groups(part)
                for tokens in part.after(len(groups)):
                    ids += (*layout.token_ids, *tokens)
            else:
                ids += [part] if isinstance(part, int) else form.token_ids(form.grid(*part.size))
        videos = self._videos([part for part in prompt if isinstance(part, Video)])
        images = [part for part in prompt if isinstance(part, Image.Image)]
        if not images:
            return ids, videos
        if isinstance(form, Llama4Images):  # transformers' own needs torchvision
            tiles = [torch.from_numpy(llama4_tiles(form, each)["pixel_values"]) for each in images]
            return ids, {"pixel_values": torch.cat(tiles)}
        made = self._processor(images=images, return_tensors="pt", **form.processor_options)
        return ids, {**made, **videos}

    def _videos(self, videos: Sequence[Video]) -> dict[str, torch.Tensor]:
        """What transformers' video processor makes of them, which needs torchvision: patches of
        frames after each other in time."""
        if not videos:
            return {}
        if isinstance(self._form, Gemma4Images):
            return self._frames(videos)
        grids, patches = [], []
        for one in videos:
            groups, layout = self.groups(one)
            grids.append([len(groups), *layout.grid[1:]])
            for group in groups:
                frames = [Image.open(io.BytesIO(frame)) for frame in group.frames]
                pair = [frame.resize((group.width, group.height), 3) for frame in frames]
                patches.append(self._patches([pair[0], pair[-1]]))
        return {
            "pixel_values_videos": torch.cat(patches),
            "video_grid_thw": torch.tensor(grids),
        }

    def _frames(self, videos: Sequence[Video]) -> dict[str, torch.Tensor]:
        form = self._form.video
        assert form is not None
        resized = [
            Image.open(io.BytesIO(group.frames[0])).resize((group.width, group.height), 3)
            for one in videos
            for group in self.groups(one)[0]
        ]
        made = self._processor(images=resized, return_tensors="pt", **form.processor_options)
        return {
            "pixel_values_videos": made["pixel_values"],
            "video_position_ids": made["image_position_ids"],
            "num_frames_per_video": torch.tensor([len(one.frames) for one in videos]),
        }

    def _patches(self, frames: Sequence[Image.Image]) -> torch.Tensor:
        """Patches [patches, colours x frames x height x width] of two frames, 2 x 2 patches after
        each other."""
        processor = self._processor
        side, merge = processor.patch_size, processor.merge_size
        mean, std = np.array(processor.image_mean), np.array(processor.image_std)
        pixels = np.stack([(np.asarray(frame) / 255 - mean) / std for frame in frames])
        times, high, wide, colours = pixels.shape
        shape = (high // side // merge, merge, side, wide // side // merge, merge, side)
        split = pixels.reshape(times, *shape, colours)
        ordered = split.transpose(1, 4, 2, 5, 7, 0, 3, 6)
        return torch.from_numpy(ordered.reshape(high * wide // side**2, -1).astype(np.float32))


def _key(part: int | Image.Image | Video) -> object:
    if isinstance(part, int):
        return part
    frames = part.frames if isinstance(part, Video) else (part,)
    return type(part), tuple((frame.size, frame.tobytes()) for frame in frames)


def png(image: Image.Image) -> bytes:
    """An encoded picture."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def text(seed: int, length: int) -> Iterator[int]:
    """Random ids of tokens that are none of the special ones."""
    return iter(np.random.default_rng(seed).integers(3, 250, length).tolist())
