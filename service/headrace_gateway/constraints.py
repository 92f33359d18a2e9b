"""Whether what outputs must match can be compiled at all: refused here instead of by an engine.

The work is bounded, and done in threads; what was found good lately is not looked at again.
"""

import asyncio
from collections import OrderedDict
from concurrent.futures import Executor

from headrace_common.grammars import GrammarChecker
from headrace_common.structured import StructuredOutputError, StructuredOutputsParams

from .structured_fields import refused

KEPT = 256


class Constraints:
    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._checker = GrammarChecker()
        self._good: OrderedDict[StructuredOutputsParams, None] = OrderedDict()

    async def check(self, structured: StructuredOutputsParams | None, field: str | None) -> None:
        """`field` is the request's, for the message. Raises ApiError."""
        if structured is None or structured in self._good:
            return
        running_loop = asyncio.get_running_loop()
        try:
            await running_loop.run_in_executor(self._executor, self._checker.check, structured)
        except StructuredOutputError as error:
            raise refused(field or f"structured_outputs.{error.field}", error) from error
        self._good[structured] = None
        while len(self._good) > KEPT:
            self._good.popitem(last=False)
