"""Memory that is given back for some time: which tensors it is found through, and what remains."""

from dataclasses import dataclass

import torch

from headrace_engine.device.released_memory import ReleasedMemory, tensors_of

PAGES = 1 << 20


@dataclass(slots=True)
class Holder:
    part: object


def closure(tensor: torch.Tensor) -> object:
    return lambda: tensor


def test_tensors_are_found_through_attributes_containers_and_closures() -> None:
    tensors = [torch.full((1,), float(number)) for number in range(5)]
    module = torch.nn.Linear(1, 1)
    held = Holder({"a": [tensors[0], (tensors[1],)], "b": closure(tensors[2])})
    found = {id(each) for each in tensors_of(held, module, {3: tensors[3]})}
    assert found >= {id(each) for each in (*tensors[:4], *module.parameters())}
    assert id(tensors[4]) not in found


def test_only_what_is_lost_is_given_back() -> None:
    kept, lost = torch.ones(PAGES), torch.ones(PAGES)
    part = lost[PAGES // 2 :]
    memory = ReleasedMemory(torch.device("cpu"), kept=[kept], lost=[lost, part])
    memory.restore()
    assert bool((kept == 1).all())
    assert not bool(part[: PAGES // 4].any()), "its pages are new ones"
    part.fill_(2)
    assert float(lost[-1]) == 2, "parts still share the memory"
