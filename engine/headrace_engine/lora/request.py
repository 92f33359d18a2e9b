"""The adapter of a prompt of the offline API, under vLLM's names."""

from dataclasses import dataclass
from pathlib import Path

from ..core.errors import RequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter; `lora_path` is its folder. `lora_int_id`, above 0, exists only for compatibility
    with vLLM: here the name identifies an adapter and keeps its folder."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not self.lora_name or not self.lora_path:
            raise RequestError(
                f"a LoRARequest needs lora_name and lora_path, not {self.lora_name!r:.80} and "
                f"{self.lora_path!r:.80}"
            )
        if self.lora_int_id < 1:
            raise RequestError(f"lora_int_id must be above 0, not {self.lora_int_id}")

    @property
    def folder(self) -> Path:
        return Path(self.lora_path)
