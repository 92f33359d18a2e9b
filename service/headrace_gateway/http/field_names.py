"""The names that each API has for fields in the errors of shared code.

Shared code names a chat's fields. Here errors get the names that their client knows.
"""

import re
from collections.abc import Mapping

from ..errors import ApiError

_NAMES: Mapping[str, Mapping[str, str]] = {
    "/v1/completions": {"messages": "prompt"},
    "/v1/responses": {"messages": "input", "max_tokens": "max_output_tokens"},
    "/v1/messages": {"stop": "stop_sequences"},
}
# These name a field as the client itself sent it.
_OF_THE_BODY = frozenset({"unknown_parameter", "unsupported_parameter"})


def named_for(path: str, error: ApiError) -> ApiError:
    """Returns the error in the words of the API at this path."""
    names = _NAMES.get(path)
    if names is None or error.code in _OF_THE_BODY:
        return error
    message = error.message
    for shared, own in names.items():
        message = re.sub(rf"^{shared}(?=:)", own, message)
        if "_" in shared:  # not a word of plain English
            message = re.sub(rf"\b{shared}\b", own, message)
    if error.param not in names and message == error.message:
        return error
    return error.renamed(message, names.get(error.param or "", error.param))
