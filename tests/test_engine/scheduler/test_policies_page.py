"""docs/policies.md: its example runs, and its table names exactly the existing options."""

import inspect
import re
from pathlib import Path

import pytest

from headrace_engine.scheduler.policies import POLICIES, make_policy
from headrace_engine.scheduler.policies.registry import SET_IN_CODE
from headrace_testing.engine import make_config, make_request, make_rig

PAGE = (Path(__file__).parents[3] / "docs" / "policies.md").read_text()


def test_the_worked_example_is_a_policy_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (name,) = re.findall(r"--policy (short_prompts:\w+)", PAGE)
    (tmp_path / "short_prompts.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = make_policy(name, {"patience": 50})
    rig = make_rig(make_config(max_num_seqs=1), policy=policy)
    prompts = {"long": 60, "short": 3, "middle": 20}
    rig.add(*(make_request(name, [1] * length) for name, length in prompts.items()))
    rig.add(make_request("late", [1], arrival=2.0))
    rig.finish()
    firsts = [output.request_id for output in rig.outputs if output.index == 0]
    assert firsts == ["short", "middle", "long", "late"]


@pytest.mark.parametrize("name", POLICIES)
def test_every_option_and_its_default_is_in_the_table(name: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    documented = re.findall(r"`(\w+)` \(([^)]+)\)", row.rsplit(" | ", 1)[1])
    options = {
        option: _written(parameter.default)
        for option, parameter in inspect.signature(POLICIES[name]).parameters.items()
        if option not in SET_IN_CODE
    }
    assert dict(documented) == options


def _written(default: object) -> str:
    if default is None:
        return "{}"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)
