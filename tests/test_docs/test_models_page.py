"""docs/models.md: its table has every native architecture, and says what tests prove of each."""

import pytest

from headrace_engine.models.registry import NATIVE
from headrace_testing.pages.models import (
    BEGIN,
    END,
    MODELS,
    PAGE,
    architecture_of,
    proven,
    table,
)
from headrace_testing.proofs import Proof, proofs

TOKENS = {Proof("tokens", True, name, published=True) for name in MODELS}


def test_the_table_is_what_tests_prove(request: pytest.FixtureRequest) -> None:
    made = table(proven(proofs(request.session)))
    assert f"{BEGIN}\n{made}\n{END}" in PAGE.read_text(), "`make generated` writes it anew"


def test_the_table_has_every_native_architecture() -> None:
    """Architectures that make vectors alone have a section of their own."""
    embed = {name for name in NATIVE if name.endswith("ForRetrieval")}
    assert set(MODELS) == set(NATIVE) - embed
    assert all(f"`{name}`" in PAGE.read_text() for name in embed)


def test_an_architecture_without_a_test_is_named() -> None:
    found = proven(TOKENS - {Proof("tokens", True, "MambaForCausalLM", published=True)})
    with pytest.raises(ValueError, match="no test compares the tokens of MambaForCausalLM"):
        table(found)


def test_a_cell_is_empty_without_a_test() -> None:
    ranks = {
        Proof("ranks", True, "llama", published=False),
        Proof("ranks", False, "MambaForCausalLM", published=True),
    }
    cells = {
        row.split(" | ")[0]: row.split(" | ")[5]
        for row in table(proven(TOKENS | ranks)).splitlines()
    }
    assert cells["| `LlamaForCausalLM`"] == "yes"
    assert cells["| `MambaForCausalLM`"] == "no"
    assert cells["| `Qwen3ForCausalLM`"] == ""


def test_tests_that_contradict_each_other_are_named() -> None:
    both = {Proof("ranks", works, "llama", published=False) for works in (True, False)}
    with pytest.raises(ValueError, match="LlamaForCausalLM: tests prove ranks"):
        proven(both)


def test_an_architecture_that_the_table_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="MistakenForCausalLM is not in the table"):
        proven({Proof("tokens", True, "MistakenForCausalLM", published=True)})


def test_shapes_have_the_architecture_of_their_config() -> None:
    assert architecture_of("llama4-multimodal") == "Llama4ForConditionalGeneration"
    assert architecture_of("mamba2") == "Mamba2ForCausalLM"
