"""The documentation site: it builds without a warning, loads nothing from other sites, and its
generated pages match the code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_common.observability.metric_names import (
    ENGINE_METRICS,
    GATEWAY_METRICS,
    OPERATOR_METRICS,
)
from headrace_testing.docs_site import links_to_source, outside_links
from headrace_testing.pages.reference import DOCS, ROOT, pages

LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=[\"'](?:https?:)?//[^\"']*")

# The theme would advertise its successor on standard error.
_QUIET = {"NO_MKDOCS_2_WARNING": "1"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | _QUIET, check=False
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        assert (site / page.relative_to(DOCS).parent / name).is_file(), page


def test_pages_load_nothing_from_other_sites(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = [tag for tag in LOADED.findall(page.read_text()) if 'rel="canonical"' not in tag]
        assert loaded == [], page


def test_links_out_of_the_documents_lead_to_files() -> None:
    for page in DOCS.rglob("*.md"):
        assert [file for file in outside_links(page, DOCS) if not file.exists()] == [], page


@pytest.mark.parametrize(
    ("source_url", "expected"),
    [
        ("", "See `a.py` and [memory](../memory.md)."),
        (
            "https://git.example.com/blob/main/",
            "See [`a.py`](https://git.example.com/blob/main/engine/a.py#L3) "
            "and [memory](../memory.md).",
        ),
    ],
)
def test_links_to_source_lead_to_the_named_place_or_are_only_text(
    source_url: str, expected: str
) -> None:
    text = "See [`a.py`](../../engine/a.py#L3) and [memory](../memory.md)."
    assert links_to_source(text, "decisions/1.md", source_url) == expected


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_generated_pages_match_the_code(page: Path) -> None:
    assert page.read_text() == pages()[page], "`make generated` writes it anew"


def test_the_reference_has_every_metric() -> None:
    text = (DOCS / "metrics.md").read_text()
    for metric in (*GATEWAY_METRICS, *ENGINE_METRICS, *OPERATOR_METRICS):
        assert f"| `{metric.prometheus_name}` |" in text
