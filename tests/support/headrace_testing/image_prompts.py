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
from headrace_common.images.idefics3 import Idefics3Images
from headrace_common.images.layout import ImageFormat, ImageLayout, PromptTokens, expand
from headrace_common.images.llama4 import Llama4Images
from headrace_common.images.llava_onevision import LlavaOnevisionImages, LlavaOnevisionVideo
from headrace_common.images.video import Qwen2Video
from headrace_common.wire.images import image_digest
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.core.images import PromptImage
from headrace_engine.core.request import EngineRequest
from headrace_engine.models.vision.image_reader import ImageReader, read_format
from headrace_engine.models.vision.llama4_tiles import llama4_tiles

from .checkpoints import MARGIN, save_checkpoint
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
    """Frames of one size, of which `fps` are a second, and the tokens after each group of them."""

    frames: tuple[Image.Image, ...]
    between: tuple[tuple[int, ...], ...] = ()
    fps: float = 1.0

    def after(self, form: ImageFormat, groups: int) -> tuple[tuple[int, ...], ...]:
        """Families without texts between groups have none."""
        assert form.video is not None
        joined = form.video.ended or form.video.times(groups, self.fps) is not None
        return self.between or (() if joined else _BETWEEN,) * groups


# Ids of tokens, images and videos.
Prompt = Sequence[int | Image.Image | Video]


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A random picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def video(frames: int, width: int, height: int, seed: int = 0, fps: float = 1.0) -> Video:
    return Video(tuple(noise(width, height, seed + number) for number in range(frames)), fps=fps)


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
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
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
                groups = self.groups(part)
                for tokens in part.after(self._form, len(groups)):
                    short += (NO_TEXT, *tokens)
                data = [(group.encode(), layout) for group, layout in groups]
            else:
                short.append(NO_TEXT)
                data = [(png(part), self._form.layout(*part.size))]
            encoded += [each for each, _ in data]
            found += [(image_digest(each, b""), layout) for each, layout in data]
        ids, spans = expand({NO_TEXT}, short, found)
        pixels = [self._reader.decode(*pair) for pair in zip(spans, encoded, strict=True)]
        return ids, self._reader.place(spans, pixels)

    def groups(self, video: Video) -> list[tuple[FrameGroup[bytes], ImageLayout]]:
        assert self._form.video is not None
        frames = list(map(png, video.frames))
        return group_frames(self._form.video, frames, video.fps, *video.frames[0].size)

    @cached_property
    def _form(self) -> ImageFormat:
        tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        tokens = PromptTokens(tokenizer.token_to_id, lambda text: tokenizer.encode(text).ids)
        form = read_format(load_checkpoint(str(self._folder)), tokens)
        assert form is not None
        return form

    @cached_property
    def _reader(self) -> ImageReader:
        form = read_format(load_checkpoint(str(self._folder)))  # without a tokenizer, as engines
        assert form is not None
        return ImageReader(self._folder, form)


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
        kinds = self._kinds_of(known, images)
        with torch.inference_mode():
            found = self._model(known, **kinds, **images, **self._places(known, prompt)).logits[0]
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
                groups = self.groups(part)
                after = part.after(form, len(groups))
                for (_, layout), tokens in zip(groups, after, strict=True):
                    ids += (*layout.token_ids, *tokens)
            else:
                ids += [part] if isinstance(part, int) else form.token_ids(form.grid(*part.size))
        if isinstance(form, Idefics3Images) and form.video is not None:
            return ids, self._squared([part for part in prompt if not isinstance(part, int)])
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
        if isinstance(self._form, LlavaOnevisionImages):
            return self._squares(videos)
        grids, patches = [], []
        for one in videos:
            groups = self.groups(one)
            grids.append([len(groups), *groups[0][1].grid[1:]])
            for group, _ in groups:
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
            for group, _ in self.groups(one)
        ]
        made = self._processor(images=resized, return_tensors="pt", **form.processor_options)
        return {
            "pixel_values_videos": made["pixel_values"],
            "video_position_ids": made["image_position_ids"],
            "num_frames_per_video": torch.tensor([len(one.frames) for one in videos]),
        }

    def _squares(self, videos: Sequence[Video]) -> dict[str, torch.Tensor]:
        """Squares of the frames, for LLaVA-OneVision. Its videos have equal numbers of frames."""
        processor, form = self._processor, self._form.video
        assert isinstance(form, LlavaOnevisionVideo)
        mean, std = (
            np.array(value)[:, None, None] for value in (processor.image_mean, processor.image_std)
        )
        squares = [
            [np.asarray(frame.resize((form.tile, form.tile), 3)) for frame in one.frames]
            for one in videos
        ]
        pixels = np.array(squares).transpose(0, 1, 4, 2, 3) / 255
        return {"pixel_values_videos": torch.from_numpy((pixels - mean) / std).float()}

    def _squared(self, shown: Sequence[Image.Image | Video]) -> dict[str, torch.Tensor]:
        """Squares of images, and frames as images that are not split, for SmolVLM, in order."""
        made = [
            self._processor(images=[[part]], return_tensors="pt")
            if isinstance(part, Image.Image)
            else self._processor(
                images=[part.frames], return_tensors="pt", do_image_splitting=False
            )
            for part in shown
        ]
        names = ("pixel_values", "pixel_attention_mask") if made else ()
        return {name: torch.cat([each[name] for each in made], dim=1) for name in names}

    def _places(self, known: torch.Tensor, prompt: Prompt) -> dict[str, torch.Tensor]:
        """Positions [3, 1, tokens] of prompts with videos of Qwen2-VL and Qwen2.5-VL, as in
        training and in transformers before 5: text goes on after the largest position. Later
        versions give it positions that the video has, too, and go on right in decodes alone:
        https://arxiv.org/abs/2409.12191, section 2.1."""
        form = self._form.video
        if not isinstance(form, Qwen2Video) or not any(isinstance(one, Video) for one in prompt):
            return {}
        found: list[torch.Tensor] = []
        for part in prompt:
            after = int(found[-1].max()) + 1 if found else 0
            if isinstance(part, int):
                found.append(torch.full((3, 1), after))
                continue
            seconds: float | None = None
            if isinstance(part, Video):
                layouts = [layout for _, layout in self.groups(part)]
                grid = (len(layouts), *layouts[0].grid[1:])
                seconds = form.group / part.fps
            else:
                grid = self._form.grid(*part.size)
            each = getattr(self._model.config.vision_config, "tokens_per_second", None)
            step = 1 if seconds is None or each is None else each * torch.tensor(seconds)
            found.append(
                self._model.model.get_vision_position_ids(
                    after, torch.tensor(grid), 1, form.merge, step
                )
            )
        prompted = torch.cat(found, dim=1)
        rest = known.shape[1] - prompted.shape[1]
        more = torch.arange(rest).expand(3, -1) + int(prompted.max()) + 1
        return {"position_ids": torch.cat([prompted, more], dim=1)[:, None]}

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
