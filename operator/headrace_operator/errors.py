"""Errors of the operator.

`code` is the stable word in conditions and logs.

    OperatorError
    ├── InvalidSpec         a ModelService is invalid; the error names field, value and remedy
    ├── ServedNameTaken     another owner's engines have registered the name that clients ask for
    ├── SignalsUnavailable  metrics could not be read, so nothing may be decided
    └── ClusterError        the Kubernetes API refused or did not answer
        ├── NotFound        the object, or its kind, does not exist
        ├── Conflict        another client changed or owns it
        ├── Refused         the API server rejects or forbids the object: waiting does not help
        └── Unreachable     no answer, or one that asks to try again
"""

from headrace_common.errors import HeadraceError


class OperatorError(HeadraceError):
    code = "operator_error"


class InvalidSpec(OperatorError):
    """`field` is the path below the object, as `spec.engine.image`."""

    code = "InvalidSpec"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class ServedNameTaken(OperatorError):
    """Another owner has this served name; both owners' engines would share one queue."""

    code = "ServedNameTaken"

    def __init__(self, name: str, owner: str, rival: str) -> None:
        super().__init__(
            f"model.servedName {name!r} of ModelService {owner} is registered by {rival}: engines "
            "of both would take requests from the same queue and answer for each other; give one "
            "of them another servedName, or delete one"
        )


class SignalsUnavailable(OperatorError):
    code = "SignalsUnavailable"


class ClusterError(OperatorError):
    code = "ClusterError"


class NotFound(ClusterError):
    code = "NotFound"


class Conflict(ClusterError):
    code = "Conflict"


class Refused(ClusterError):
    code = "Refused"


class Unreachable(ClusterError):
    code = "Unreachable"
