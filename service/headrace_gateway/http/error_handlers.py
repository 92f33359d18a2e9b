"""Turns every exception of the application into the error that its client reads, in its API's
form."""

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from headrace_common.errors import HeadraceError
from headrace_common.sampling.params import SamplingError

from ..anthropic.errors import body_at, named_at
from ..errors import REQUEST_NAME, ApiError, internal_error, invalid, to_api_error
from .field_names import named_for

METHODS = ("GET", "HEAD", "POST", "DELETE")
_API = "the API is under /v1, as /v1/models and /v1/chat/completions; /openapi.json describes it."
_ELSEWHERE = {
    "/metrics": "metrics are on a port of their own (--metrics-port).",
    **dict.fromkeys(("/", "/v1", "/v1/", "/redoc"), _API),
}
# Paths that other servers have.
_ABSENT = ("audio", "images", "moderations", "pooling", "realtime", "rerank", "score", "videos")


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error_response(request, error)

    @app.exception_handler(HeadraceError)
    @app.exception_handler(SamplingError)
    async def failure(request: Request, error: HeadraceError | SamplingError) -> JSONResponse:
        return error_response(request, to_api_error(error))

    @app.exception_handler(RequestValidationError)
    async def parameter_error(request: Request, error: RequestValidationError) -> JSONResponse:
        fault = error.errors()[0]
        name = str(fault["loc"][-1])
        return error_response(request, invalid(f"{name}: {fault['msg']}.", param=name))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return error_response(request, _from_http(request, error))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        # Starlette logs the traceback after this answer is sent, and the server then closes the
        # connection.
        return error_response(request, internal_error(headers={"connection": "close"}))


def error_response(request: Request, error: ApiError) -> JSONResponse:
    """Returns the answer to a request that failed."""
    scope, name = request.scope, request.scope["state"].get(REQUEST_NAME)
    error = named_for(scope["path"], error)
    headers = error.headers if name is None else {**error.headers, **named_at(scope, name)}
    return JSONResponse(body_at(scope, error), error.status, headers=headers)


def _from_http(request: Request, error: HTTPException) -> ApiError:
    message = str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"Invalid URL ({request.method} {request.url.path[:200]}){_hint(request)}"
    headers = error.headers
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"Not allowed to {request.method} on {request.url.path[:200]}."
        headers = {"allow": ", ".join(_allowed(request))}
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return ApiError(error.status_code, message, code=code, headers=headers)


def _hint(request: Request) -> str:
    """Returns a hint if the client's base URL is likely wrong, or the path is another server's."""
    path = request.url.path
    if elsewhere := _ELSEWHERE.get(path):
        return f": {elsewhere}"
    if absent := next((name for name in path.split("/")[1:3] if name in _ABSENT), None):
        return f": {absent} is not served; text and embeddings are."
    bare = path.rstrip("/")
    for meant in (bare, f"/v1{bare}", bare.removeprefix("/v1")):
        if meant != path and _methods(request, meant):
            return (
                f": it is {meant[:200]}. Base URLs of OpenAI's clients end with /v1, those of "
                "Anthropic's do not."
            )
    return ""


def _allowed(request: Request) -> list[str]:
    """Returns every method of a path; the framework lists only those of one function."""
    return _methods(request, request.url.path)


def _methods(request: Request, path: str) -> list[str]:
    return [
        method
        for method in METHODS
        if any(
            route.matches({**request.scope, "path": path, "method": method})[0] is Match.FULL
            for route in request.app.routes
        )
    ]
