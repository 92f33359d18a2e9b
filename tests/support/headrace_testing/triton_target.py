"""A device that does not exist, but for which Triton compiles; launches would fail."""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class AbsentDevice:
    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(capability: int) -> None:
    """Makes this process compile for a device. TRITON_INTERPRET must not be set."""
    active: Any = driver
    active.set_active(AbsentDevice(capability))
