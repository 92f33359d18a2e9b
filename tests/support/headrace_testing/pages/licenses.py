"""docs/licenses.md: the licence of every Python package that an image ships.

`make generated` writes it on Linux, from the metadata of the packages installed here.
"""

import re
from importlib.metadata import PackageMetadata, PackageNotFoundError, metadata

from ..locks import IMAGES, ROOT, pins

PAGE = ROOT / "docs" / "licenses.md"
LONGEST = 80  # a longer text is the whole licence, not its name
HEAD = """# Licences

Every Python package that the images ship beside Headrace itself, in the versions of
[requirements](../requirements), with the licence that it declares. Written by `make generated`;
a test keeps it up to date and refuses packages that are under the GPL or AGPL alone. The images'
base has Debian's packages and Python, with their licences in `/usr/share/doc`.

NVIDIA's packages (CUDA) are proprietary and come with torch: read their terms before you publish an
engine's image.

| package | version | licence | images |
| --- | --- | --- | --- |
"""


def packages() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Version and images of each package that an image for x86-64 ships."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for image in IMAGES:
        for name, pin in pins(image).items():
            if pin.applies:
                _, images = found.get(name, ("", ()))
                found[name] = (pin.version, (*images, image))
    return dict(sorted(found.items()))


def licence(name: str) -> str | None:
    """The licence that an installed package declares; None if it is not installed here."""
    try:
        declared = metadata(name)
    except PackageNotFoundError:
        return None
    return _licence(declared)


def _licence(declared: PackageMetadata) -> str:
    for expression in declared.get_all("License-Expression") or ():
        return str(expression)
    classifiers = [
        text.rsplit(" :: ", 1)[-1]
        for text in declared.get_all("Classifier") or ()
        if text.startswith("License :: ") and text != "License :: OSI Approved"
    ]
    if classifiers:
        return ", ".join(sorted(classifiers))
    text = " ".join(" ".join(declared.get_all("License") or ()).split())
    return text if 0 < len(text) <= LONGEST else "not declared"


def rows() -> dict[str, str]:
    """The table's lines by package, of the packages installed here."""
    return {
        name: f"| {name} | {version} | {found} | {', '.join(images)} |"
        for name, (version, images) in packages().items()
        if (found := licence(name)) is not None
    }


def is_gpl_only(found: str) -> bool:
    """GPL or AGPL, without a choice of another licence or an exception. The LGPL is neither."""
    if " OR " in found:
        return False
    return bool(re.search(r"\bA?GPL(?!\S* WITH )|GNU (Affero )?General Public", found))


def main() -> None:
    PAGE.write_text(HEAD + "\n".join(rows().values()) + "\n")


if __name__ == "__main__":
    main()
