"""Errors of the operator. `code` is the stable word that conditions and logs carry.

OperatorError
├── InvalidSpec         a ModelService cannot be understood; names the field, the value, the remedy
├── ServedNameTaken     another owner's engines have registered the name that clients ask for
├── SignalsUnavailable  metrics could not be read: nothing may be decided on them
└── ClusterError        the Kubernetes API refused or did not answer
    ├── NotFound        the object, or its kind, is not there
    ├── Conflict        somebody else changed or owns it
    ├── Refused         the API server finds the object wrong or forbids it: waiting does not help
    └── Unreachable     no answer, or one that says to come again
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
    """Engines of both would take requests from one queue and answer with either's model."""

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
