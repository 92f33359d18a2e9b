"""One campaign for all tests, and its table at the end of the run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_testing.hostile.attack import Attack
from headrace_testing.hostile.campaign import Campaign, campaign
from headrace_testing.hostile.report import summary
from headrace_testing.hostile.verdict import Latency, Result

TABLE = pytest.StashKey[list[str]]()


class Attacks:
    """Runs attacks and collects the results."""

    def __init__(self, made: Campaign) -> None:
        self.campaign = made
        self.results: list[Result] = []

    def strike(self, attack: Attack) -> Result:
        self.results.append(self.campaign.strike(attack))
        return self.results[-1]

    @property
    def latency(self) -> Latency:
        return self.campaign.latency()


@pytest.fixture(scope="session")
def attacks(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Attacks]:
    folder: Path = tmp_path_factory.mktemp("hostile")
    with campaign(folder) as made:
        found = Attacks(made)
        yield found
        lines = summary(found.results, made.undisturbed, found.latency, folder)
        pytestconfig.stash[TABLE] = list(lines)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if table := terminalreporter.config.stash.get(TABLE, None):
        terminalreporter.section("attacks, the worst first")
        terminalreporter.write_line("\n".join(table).encode("ascii", "backslashreplace").decode())
