"""The guarantees of each policy about order, bounds and endings, with a fake runner.

Tests set the time. Not covered: the KV blocks under each policy (test_scheduler_stateful).
"""

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from math import inf
from typing import Any, cast

import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.request import EngineRequest, FinishReason
from headrace_engine.core.step_plan import SchedulerOutput
from headrace_engine.engine.engine import Engine
from headrace_engine.scheduler.policies import POLICIES, Policy, make_policy
from headrace_engine.scheduler.policies.deadline import Deadline
from headrace_engine.scheduler.policies.fair import PRUNE_AT, Fair
from headrace_engine.scheduler.policies.priority import Priority
from headrace_engine.scheduler.policies.sjf import ShortestJobFirst
from headrace_engine.scheduler.request_queue import TenantQueues
from headrace_testing.engine import Rig, make_config, make_request, make_rig
from headrace_testing.fake_runner import FakeRunner


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def params(max_tokens: int = 4, *, ignore_eos: bool = True, min_tokens: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, min_tokens=min_tokens)


def one_at_a_time(policy: Policy) -> Rig:
    return make_rig(make_config(max_num_seqs=1), policy=policy)


def order(rig: Rig) -> list[str]:
    """Ids in the order in which they got their first token."""
    rig.finish()
    return [output.request_id for output in rig.outputs if output.index == 0]


def served(policy: Policy, *requests: EngineRequest) -> list[str]:
    """The order in which one slot serves requests that all arrived at once."""
    rig = one_at_a_time(policy)
    rig.add(*requests)
    return order(rig)


def overtaking(policy: Policy, requests: Ordered[EngineRequest]) -> list[tuple[str, str]]:
    """Pairs (later, earlier) of arrivals in which the later one got its first token first."""
    place = {name: index for index, name in enumerate(served(policy, *requests))}
    return [
        (late.request_id, early.request_id)
        for early in requests
        for late in requests
        if early.arrival < late.arrival and place[late.request_id] < place[early.request_id]
    ]


# Priority


def test_lower_priority_runs_sooner_and_equals_in_order_of_arrival() -> None:
    requests = [
        make_request(name, [1], priority=priority, arrival=index * 0.01)
        for index, (name, priority) in enumerate(
            [("low", 2), ("normal", 0), ("normal-2", 0), ("high", -1)]
        )
    ]
    assert served(Priority(), *requests) == ["high", "normal", "normal-2", "low"]


def test_a_waiting_request_is_overtaken_only_within_the_ageing_bound() -> None:
    rng, ageing = random.Random(1), 10.0
    requests = [
        make_request(str(i), [1], priority=rng.randint(-3, 3), arrival=rng.uniform(0, 90))
        for i in range(60)
    ]
    known = {request.request_id: request for request in requests}
    pairs = overtaking(Priority(ageing=ageing, preemption=False), requests)
    assert pairs
    for late, early in pairs:
        lead = (known[early].priority - known[late].priority) * ageing
        assert 0 <= known[late].arrival - known[early].arrival <= lead


def test_an_urgent_request_takes_the_place_of_a_running_one() -> None:
    rig = one_at_a_time(Priority())
    slow, urgent = make_request("slow", [1, 2], params=params(9)), make_request("urgent", [3])
    rig.add(slow)
    rig.step(3)
    urgent = make_request("urgent", [3], priority=-1, arrival=1.0)
    rig.add(urgent)
    rig.step()
    assert [name for name, _, _ in rig.shape()] == ["urgent"]
    assert rig.scheduler.stats().preemptions == 1
    rig.finish()
    assert rig.tokens() == rig.expected(slow, urgent)


def test_equal_priority_never_preempts_even_if_it_arrived_earlier() -> None:
    rig = one_at_a_time(Priority())
    rig.add(make_request("a", [1], arrival=5.0))
    rig.step()
    rig.add(make_request("b", [2], arrival=1.0))
    rig.finish()
    assert rig.scheduler.stats().preemptions == 0


def test_a_running_request_that_aged_is_not_preempted() -> None:
    rig = one_at_a_time(Priority(ageing=10.0))
    rig.add(make_request("old", [1], priority=1, arrival=0.0))
    rig.step()
    rig.add(make_request("urgent", [2], priority=0, arrival=11.0))
    rig.finish()
    assert rig.scheduler.stats().preemptions == 0


def test_preemption_can_be_switched_off() -> None:
    rig = one_at_a_time(Priority(preemption=False))
    rig.add(make_request("slow", [1]))
    rig.step()
    rig.add(make_request("urgent", [2], priority=-5, arrival=1.0))
    rig.finish()
    assert rig.scheduler.stats().preemptions == 0


