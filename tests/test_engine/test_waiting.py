import pytest

from headrace_engine.request import Sequence
from headrace_engine.waiting import WaitingQueue
from headrace_testing.engine import make_request


def sequences(count: int) -> list[Sequence]:
    request = make_request("a", [1])
    return [Sequence(request, choice, [1]) for choice in range(count)]


def test_the_smallest_key_leaves_first_whenever_it_came() -> None:
    queue, (one, two, three) = WaitingQueue(), sequences(3)
    queue.push(((2.0,), 0), two)
    queue.push(((3.0,), 0), three)
    queue.push(((1.0,), 0), one)
    assert queue.peek() is one
    assert [queue.pop() for _ in range(3)] == [one, two, three]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_discarded_sequences_are_passed_over() -> None:
    queue, (one, two) = WaitingQueue(), sequences(2)
    queue.push(((1.0,), 0), one)
    queue.push(((2.0,), 0), two)
    queue.discard(one)
    queue.discard(one)
    assert (len(queue), queue.peek()) == (1, two)
    assert queue.pop() is two


def test_many_discards_keep_the_order_of_the_rest() -> None:
    queue, waiting = WaitingQueue(), sequences(100)
    for position, sequence in enumerate(waiting):
        queue.push(((float(position % 10),), position), sequence)
    for sequence in waiting[:90]:
        queue.discard(sequence)
    assert [queue.pop().choice for _ in range(10)] == list(range(90, 100))
