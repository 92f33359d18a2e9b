"""The pictures of the vision demo model: coloured shapes, or a number. A seed fixes a picture.

`python demo/drawings.py shapes.png` draws one and prints what is in it.
"""

import argparse
import io
import math
import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from turns import spoken

RGB = tuple[int, int, int]
# Each has a colour that is varied a little.
COLOURS: dict[str, RGB] = {
    "red": (215, 40, 40),
    "yellow": (240, 205, 30),
    "green": (45, 155, 65),
    "blue": (45, 85, 215),
    "black": (25, 25, 25),
}
KINDS = ("circle", "square", "triangle")
COUNTS = ("no", "one", "two", "three", "four")
NAMES = (*(f"{colour} {kind}" for kind in KINDS for colour in COLOURS), *"0123456789")
MOST_SHAPES, MOST_GROUPS, MOST_DIGITS = 4, 2, 2
NUMBERS = 0.4  # share of the pictures with a number
SIDES = (96, 96, 96, 192)  # of a picture, in pixels
_RADII = (0.1, 0.19)  # of a shape, as a share of the shorter side
_TRIES = 40  # places that are tried for a shape before it is made smaller
_JPEG = 0.25  # share of the pictures that were compressed


@dataclass(frozen=True, slots=True)
class Group:
    """Shapes of one kind and colour."""

    count: int
    colour: str
    kind: str

    def __str__(self) -> str:
        """Such as `a blue square` or `three red circles`."""
        number = "a" if self.count == 1 else COUNTS[self.count]
        return f"{number} {self.colour} {named(self.kind, self.count)}"


@dataclass(frozen=True, slots=True)
class Picture:
    """An image in RGB and what is in it: groups of shapes in the order of KINDS and COLOURS, or
    the digits of a number. `centres` are those of its shapes or digits as shares of width and
    height, each with its index in NAMES."""

    image: Image.Image
    centres: tuple[tuple[float, float, int], ...]
    groups: tuple[Group, ...] = ()
    digits: str = ""

    def __str__(self) -> str:
        return f"the number {self.digits}" if self.digits else spoken(self.groups)


def named(kind: str, count: int) -> str:
    """The name of a kind for so many shapes of it."""
    return kind if count == 1 else f"{kind}s"


def draw(rng: random.Random) -> Picture:
    """A picture with a number or with shapes."""
    return draw_number(rng) if rng.random() < NUMBERS else draw_shapes(rng)


def draw_shapes(rng: random.Random, groups: tuple[Group, ...] = ()) -> Picture:
    """A picture of these groups; of random ones if there are none."""
    groups = groups or _groups(rng)
    image = _ground(rng)
    pen = ImageDraw.Draw(image)
    shapes = [group for group in groups for _ in range(group.count)]
    centres = []
    for group, (x, y, radius) in zip(shapes, _places(rng, len(shapes), image.size), strict=True):
        name = NAMES.index(f"{group.colour} {group.kind}")
        centres.append((x / image.width, y / image.height, name))
        colour = _varied(rng, COLOURS[group.colour], 18)
        if group.kind == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        else:
            pen.polygon(_corners(rng, group.kind, x, y, radius), fill=colour)
    return Picture(_worn(rng, image), tuple(centres), groups=groups)