def test_urgent_requests_preempt_for_blocks_the_latest_first_and_no_more_than_needed() -> None:
    rig = make_rig(make_config(max_num_batched_tokens=64), num_blocks=12, policy=Priority())
    slow = [make_request(name, [k] * 12, params=params(6)) for k, name in enumerate("abc", 1)]
    rig.add(*slow)
    rig.step(2)
    urgent = make_request("urgent", range(10, 18), priority=-1, arrival=1.0)
    rig.add(urgent)
    rig.step()
    assert {name for name, _, _ in rig.shape()} == {"a", "b", "urgent"}
    assert rig.scheduler.stats().preemptions == 1
    rig.finish()
    assert rig.tokens() == rig.expected(*slow, urgent)


@pytest.mark.parametrize("tokens", [12, 14])
def test_nothing_is_preempted_if_that_would_not_be_enough(tokens: int) -> None:
    """12 tokens would fit next to the more urgent request now, but not once it has its full
    length."""
    rig = make_rig(num_blocks=8, policy=Priority())
    rig.add(make_request("first", [1] * 20, params=params(6), priority=-2))
    rig.add(make_request("small", [2] * 2, params=params(6)))
    rig.step()
    rig.add(make_request("urgent", [3] * tokens, priority=-1, arrival=1.0))
    rig.step()
    assert {name for name, _, _ in rig.shape()} == {"first", "small"}
    assert rig.scheduler.stats().preemptions == 0


def test_several_urgent_requests_start_in_one_step() -> None:
    rig = make_rig(make_config(max_num_seqs=3), policy=Priority())
    rig.add(*(make_request(name, [k], params=params(9)) for k, name in enumerate("abc", 1)))
    rig.step(2)
    rig.add(*(make_request(name, [k], priority=-1, arrival=1.0) for k, name in enumerate("xy", 5)))
    rig.step()
    assert sorted(name for name, _, _ in rig.shape()) == ["a", "x", "y"]


# Shortest job first


def test_the_shorter_job_runs_first() -> None:
    lengths = {"long": 40, "short": 2, "middle": 10}
    requests = [make_request(name, [1], params=params(n)) for name, n in lengths.items()]
    assert served(ShortestJobFirst(), *requests) == ["short", "middle", "long"]


def test_a_long_prompt_makes_a_job_longer() -> None:
    requests = [make_request("long", [1] * 60), make_request("short", [2] * 4)]
    assert served(ShortestJobFirst(), *requests) == ["short", "long"]


def test_a_long_job_is_overtaken_only_within_the_ageing_bound() -> None:
    rng, ageing = random.Random(2), 2.0
    requests = [
        make_request(str(i), [1], params=params(rng.randint(1, 60)), arrival=rng.uniform(0, 40))
        for i in range(50)
    ]
    known = {request.request_id: request for request in requests}
    pairs = overtaking(ShortestJobFirst(ageing=ageing), requests)
    assert pairs
    for late, early in pairs:
        sizes = [known[name].params.max_tokens or 0 for name in (early, late)]
        lead = known[late].arrival - known[early].arrival
        assert lead <= (sizes[0] - sizes[1]) / ageing


def test_a_resumed_request_counts_only_its_remaining_tokens() -> None:
    fresh = make_request("fresh", [1], params=params(8))
    resumed = make_request("resumed", [2], params=params(20), resume=((3,) * 17,))
    rig = one_at_a_time(ShortestJobFirst())
    rig.add(fresh, resumed)
    rig.step()
    assert [name for name, _, _ in rig.shape()] == ["resumed"]


def test_lengths_are_learned_from_finished_requests() -> None:
    policy = ShortestJobFirst()
    rig = one_at_a_time(policy)
    talk, terse = [7] * 16, [8] * 16  # two applications, each with its own prompts
    given = SamplingParams(max_tokens=64, stop_token_ids=[49], min_tokens=60)
    brief = SamplingParams(max_tokens=64, stop_token_ids=list(range(1, 50)))
    for turn in range(6):
        rig.add(make_request(f"t{turn}", [*talk, turn + 1], params=given))
        rig.add(make_request(f"b{turn}", [*terse, turn + 1], params=brief))
    rig.finish()
    rig.outputs.clear()
    free = SamplingParams(max_tokens=64)
    rig.add(make_request("talk", [*talk, 20], params=free))
    rig.add(make_request("terse", [*terse, 20], params=free))
    assert order(rig) == ["terse", "talk"]


