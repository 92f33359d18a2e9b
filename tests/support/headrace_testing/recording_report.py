"""A report of `up` that records all events, for tests."""


class RecordingReport:
    def __init__(self) -> None:
        self.statuses: list[tuple[str, str]] = []
        self.events: list[str] = []
        self.alarms: list[tuple[str, str]] = []

    def status(self, name: str, text: str, *, done: bool = False) -> None:
        self.statuses.append((name, text))

    def event(self, text: str) -> None:
        self.events.append(text)

    def alarm(self, name: str, text: str) -> None:
        self.alarms.append((name, text))

    def block(self, text: str) -> None:
        self.events.append(text)
