"""Which web pages of other origins may ask from a browser, and what they may read (CORS)."""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

METHODS = ("GET", "POST", "DELETE")
# What clients act on, beside what every page may read.
READABLE = (
    "content-location",
    "location",
    "retry-after",
    "retry-after-ms",
    "x-request-id",
    "x-should-retry",
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)
PREFLIGHT_KEPT_S = 600


def add_cross_origin(app: FastAPI, origins: Sequence[str]) -> None:
    """Lets pages of these origins ask, with any header; API keys are headers, never cookies."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=("*",),
        expose_headers=READABLE,
        max_age=PREFLIGHT_KEPT_S,
    )