# Fair shares


def backlog(tenants: dict[str, int], tokens: int) -> list[EngineRequest]:
    """Each tenant's requests, with prompts and outputs of its length, worth `tokens` tokens."""
    return [
        make_request(f"{tenant}{i}", [1 + i % 40] * size, params=params(size), tenant=tenant)
        for tenant, size in tenants.items()
        for i in range(tokens // size)
    ]


def charge(scheduler_output: SchedulerOutput) -> dict[str, float]:
    """The service that a step gives each tenant: 1 for a prompt token, 2 for an output token."""
    given: dict[str, float] = {}
    for item in scheduler_output.scheduled:
        prompt = max(0, min(item.start + item.length, item.sequence.prompt_length) - item.start)
        tenant = item.sequence.request.tenant
        given[tenant] = given.get(tenant, 0.0) + prompt + 2 * item.samples
    return given


@pytest.mark.parametrize("weights", [{}, {"b": 3.0}])
def test_backlogged_tenants_get_their_shares_within_the_bound(weights: dict[str, float]) -> None:
    config = make_config(max_num_seqs=6, max_num_batched_tokens=32, enable_prefix_caching=False)
    policy, tenants = Fair(weights), {"a": 3, "b": 9, "c": 17}
    rig = make_rig(config, num_blocks=40, policy=policy)
    rig.add(*backlog(tenants, 1800))
    queue = policy.queue()
    assert isinstance(queue, TenantQueues)
    shares = dict.fromkeys(tenants, 0.0)
    bound = 2 * max(17, 2 * 40 * 4)
    while all(map(queue.has, tenants)):
        rig.step()
        for tenant, tokens in charge(rig.runner.steps[-1]).items():
            shares[tenant] += tokens / weights.get(tenant, 1.0)
        assert max(shares.values()) - min(shares.values()) <= bound
    assert min(shares.values()) > 2 * bound, "too short to tell"


def test_a_tenant_without_a_configured_weight_has_that_of_its_requests() -> None:
    policy = Fair({"named": 2.0})
    requests = [
        make_request(f"{tenant}{n}", [1] * 5, params=params(1), tenant=tenant, tenant_weight=weight)
        for tenant, weight in (("named", 4.0), ("heavy", 4.0), ("light", 1.0))
        for n in range(40)
    ]
    started = Counter(name.rstrip("0123456789") for name in served(policy, *requests)[:35])
    assert started["named"] == pytest.approx(10, abs=1)
    assert started["heavy"] == pytest.approx(20, abs=1)


def test_a_flood_does_not_make_another_tenant_wait() -> None:
    flood = [make_request(f"f{i}", [1], tenant="flood") for i in range(50)]
    small = make_request("small", [2], tenant="small", arrival=1.0)
    rig = one_at_a_time(Fair())
    rig.add(*flood)
    rig.step(10)
    rig.add(small)
    assert order(rig).index("small") <= 4


def test_within_a_tenant_the_earlier_request_runs_first() -> None:
    requests = [make_request(str(k), [1], tenant="a", arrival=-k) for k in range(5)]
    assert served(Fair(), *requests) == ["4", "3", "2", "1", "0"]


def test_a_tenant_has_no_credit_for_the_time_it_was_idle() -> None:
    policy = Fair()
    rig = one_at_a_time(policy)
    rig.add(*(make_request(f"a{i}", [1] * 4, tenant="a") for i in range(20)))
    rig.step(40)
    rig.add(*(make_request(f"b{i}", [2] * 4, tenant="b") for i in range(20)))
    assert policy.counter("b") == policy.counter("a")
    names = order(rig)
    first = names.index("b0")
    assert 8 <= sum(name[0] == "b" for name in names[first : first + 20]) <= 12


def test_recomputed_tokens_are_not_charged() -> None:
    policy = Fair(output_weight=0.0)
    rig = make_rig(num_blocks=5, policy=policy)
    rig.add(*(make_request(name, [k] * 8, params=params(8)) for k, name in enumerate("ab", 1)))
    rig.finish()
    assert rig.scheduler.stats().preemptions > 0
    assert policy.counter("default") == 16


def test_a_prompt_that_is_cached_is_not_charged() -> None:
    policy = Fair(output_weight=0.0)
    rig = make_rig(policy=policy)
    for name in "ab":
        rig.add(make_request(name, range(1, 14)))
        rig.finish()
    assert policy.counter("default") == 13 + 1


def test_idle_tenants_are_forgotten_in_time() -> None:
    policy = Fair()
    rig = make_rig(policy=policy)
    for i in range(3 * PRUNE_AT):
        rig.add(make_request("r", [1], params=params(1), tenant=str(i)))
        rig.step()
    assert len(policy._counters) <= PRUNE_AT


# Deadlines


def test_the_earliest_deadline_runs_first() -> None:
    deadlines = {"late": 90.0, "soon": 30.0, "none": inf, "middle": 60.0}
    requests = [make_request(name, [1], deadline=at) for name, at in deadlines.items()]
    assert served(Deadline(clock=Time()), *requests) == ["soon", "middle", "late", "none"]


def test_a_request_without_a_deadline_is_overtaken_only_within_the_horizon() -> None:
    free = make_request("free", [1], arrival=0.0)
    others = [make_request(str(at), [1], arrival=at, deadline=at + 5.0) for at in (1.0, 4.0, 6.0)]
    names = served(Deadline(horizon=10.0, clock=Time()), free, *others)
    assert names == ["1.0", "4.0", "free", "6.0"]


def test_a_running_request_ends_at_its_deadline_with_its_tokens() -> None:
    clock = Time()
    rig = make_rig(policy=Deadline(margin=0.5, clock=clock))
    request = make_request("a", [1, 2], params=params(9), deadline=10.0)
    rig.add(request)
    rig.step(3)
    clock.now = 9.4
    rig.step()
    clock.now = 9.5
    rig.step()
    last = rig.outputs[-1]
    assert (last.finish_reason, last.reason) == (FinishReason.ABORT, "its deadline is over")
    assert (last.index, last.token_ids) == (4, ())
    assert rig.tokens()["a", 0] == rig.expected(request)["a", 0][:4]
    assert not rig.scheduler.has_work
    assert rig.scheduler.stats().blocks_used == 0


def test_waiting_work_ends_at_its_deadline_too() -> None:
    clock = Time()
    rig = make_rig(make_config(max_num_seqs=1), policy=Deadline(margin=0.0, clock=clock))
    rig.add(make_request("a", [1], params=params(9), deadline=5.0))
    rig.step()
    rig.add(make_request("b", [2], deadline=6.0))
    clock.now = 6.0
    rig.step()
    assert [(out.request_id, out.index) for out in rig.outputs[-2:]] == [("a", 1), ("b", 0)]


def slow_steps(rig: Rig, clock: Time, seconds: float, count: int) -> None:
    for _ in range(count):
        scheduler_output = rig.scheduler.schedule()
        assert scheduler_output is not None
        result = rig.runner.execute(scheduler_output)
        clock.now += seconds
        rig.scheduler.update(scheduler_output, result)


def test_requests_that_cannot_meet_their_deadline_are_not_begun() -> None:
    clock = Time()
    rig = make_rig(policy=Deadline(margin=0.0, clock=clock))
    rig.add(make_request("first", [1] * 10, params=params(20)))
    slow_steps(rig, clock, 1.0, 10)
    rig.add(make_request("hopeless", [2] * 10, params=params(20), deadline=clock.now + 15.0))
    rig.add(make_request("feasible", [3] * 10, params=params(5), deadline=clock.now + 15.0))
    rig.step()
    aborted = [out for out in rig.outputs if out.finish_reason is FinishReason.ABORT]
    assert [out.request_id for out in aborted] == ["hopeless"]
    assert aborted[0].reason is not None
    assert "10 prompt tokens" in aborted[0].reason and "15.00 s" in aborted[0].reason
    assert [name for name, _, _ in rig.shape()] == ["first", "feasible"]


def test_work_that_may_end_early_is_not_hopeless() -> None:
    clock = Time()
    rig = make_rig(policy=Deadline(margin=0.0, clock=clock))
    rig.add(make_request("first", [1] * 10, params=params(20)))
    slow_steps(rig, clock, 1.0, 10)
    short = params(20, ignore_eos=False)
    rig.add(make_request("maybe", [2] * 10, params=short, deadline=clock.now + 15.0))
    rig.step()
    assert [name for name, _, _ in rig.shape()] == ["first", "maybe"]


def test_the_end_of_a_request_is_forgotten_with_it() -> None:
    clock = Time()
    rig = make_rig(policy=Deadline(margin=0.0, clock=clock))
    rig.add(make_request("a", [1], deadline=5.0))
    rig.finish()
    rig.add(make_request("a", [1], params=params(9), deadline=50.0))
    clock.now = 20.0
    rig.step()
    assert rig.scheduler.has_work


def test_the_engine_returns_requests_aborted_by_policy_without_a_step() -> None:
    clock = Time()
    runner = FakeRunner()
    engine = Engine(make_config(), runner, Deadline(clock=clock))
    engine.add_request(make_request("a", [1], deadline=5.0))
    clock.now = 9.0
    (output,) = engine.step()
    assert (output.finish_reason, output.token_ids) == (FinishReason.ABORT, ())
    assert runner.steps == [] and not engine.has_work


# All of them


class CountedRank(tuple[float, ...]):
    """A sort key that counts the comparisons of all such keys."""

    compared = 0

    def __lt__(self, other: object) -> bool:
        CountedRank.compared += 1
        return tuple(self) < tuple(cast(tuple[float, ...], other))

    def __eq__(self, other: object) -> bool:
        CountedRank.compared += 1
        return tuple(self) == tuple(cast(tuple[float, ...], other))

    __hash__ = tuple.__hash__


def comparisons_in_twenty_steps(name: str, waiting: int) -> int:
    """Counts the comparisons of keys and the calls of the policy while `waiting` sequences wait."""
    policy = make_policy(name, clock=Time())
    rig = make_rig(make_config(max_num_seqs=2), policy=policy)
    make_key = policy.key
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "key", lambda *given: CountedRank(make_key(*given)))
        rig.add(*(make_request(f"{i}", [1], tenant=str(i % 7)) for i in range(waiting)))
        CountedRank.compared = calls = 0

        def counting(method: Callable[..., Any]) -> Callable[..., Any]:
            def count(*given: Any) -> Any:
                nonlocal calls
                calls += 1
                return method(*given)

            return count

        for method in ("rank", "outranks", "refusal"):
            patch.setattr(policy, method, counting(getattr(policy, method)))
        rig.step(20)
    return calls + CountedRank.compared


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_step_costs_hardly_more_when_ten_thousand_wait_instead_of_a_hundred(name: str) -> None:
    few, many = (comparisons_in_twenty_steps(name, waiting) for waiting in (100, 10_000))
    assert 0 < few and many < 4 * few + 100


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_is_made_by_name(name: str) -> None:
    config = EngineConfig(model="fake", policy=name)
    assert make_policy(config.policy, config.policy_options).name == name


