"""The lock files in requirements/: every package of an image or of the checkout, with its hashes.

`python -m headrace_testing.locks gateway` prints the packages in that image, without markers.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = ROOT / "requirements"
IMAGES = ("gateway", "operator", "engine")
LOCKS = (*IMAGES, "up", "dev", "flash-attn", "build", "tools", "uv")
# The environment of the images, on whatever machine this runs.
IMAGE_ENVIRONMENT = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.11.9",
    "python_version": "3.11",
    "sys_platform": "linux",
}


@dataclass(frozen=True, slots=True)
class Pin:
    """One package of a lock. `applies` is whether it is in images for x86-64."""

    name: str
    version: str
    hashes: tuple[str, ...]
    applies: bool


def pins(lock: str) -> dict[str, Pin]:
    """Pinned versions by canonical name. Raises ValueError for a line that does not pin exactly."""
    text = (REQUIREMENTS / f"{lock}.txt").read_text()
    lines = re.sub(r"\\\n", " ", re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    found = [_pin(line) for line in lines if line.strip()]
    return {pin.name: pin for pin in found}


def _pin(line: str) -> Pin:
    declared, *hashes = re.split(r"\s+--hash=", line.strip())
    needed = Requirement(declared)
    exact = re.fullmatch(r"==([^,*]+)", str(needed.specifier))
    if exact is None:
        raise ValueError(f"not an exact version: {declared}")
    applies = needed.marker is None or needed.marker.evaluate(IMAGE_ENVIRONMENT)
    return Pin(canonicalize_name(needed.name), exact[1], tuple(hashes), applies)


def main(image: str) -> None:
    for pin in pins(image).values():
        if pin.applies:
            hashes = "".join(f" --hash={digest}" for digest in pin.hashes)
            sys.stdout.write(f"{pin.name}=={pin.version}{hashes}\n")


if __name__ == "__main__":
    main(sys.argv[1])
