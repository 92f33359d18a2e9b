"""Errors that one package raises and another catches, or that are sent as messages.

Programs compare `code`, which does not change; the message is for people.

    HeadraceError
    ├── SettingsError        a setting is wrong; the message says which and what to do
    ├── MessageError         bytes on the wire are not a message of this protocol
    ├── BackendUnfit         this Redis cannot give the guarantees of the protocol
    ├── BackendUnavailable   Redis cannot be reached or refuses writes now
    ├── QueueFull            the queue refused a request; has the time after which to retry
    ├── ImagesFull           the queue stores as many of a tenant's images as it may
    ├── RequestConflict      the request id is in use for another request
    └── RequestFailed        an accepted request ended without an answer; has a FailureCode
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
    """The queue is full.

    `retry_after` is in seconds; `tenant` says that the limit is the tenant's own.
    """

    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float, tenant: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.tenant = tenant


class ImagesFull(HeadraceError):
    """The images of one tenant's requests would exceed a bound of the queue."""

    code = "tenant_images_full"


class RequestConflict(HeadraceError):
    code = "request_conflict"


class FailureCode(StrEnum):
    """Why an accepted request failed; on the wire and in the error object's `code`."""

    DEADLINE = "deadline_exceeded"
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"  # no gateway waits for its answer any more
    INVALID = "request_invalid"  # the engine refused it by a check that the gateway could not make
    MALFORMED = "message_malformed"
    # Several engines that ran it died. The code equals that of RequestFailed.
    POISONED = "request_failed"
    REMOVED = "model_removed"  # the model is no longer registered
    LOST = "state_lost"  # neither Redis nor a gateway has the request's state any more
    SEALED = "seal_invalid"  # the stored data cannot be opened with the present keys
    INTERNAL = "internal_error"


class RequestFailed(HeadraceError):
    code = "request_failed"

    def __init__(self, failure: FailureCode, message: str) -> None:
        super().__init__(message)
        self.failure = failure
