"""What outputs must match: what no engine could compile is refused here, before it is queued."""

import asyncio

from starlette.requests import Request

from headrace_common.errors import FailureCode, RequestFailed
from headrace_common.grammar_checks import GrammarChecks, GrammarsBusy
from headrace_common.structured import StructuredOutputError, StructuredOutputsParams

from .errors import RETRY_SOON_S, ApiError, unavailable
from .structured_fields import refused
from .watched import disconnected

BUSY = "grammars_busy"


class Constraints:
    def __init__(self, checks: GrammarChecks) -> None:
        self._checks = checks

    async def check(
        self,
        structured: StructuredOutputsParams,
        field: str | None,
        tenant: str,
        request: Request,
    ) -> None:
        """`field` is the request's, for the message. Ends when the client goes. Raises ApiError."""
        if self._checks.known(structured):
            return
        checking = asyncio.create_task(self._checks.check(structured, tenant))
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            await asyncio.wait({checking, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not checking.done():
                raise RequestFailed(FailureCode.CANCELLED, "The client has gone.")
            checking.result()
        except StructuredOutputError as error:
            raise refused(field or f"structured_outputs.{error.field}", error) from error
        except GrammarsBusy as busy:
            raise _busy(busy) from busy
        finally:
            checking.cancel()
            gone.cancel()


def _busy(busy: GrammarsBusy) -> ApiError:
    message = f"{str(busy).capitalize()}; send it again."
    if busy.tenant:
        return ApiError(429, message, kind="rate_limit_error", code=BUSY, retry_after=RETRY_SOON_S)
    return unavailable(message, code=BUSY)
