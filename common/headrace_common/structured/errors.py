"""The error of sampling parameters and structured outputs."""


class SamplingError(ValueError):
    """A sampling parameter is out of range. `field` names it; the message says what is allowed."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(f"{field_name}: {message}")
        self.field = field_name
        self.message = message
