"""A hook of mkdocs: links from a page to files outside of docs/, which the site does not have.

With HEADRACE_SOURCE_URL, such as https://git.example.com/headrace/blob/main, the links point there;
without it only their text stays.
"""

import os
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Protocol

_LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>\.\./[^)\s]+)\)")


class File(Protocol):
    """The part of mkdocs' File that is read here. It has the page's path below docs/."""

    src_uri: str


class Page(Protocol):
    """The part of mkdocs' Page that is read here."""

    file: File


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Returns the page's text with links that the site can follow."""
    return links_to_source(markdown, page.file.src_uri, os.environ.get("HEADRACE_SOURCE_URL", ""))


def links_to_source(markdown: str, page: str, source_url: str) -> str:
    """Makes links point to the source. `page` is the page's path below docs/."""

    def changed(link: re.Match[str]) -> str:
        file, _, line = link["target"].partition("#")
        path = PurePosixPath(normpath(PurePosixPath("docs", page).parent / file))
        if path.is_relative_to("docs"):
            return link[0]
        if not source_url:
            return link["text"]
        return f"[{link['text']}]({source_url.rstrip('/')}/{path}{'#' if line else ''}{line})"

    return _LINK.sub(changed, markdown)


def outside_links(page: Path, docs: Path) -> list[Path]:
    """The files outside of docs/ to which a page links."""
    targets = (link["target"].partition("#")[0] for link in _LINK.finditer(page.read_text()))
    files = [(page.parent / target).resolve() for target in targets]
    return [file for file in files if not file.is_relative_to(docs)]
