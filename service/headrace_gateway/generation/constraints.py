"""Checks the constraints on outputs: refuses those that no engine can compile, before they are
queued."""

import asyncio

from starlette.requests import Request

from headrace_common.errors import FailureCode, RequestFailed
from headrace_common.structured.grammar_checks import GrammarChecks, GrammarsBusy
from headrace_common.structured.structured import StructuredOutputError, StructuredOutputsParams

from ..errors import busy
from ..schemas.structured_fields import refused
from ..streaming.disconnecting_response import disconnected

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
        """Raises ApiError, which names `field`. Stops when the client leaves."""
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
        except GrammarsBusy as error:
            message = f"{str(error).capitalize()}; send it again."
            raise busy(message, code=BUSY, of_tenant=error.tenant) from error
        finally:
            checking.cancel()
            gone.cancel()