def draw_number(rng: random.Random, digits: str = "") -> Picture:
    """A picture of these digits; of a random number if there are none."""
    digits = digits or str(rng.randrange(10 ** rng.randint(1, MOST_DIGITS)))
    image = _ground(rng)
    font = ImageFont.load_default(64)
    left, top, right, bottom = font.getbbox(digits, stroke_width=2)
    text = Image.new("L", (math.ceil(right - left) + 8, math.ceil(bottom - top) + 8))
    ImageDraw.Draw(text).text(
        (4 - left, 4 - top), digits, fill=255, font=font, stroke_width=rng.choice((0, 0, 1, 2))
    )
    text = text.rotate(rng.uniform(-6, 6), Image.Resampling.BILINEAR, expand=True)
    # At least as high as can be read, at most as fits.
    fits = min(image.width * 0.94 / text.width, image.height * 0.94 / text.height)
    scale = fits * rng.uniform(0.6 if len(digits) < MOST_DIGITS else 0.75, 1)
    wide = max(1, round(text.width * scale * rng.uniform(0.85, 1)))
    text = text.resize((wide, max(1, round(text.height * scale))), Image.Resampling.LANCZOS)
    place = (rng.randint(0, image.width - text.width), rng.randint(0, image.height - text.height))
    colour = _varied(rng, COLOURS[rng.choice([*COLOURS, "black", "black"])], 18)
    if colour[0] + colour[1] > 400:  # yellow on white can hardly be read
        colour = COLOURS["black"]
    image.paste(Image.new("RGB", text.size, colour), place, text)
    middle = (place[1] + text.height / 2) / image.height
    centres = [
        ((place[0] + text.width * (at + 0.5) / len(digits)) / image.width, middle, NAMES.index(one))
        for at, one in enumerate(digits)
    ]
    return Picture(_worn(rng, image), tuple(centres), digits=digits)


def _groups(rng: random.Random) -> tuple[Group, ...]:
    count = rng.randint(1, MOST_GROUPS)
    pairs = [(kind, colour) for kind in KINDS for colour in COLOURS]
    chosen = sorted(rng.sample(pairs, count), key=pairs.index)
    counts = [1] * count
    for _ in range(rng.randint(0, MOST_SHAPES - count)):
        counts[rng.randrange(count)] += 1
    return tuple(Group(n, c, k) for n, (k, c) in zip(counts, chosen, strict=True))


def _ground(rng: random.Random) -> Image.Image:
    side = rng.choice(SIDES)
    other = round(side * rng.uniform(0.75, 1)) if rng.random() < 0.3 else side
    size = (side, other) if rng.random() < 0.5 else (other, side)
    grey = rng.randint(225, 255)
    return Image.new("RGB", size, _varied(rng, (grey, grey, grey), 8))


def _varied(rng: random.Random, colour: RGB, most: int) -> RGB:
    red, green, blue = (max(0, min(255, part + rng.randint(-most, most))) for part in colour)
    return red, green, blue


def _places(
    rng: random.Random, count: int, size: tuple[int, int]
) -> list[tuple[float, float, float]]:
    """Centres and radii of shapes that do not touch."""
    found: list[tuple[float, float, float]] = []
    smallest, largest = (share * min(size) for share in _RADII)
    tries = 0
    while len(found) < count:
        tries += 1
        if tries > _TRIES:  # start again, with smaller shapes
            found, tries, largest = [], 0, max(smallest, largest * 0.85)
        radius = rng.uniform(smallest, largest)
        x = rng.uniform(radius + 1, size[0] - radius - 1)
        y = rng.uniform(radius + 1, size[1] - radius - 1)
        if all(math.hypot(x - a, y - b) > (radius + r) * 1.1 for a, b, r in found):
            found.append((x, y, radius))
    rng.shuffle(found)
    return found


def _corners(
    rng: random.Random, kind: str, x: float, y: float, radius: float
) -> list[tuple[float, float]]:
    count, first = {"square": (4, 45.0), "triangle": (3, -90.0)}[kind]
    turned = first + rng.uniform(-12, 12)
    return [
        (
            x + radius * math.cos(math.radians(turned + 360 * at / count)),
            y + radius * math.sin(math.radians(turned + 360 * at / count)),
        )
        for at in range(count)
    ]


def _worn(rng: random.Random, image: Image.Image) -> Image.Image:
    """The image as it is, or as JPEG has left it."""
    if rng.random() >= _JPEG:
        return image
    file = io.BytesIO()
    image.save(file, "JPEG", quality=rng.randint(60, 95))
    return Image.open(file).convert("RGB")


def main() -> None:
    """Draw a picture and print what is in it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", action="store_true", help="a number instead of shapes")
    arguments = parser.parse_args()
    rng = random.Random(f"drawn {arguments.seed}")
    picture = (draw_number if arguments.number else draw_shapes)(rng)
    picture.image.save(arguments.out)
    print(picture)


if __name__ == "__main__":
    main()