def test_a_custom_policy_is_made_by_module_and_class() -> None:
    policy = make_policy("headrace_engine.scheduler.policies.priority:Priority", {"ageing": 3})
    assert isinstance(policy, Priority)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lifo", {}, "unknown: choose fcfs, priority, sjf, fair, deadline or module:Class"),
        ("no_such_module:Class", {}, "cannot be loaded"),
        ("headrace_engine.scheduler.policies:Missing", {}, "cannot be loaded"),
        ("headrace_engine.core.request:Sequence", {}, "must be a subclass"),
        ("fcfs", {"ageing": 1}, "fcfs has no option ageing; it has: none"),
        ("priority", {"aging": 1}, "no option aging; it has: ageing, preemption"),
        ("priority", {"ageing": 0}, "ageing must be above 0"),
        ("priority", {"ageing": "fast"}, "ageing must be a number"),
        ("sjf", {"prompt_weight": -1}, "prompt_weight must be a number from 0 up, not -1"),
        ("sjf", {"predictor": 1}, "no option predictor"),
        ("fair", {"weights": {"a": 0}}, r"weights\[a\] must be above 0"),
        ("fair", {"weights": 3}, "weights must map tenants to numbers"),
        ("deadline", {"clock": 1}, "no option clock"),
        ("deadline", {"horizon": inf}, "horizon must be a number"),
    ],
)
def test_invalid_policies_are_refused_by_name(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(name, options)


def test_tokens_of_accepted_drafts_are_charged_too() -> None:
    policy = Fair(output_weight=2.0)
    rig = make_rig(policy=policy)
    request = make_request("r", range(6), tenant="a")
    rig.add(request)
    rig.step()
    charged = policy.counter("a")
    (sequence,) = rig.scheduler.running()
    (first, second, *_) = rig.runner.expected(request, 0)[0][1:]
    scheduler_output = rig.scheduler.schedule({sequence: (first, second + 1)})
    assert scheduler_output is not None
    rig.outputs += rig.scheduler.update(scheduler_output, rig.runner.execute(scheduler_output))
    assert policy.counter("a") - charged == 2.0 * 2
    rig.finish()
    assert rig.tokens() == rig.expected(request)
