"""Images and videos of SmolVLM: images are those of Idefics 3; frames of videos are images that are
not split, each after its time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from ..wire.images import Grid
from .family import FamilyFiles
from .idefics3 import WHOLE, Idefics3Images
from .layout import VideoFormat, clock

_BELOW_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolVLMVideo(VideoFormat):
    """Videos of SmolVLM, whose frames are images as `frames` are. The image processor resizes them.

    Published templates leave out videos. `written` is a token that no template writes alone.
    """

    placeholder: int
    frames: Idefics3Images
    written: str = WHOLE
    group: int = 1

    @property
    def shown(self) -> bool:
        return False

    @property
    def processor_options(self) -> Mapping[str, Any]:
        return {"do_image_splitting": False, "size": {"longest_edge": self.frames.longest}}

    def text(self, frames: int, fps: float) -> str:
        duration = timedelta(seconds=int(frames / fps))
        shown = "".join(f"\nFrame from {clock(each / fps)}:<image>" for each in range(frames))
        return (
            f"You are provided the following series of {in_words(frames)} frames from a {duration} "
            f"[H:MM:SS] video.\n{shown}\n\n"
        )

    def resized(self, frames: int, width: int, height: int) -> tuple[int, int]:
        return width, height

    def grid(self, width: int, height: int) -> Grid:
        return self.frames.grid(width, height)

    def token_ids(self, grid: Grid) -> Sequence[int]:
        return self.frames.token_ids(grid)


def smolvlm_images(files: FamilyFiles) -> Idefics3Images | None:
    """How SmolVLM reads images and videos; None if there is no placeholder."""
    images = Idefics3Images.from_files(files)
    processor = files.video_processor or files.image_processor
    if images is None or not (files.video_processor or processor.get("video_sampling")):
        return images
    size = processor.get("size") or processor["video_sampling"]["video_size"]
    frames = replace(images, longest=int(size["longest_edge"]), split=False)
    return replace(images, video=SmolVLMVideo(placeholder=images.placeholder, frames=frames))


def in_words(number: int) -> str:
    """A number below a million in English, as the package num2words writes it."""
    if number < 20:
        return _BELOW_TWENTY[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return _TENS[tens] + (f"-{_BELOW_TWENTY[rest]}" if rest else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    count, rest = divmod(number, unit)
    words = f"{in_words(count)} {name}"
    if not rest:
        return words
    return words + (" and " if rest < 100 else ", ") + in_words(rest)
