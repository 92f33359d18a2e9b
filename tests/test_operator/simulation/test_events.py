"""The queue of events: order, cancellation, and the current time."""

from headrace_operator.simulation.events import NEVER, EventQueue


def test_events_run_by_time_then_rank_then_order() -> None:
    events = EventQueue()
    seen: list[str] = []
    events.at(2.0, seen.append, "last")
    events.at(1.0, seen.append, "ranked", rank=1)
    events.at(1.0, seen.append, "first")
    events.at(1.0, seen.append, "second")

    while events.next_time < NEVER:
        events.run_next()

    assert seen == ["first", "second", "ranked", "last"]
    assert events.now == 2.0


def test_an_event_may_add_others_and_a_cancelled_one_does_not_run() -> None:
    events = EventQueue()
    seen: list[str] = []
    cancelled = events.at(1.0, seen.append, "cancelled")
    events.at(0.5, events.at, 0.7, seen.append, "added")
    events.cancel(cancelled)

    events.run_until(1.5)

    assert (seen, events.now, events.next_time) == (["added"], 1.5, NEVER)


def test_running_until_a_time_leaves_later_events() -> None:
    events = EventQueue()
    seen: list[str] = []
    events.at(1.0, seen.append, "now")
    events.at(1.1, seen.append, "later")

    events.run_until(1.0)

    assert (seen, events.now, events.next_time) == (["now"], 1.0, 1.1)
