"""Errors that cross a room or the wire. `code` is the stable machine word, the message for people.

HeadraceError
├── SettingsError        a setting is wrong; the message says which and what to do
├── MessageError         bytes on the wire are not a message of this protocol
├── BackendUnfit         the Redis at hand cannot keep the protocol's promises
├── BackendUnavailable   Redis cannot be reached or refuses writes now
├── QueueFull            the queue took no more; carries when to retry
├── RequestConflict      the request id is in use for another request
└── RequestFailed        an accepted request ended without an answer; carries a FailureCode
"""

from enum import StrEnum


class HeadraceError(Exception):
    code = "headrace_error"


class SettingsError(HeadraceError):
    code = "settings_invalid"


class MessageError(HeadraceError):
    code = "message_invalid"


class BackendUnfit(HeadraceError):
    code = "backend_unfit"


class BackendUnavailable(HeadraceError):
    code = "backend_unavailable"


class QueueFull(HeadraceError):
    """`retry_after` in seconds. `tenant` tells this caller's own limit from the whole system's."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float, tenant: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.tenant = tenant


class RequestConflict(HeadraceError):
    code = "request_conflict"


class FailureCode(StrEnum):
    """Why an accepted request ended in `failed`; on the wire and in the error object's `code`."""

    DEADLINE = "deadline_exceeded"
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"  # its engine found no gateway that wants it
    INVALID = "request_invalid"  # the engine refused it: a check that the gateway could not make
    MALFORMED = "message_malformed"
    POISONED = "request_failed"  # it took down several engines that ran it
    LOST = "state_lost"  # Redis and the gateway's memory are both gone
    INTERNAL = "internal_error"


class RequestFailed(HeadraceError):
    code = "request_failed"

    def __init__(self, failure: FailureCode, message: str) -> None:
        super().__init__(message)
        self.failure = failure
