"""Errors of the operator. `code` is the stable word that conditions and logs carry.

OperatorError
├── InvalidSpec         a ModelService cannot be understood; names the field, the value, the remedy
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
