"""CORS: the web pages of other origins that may send requests from a browser, and the headers that
they may read."""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

METHODS = ("GET", "POST", "DELETE")
# Headers that clients act on, besides those that every page may read.
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
    """Allows pages of these origins, with any header; API keys are headers, never cookies."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=("*",),
        expose_headers=READABLE,
        max_age=PREFLIGHT_KEPT_S,
    )
