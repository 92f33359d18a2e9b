"""Reads the debug pages of a running engine and shows them as tables or JSON."""

import json
import urllib.error
import urllib.request
from datetime import UTC, datetime
from typing import Any

from .errors import CliError
from .sockets import FIRST_METRICS_PORT
from .tables import Output, plain_table

DEFAULT_URL = f"http://127.0.0.1:{FIRST_METRICS_PORT}"
TIMEOUT_S = 10.0


class EngineInside:
    """The debug pages at an engine's metrics port `url`. Raises CliError without an answer."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise CliError(f"--url must begin with http:// or https://, not {url!r}")
        self.url = url.rstrip("/")

    def steps(self) -> dict[str, Any]:
        return self._json("/debug/steps")

    def requests(self) -> dict[str, Any]:
        return self._json("/debug/requests")

    def profile(self, steps: int, timeout: int) -> bytes:
        path = f"/debug/profile?steps={steps}&timeout={timeout}"
        return self._ask(path, "POST", timeout + TIMEOUT_S)

    def _json(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._ask(path, "GET", TIMEOUT_S))
        return found

    def _ask(self, path: str, method: str, timeout: float) -> bytes:
        request = urllib.request.Request(self.url + path, method=method)  # noqa: S310  http only
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            with error:
                raise CliError(_reason(error.code, error.read())) from error
        except OSError as error:
            raise CliError(
                f"no engine answers at {self.url} ({error}): give its metrics port with --url"
            ) from error


def _reason(status: int, body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        error = None
    if isinstance(error, str):
        return error
    return (
        f"this is not an engine's metrics port, or one without debug pages (status {status}): give "
        "the port with --url, and start the engine with --debug-pages "
        "(HEADRACE_ENGINE_DEBUG_PAGES=true)"
    )


def show_steps(engine: EngineInside, output: Output, last: int) -> None:
    found = engine.steps()
    found["last"] = found["last"][-last:]
    table = plain_table(
        "step", "ended", "ms", "prefill", "decode", "running", "waiting", "swapped", "blocks used",
        "cached", "free", "waste",
    )  # fmt: skip
    for one in found["last"]:
        ended = datetime.fromtimestamp(one["ended"], UTC).astimezone()
        table.add_row(
            str(one["step"]), f"{ended:%H:%M:%S.%f}"[:-3], f"{one['seconds'] * 1e3:.1f}",
            str(one["prefill_tokens"]), str(one["decode_tokens"]), str(one["running"]),
            str(one["waiting"]), str(one["swapped"]), str(one["blocks_used"]),
            str(one["blocks_cached"]), str(one["blocks_free"]), f"{one['kv_waste']:.1%}",
        )  # fmt: skip
    output.show(found, table)
    if found["stalled_for"] > 1.0 and not output.as_json:
        output.out.print(f"the present step has run for {found['stalled_for']:.1f} s", markup=False)


def show_requests(engine: EngineInside, output: Output) -> None:
    found = engine.requests()
    table = plain_table(
        "request", "choice", "state", "tenant", "prompt", "output", "computed", "blocks", "attempt",
        "no output for",
    )  # fmt: skip
    for request in found["requests"]:
        for one in request["sequences"] or [{}]:
            choice = one.get("choice", 0)
            table.add_row(
                request["request_id"], str(choice), one.get("state", "not started"),
                request["tenant"], str(request["prompt_tokens"]),
                str(request["output_tokens"][choice]), str(one.get("computed", 0)),
                str(one.get("blocks", 0)), str(request["attempt"]),
                f"{request['unmoved_for']:.1f} s",
            )  # fmt: skip
    output.show(found, table)
