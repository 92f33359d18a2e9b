import pytest

from headrace_engine.core.request import Sequence
from headrace_engine.scheduler.request_queue import LazyHeap, TenantQueues, WaitingQueue
from headrace_testing.engine import make_request


def sequences(count: int) -> list[Sequence]:
    request = make_request("a", [1])
    return [Sequence(request, choice, [1]) for choice in range(count)]


def test_the_smallest_key_leaves_first_regardless_of_arrival() -> None:
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


def test_an_item_may_come_again_under_another_key() -> None:
    heap: LazyHeap[tuple[float], str] = LazyHeap()
    heap.push((1.0,), "a")
    heap.push((2.0,), "b")
    heap.discard("a")
    heap.push((3.0,), "a")
    assert [(heap.peek_key(), heap.pop()) for _ in range(2)] == [((2.0,), "b"), ((3.0,), "a")]
    assert heap.peek_key() is None


class Scene:
    """Queues of tenants whose counters the test sets."""

    def __init__(self) -> None:
        self.counters = {"a": 0.0, "b": 0.0, "c": 0.0}
        self.queue = TenantQueues(lambda tenant: self.counters[tenant])
        self.count = 0

    def push(self, tenant: str) -> Sequence:
        self.count += 1
        sequence = Sequence(make_request(f"{tenant}{self.count}", [1], tenant=tenant), 0, [1])
        self.queue.push(((float(self.count),), 0), sequence)
        return sequence

    def pop(self) -> str:
        return self.queue.pop().request.request_id


def test_the_tenant_with_the_smallest_counter_is_next() -> None:
    scene = Scene()
    for tenant in "aabbc":
        scene.push(tenant)
    popped = []
    while len(scene.queue):
        popped.append(scene.pop())
        scene.counters[popped[-1][0]] += {"a": 3.0, "b": 1.0, "c": 1.0}[popped[-1][0]]
    assert popped == ["a1", "b3", "c5", "b4", "a2"]
    with pytest.raises(IndexError):
        scene.queue.pop()


def test_a_queue_is_closed_by_its_last_sequence_however_that_leaves() -> None:
    scene = Scene()
    first, second = scene.push("a"), scene.push("b")
    scene.queue.discard(first)
    scene.queue.discard(first)
    assert not scene.queue.has("a") and scene.queue.has("b")
    assert (len(scene.queue), scene.queue.last_emptied) == (1, "a")
    scene.counters["a"] = 5.0
    scene.push("a")
    assert scene.queue.peek() is second
    assert scene.pop() == "b2"
    assert (scene.queue.first_tenant(), scene.queue.last_emptied) == ("a", "b")
