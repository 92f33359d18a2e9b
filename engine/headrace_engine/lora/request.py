"""Which adapter a prompt of the offline API runs with, under vLLM's names."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import RequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """`lora_path` is the adapter's folder. `lora_int_id`, above 0, is there for vLLM's sake: an
    adapter is known by its name here, which stays with its folder."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not self.lora_name or not self.lora_path:
            raise RequestError("a LoRARequest needs a lora_name and a lora_path")
        if self.lora_int_id < 1:
            raise RequestError(f"lora_int_id must be above 0, not {self.lora_int_id}")

    @property
    def folder(self) -> Path:
        return Path(self.lora_path)
