"""The order of sequences if they need more adapters than may run at once. The runner is a fake."""

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.request import EngineRequest
from headrace_engine.scheduler.lora_stats import LoRAStats
from headrace_engine.scheduler.policies import make_policy
from headrace_testing.engine import Rig
from headrace_testing.fake_runner import FakeRunner


def rig(policy: str = "fcfs", *, max_loras: int = 1, max_num_seqs: int = 4) -> Rig:
    config = EngineConfig(
        model="fake", enable_lora=True, max_loras=max_loras, max_num_seqs=max_num_seqs
    )
    runner = FakeRunner(num_blocks=256, eos_token_ids=frozenset())
    return Rig(runner, config, make_policy(policy, {}))


def request(name: str, lora: str | None, max_tokens: int = 4, priority: int = 0) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(max_tokens=max_tokens),
        seed=1,
        lora=lora,
        priority=priority,
    )


def running(rig: Rig) -> set[str]:
    return {name for name, _, _ in rig.shape()}


def test_requests_whose_adapter_runs_pass_those_that_wait_for_a_slot() -> None:
    scene = rig()
    scene.add(request("a1", "a"), request("b1", "b"), request("a2", "a"), request("plain", None))

    scene.step()

    assert running(scene) == {"a1", "a2", "plain"}
    scene.finish()
    assert len(scene.tokens()) == 4


def test_as_many_adapters_run_at_once_as_there_are_slots() -> None:
    scene = rig(max_loras=2)
    scene.add(request("a1", "a"), request("b1", "b"), request("c1", "c"), request("b2", "b"))

    scene.step()

    assert running(scene) == {"a1", "b1", "b2"}


def test_running_and_waiting_adapters_are_reported() -> None:
    scene = rig(max_loras=2)
    assert scene.scheduler.lora_stats() == LoRAStats(2)
    for number, lora in enumerate(("b", "a", "c", None, "c")):
        scene.add(request(f"r{number}", lora))
    scene.step()

    assert scene.scheduler.lora_stats() == LoRAStats(2, ("a", "b"), ("c",))


def test_the_slot_goes_to_the_request_that_waited_longest() -> None:
    scene = rig()
    scene.add(request("a1", "a", max_tokens=2), request("b1", "b"), request("c1", "c"))

    scene.step(2)
    assert running(scene) == {"a1"}
    scene.step()
    assert running(scene) == {"b1"}


def test_an_adapter_under_constant_load_does_not_starve_others() -> None:
    scene = rig(max_num_seqs=2)
    scene.add(request("a0", "a", max_tokens=3), request("b", "b"))
    passed = 0
    while passed < 100:
        passed += 1
        scene.add(request(f"a{passed}", "a"))  # one of them runs at any time
        scene.step()
        if "b" in running(scene):
            break

    started = {
        item.sequence.request.request_id
        for scheduler_output in scene.runner.steps
        for item in scheduler_output.scheduled
    }
    # Besides the adapter that already ran, as many as may run at once were admitted.
    assert started == {"a0", "a1", "a2", "b"}


def test_requests_without_adapter_start_while_adapters_wait_for_their_turn() -> None:
    scene = rig(max_num_seqs=2)
    scene.add(request("a0", "a", max_tokens=40), request("b", "b"))
    for number in range(6):
        scene.add(request(f"a{number + 1}", "a", max_tokens=2))
        scene.step(3)
    assert "b" not in running(scene)

    scene.add(request("plain", None))
    scene.step()

    assert running(scene) == {"a0", "plain"}


def test_a_request_that_waits_for_a_slot_can_be_aborted() -> None:
    scene = rig()
    first = request("a1", "a")
    scene.add(first, request("b1", "b"), request("c1", "c"))
    scene.step()

    scene.scheduler.abort("b1")
    scene.scheduler.abort("c1")
    scene.finish()

    assert scene.tokens() == scene.expected(first)
    assert scene.scheduler.stats().waiting == 0


def test_each_policy_finishes_a_crowd_of_adapters() -> None:
    for policy in ("fcfs", "priority", "sjf", "fair", "deadline"):
        scene = rig(policy, max_loras=2, max_num_seqs=3)
        crowd = [
            request(f"r{n}", (None, "a", "b", "c")[n * 7 % 4], 1 + n % 5, n % 3) for n in range(40)
        ]
        scene.add(*crowd)
        scene.finish()
        assert scene.tokens() == scene.expected(*crowd)
