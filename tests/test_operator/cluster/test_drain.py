"""The engine that is removed first, and the end of its drain; with properties of random fleets."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headrace_operator.cluster.drain import (
    Draining,
    DrainPlan,
    EnginePod,
    choose,
    highest_kept,
    plan,
    plan_from_top,
)
from headrace_testing.operators import engine_status


def pod(
    name: str,
    *,
    running: int | None = 0,
    ready: bool = True,
    draining: bool = False,
    cached: float = 0.0,
    created: str = "",
) -> EnginePod:
    status = None if running is None else engine_status(name, running=running, draining=draining)
    return EnginePod(name=name, ready=ready, created=created, status=status, cached_blocks=cached)


def victim(name: str, since: float = 0.0) -> Draining:
    return Draining(pod=name, engine_id=f"{name}.1.abc", since=since)


def names_of(pods: list[EnginePod]) -> list[str]:
    return [pod.name for pod in pods]


def test_the_engine_with_the_least_work_goes_first() -> None:
    pods = [pod("a", running=5), pod("b", running=1), pod("c", running=3)]
    assert names_of(choose(pods, 2)) == ["b", "c"]


def test_an_engine_that_is_not_ready_goes_before_any_other() -> None:
    pods = [pod("idle"), pod("starting", running=None, ready=False)]
    assert names_of(choose(pods, 1)) == ["starting"]


def test_with_equal_work_the_engine_with_the_least_valuable_cache_goes() -> None:
    pods = [pod("warm", cached=900), pod("cold", cached=10)]
    assert names_of(choose(pods, 1)) == ["cold"]


def test_of_equal_engines_the_youngest_goes() -> None:
    pods = [pod("old", created="2026-01-01T00:00:00Z"), pod("new", created="2026-02-01T00:00:00Z")]
    assert names_of(choose(pods, 1)) == ["new"]


def test_drain_is_sent_until_the_engine_reports_it() -> None:
    pods = [pod("a", running=2), pod("b", running=9)]
    first = plan(pods, (), surplus=1, now=100, timeout=60)
    assert [v.pod for v in first.start] == ["a"]
    assert first.engines_to_drain(pods) == ("a.1.abc",)
    again = plan(pods, first.start, surplus=1, now=110, timeout=60)
    assert (again.start, again.ended) == ((), ())
    assert again.engines_to_drain(pods) == ("a.1.abc",)
    reported = [pod("a", running=2, draining=True), pods[1]]
    assert (
        plan(reported, first.start, surplus=1, now=110, timeout=60).engines_to_drain(reported) == ()
    )


def test_an_idle_engine_has_not_ended_before_it_takes_no_more_work() -> None:
    waiting = plan([pod("a"), pod("b")], [victim("a")], surplus=1, now=1, timeout=60)
    assert [v.pod for v in waiting.waiting] == ["a"]
    done = plan([pod("a", draining=True), pod("b")], [victim("a")], surplus=1, now=1, timeout=60)
    assert [v.pod for v in done.ended] == ["a"]


def test_an_engine_that_is_gone_or_new_in_its_pod_has_ended() -> None:
    for pods in ([], [pod("a", running=None, ready=False)]):
        found = plan(pods, [victim("a")], surplus=1, now=1, timeout=60)
        assert [v.pod for v in found.ended] == ["a"]
    other = Draining(pod="a", engine_id="a.1.before", since=0)
    assert plan([pod("a")], [other], surplus=1, now=1, timeout=60).ended == (other,)


def test_a_drain_ends_after_its_grace_period() -> None:
    pods = [pod("a", running=3, draining=True)]
    assert not plan(pods, [victim("a")], surplus=1, now=59, timeout=60).ended
    assert plan(pods, [victim("a")], surplus=1, now=60, timeout=60).ended


def test_when_more_engines_are_wanted_again_the_newest_drain_is_given_up() -> None:
    pods = [pod(name, running=3, draining=True) for name in "ab"]
    found = plan(pods, [victim("a", 1), victim("b", 2)], surplus=1, now=3, timeout=60)
    assert [v.pod for v in found.cancelled] == ["b"]
    assert [v.pod for v in found.waiting] == ["a"]
    none = plan(pods, [victim("a", 1), victim("b", 2)], surplus=-3, now=3, timeout=60)
    assert len(none.cancelled) == 2


@given(
    work=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    surplus=st.integers(-2, 10),
    begun=st.integers(0, 4),
)
def test_a_plan_never_takes_more_than_the_surplus(
    work: list[int], surplus: int, begun: int
) -> None:
    pods = [pod(f"p{number}", running=running) for number, running in enumerate(work)]
    draining = [victim(each.name, number) for number, each in enumerate(pods[:begun])]
    found = plan(pods, draining, surplus=surplus, now=5, timeout=60)
    leaving = (*found.start, *found.waiting, *found.ended)
    assert len(leaving) == max(0, min(surplus, len(pods)))
    assert len({v.pod for v in leaving}) == len(leaving)
    assert {v.pod for v in draining} <= {v.pod for v in (*leaving, *found.cancelled)}


def numbered(index: int, *, running: int | None = 0, draining: bool = False) -> EnginePod:
    each = pod(f"e{index}", running=running, draining=draining)
    return replace(each, index=index)


def from_top(
    pods: list[EnginePod], draining: list[Draining], desired: int, now: float = 5
) -> tuple[DrainPlan, int]:
    found = plan_from_top(pods, draining, deployed=4, desired=desired, now=now, timeout=60)
    return found, highest_kept(pods, found, desired=desired)


def test_of_engines_with_numbers_the_highest_go_however_busy() -> None:
    pods = [numbered(0), numbered(1), numbered(2, running=9), numbered(3, running=7)]
    found, kept = from_top(pods, [], 2)
    assert [v.pod for v in found.start] == ["e3", "e2"]
    assert found.engines_to_drain(pods) == ("e3.1.abc", "e2.1.abc")
    assert kept == 4


def test_the_count_goes_down_only_to_an_engine_that_drains_still() -> None:
    first = [numbered(0), numbered(1), numbered(2, running=9, draining=True)]
    top = numbered(3, draining=True)
    victims = [victim("e2"), victim("e3")]
    found, kept = from_top([*first, top], victims, 2)
    assert [v.pod for v in found.ended] == ["e3"]
    assert ([v.pod for v in found.waiting], kept) == (["e2"], 3)
    idle = [*first[:2], numbered(2, draining=True), numbered(3, running=1, draining=True)]
    found, kept = from_top(idle, victims, 2)
    assert [v.pod for v in found.waiting] == ["e3", "e2"], "3 is above 2"
    assert kept == 4
    assert from_top(idle, victims, 2, now=60)[1] == 2, "the time is over"


def test_an_engine_without_a_pod_holds_nothing_up() -> None:
    pods = [numbered(0), numbered(1), numbered(2, running=3)]
    found, kept = from_top(pods, [], 2)
    assert ([v.pod for v in found.start], kept) == (["e2"], 3)
    assert from_top(pods[:2], [], 2)[1] == 2
    starting = [*pods[:2], numbered(2, running=None), numbered(3, running=None)]
    assert from_top(starting, [], 2)[1] == 2


def test_of_engines_with_numbers_the_lowest_victim_stays_when_more_are_wanted() -> None:
    pods = [numbered(n, running=3, draining=n > 1) for n in range(4)]
    found, kept = from_top(pods, [victim("e2", 1), victim("e3", 2)], 3)
    assert ([v.pod for v in found.waiting], kept) == (["e3"], 4)
    assert [v.pod for v in found.cancelled] == ["e2"]
    assert len(from_top(pods, [victim("e2", 1), victim("e3", 2)], 5)[0].cancelled) == 2
