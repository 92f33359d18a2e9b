"""Requirements of tests: a test whose requirement is missing is skipped, but in CI it fails."""

import os
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skips the running test, or fails it in CI. `what` names it and the remedy, as in "prometheus:
    make ..."."""
    if os.environ.get("CI"):
        pytest.fail(f"no {what} (CI must have it)")
    pytest.skip(f"no {what}")
