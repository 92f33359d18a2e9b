"""When a request must have ended: after a number of seconds, or at a point in time.

The latter is for callers that pass on a deadline of their own, however long their queues and
retries took.
"""

from collections.abc import Mapping
from datetime import datetime

from headrace_common.errors import FailureCode, RequestFailed

from ..errors import ApiError, invalid

TIMEOUT_HEADER = "x-request-timeout"
DEADLINE_HEADER = "x-request-deadline"
MAX_CHARS = 40


def seconds_left(
    headers: Mapping[str, str], *, now: float, default: float, longest: float
) -> float:
    """Returns the seconds until the earlier of both headers' times; `now` in Unix seconds.

    Raises ApiError for a time that is wrong, RequestFailed for one that has passed.
    """
    times: list[float] = []
    if TIMEOUT_HEADER in headers:
        times.append(_timeout(headers[TIMEOUT_HEADER], longest))
    if DEADLINE_HEADER in headers:
        times.append(_until(headers[DEADLINE_HEADER], now, longest))
    return min(times, default=default)


def _timeout(text: str, longest: float) -> float:
    seconds = _number(text)
    if seconds is None or not 0 < seconds <= longest:
        raise _refused(TIMEOUT_HEADER, f"must be seconds above 0 and at most {longest:g}")
    return seconds


def _until(text: str, now: float, longest: float) -> float:
    moment = _number(text)
    if moment is None:
        moment = _moment(text)
    if moment is None:
        raise _refused(
            DEADLINE_HEADER, "must be Unix seconds or a time with its zone, as 2030-01-31T12:00:00Z"
        )
    if moment <= now:
        raise RequestFailed(
            FailureCode.DEADLINE, f"{DEADLINE_HEADER}: had passed before the request arrived"
        )
    if not moment - now <= longest:
        raise _refused(DEADLINE_HEADER, f"must be at most {longest:g} seconds from now")
    return moment - now


def _number(text: str) -> float | None:
    try:
        return float(text[:MAX_CHARS])
    except ValueError:
        return None


def _moment(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text[:MAX_CHARS])
        return None if moment.tzinfo is None else moment.timestamp()
    except (ValueError, OverflowError):
        return None


def _refused(header: str, reason: str) -> ApiError:
    return invalid(f"{header}: {reason}.", param=header)
