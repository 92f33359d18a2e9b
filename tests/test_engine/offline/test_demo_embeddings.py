"""The bundled embedding model: it is small, loads with standard tools and finds answers."""

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, BertModel

from headrace_common.text.checkpoint import DEMO_EMBEDDINGS, demo_folder
from headrace_engine import LLM
from knowledge import topics
from train_embeddings import embed, found

FOLDER = demo_folder(DEMO_EMBEDDINGS)
LIMIT_BYTES = 2_000_000
TEXTS = ["Anna lives in Lisbon.", "The mill belongs to Felix.", "Ida has 12 ducks."]


@pytest.fixture(scope="module")
def model() -> BertModel:
    torch.set_num_threads(1)
    return BertModel.from_pretrained(FOLDER, add_pooling_layer=False, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_the_files_are_small() -> None:
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= LIMIT_BYTES
    assert AutoConfig.from_pretrained(FOLDER).architectures == ["BertModel"]


def test_most_questions_that_were_not_in_its_text_find_their_answer(
    model: BertModel, tokenizer: Tokenizer
) -> None:
    nearest, among, total = found(model, tokenizer, [*topics("headrace"), *topics("talk")])

    assert total > 100
    assert nearest >= 0.7 * total
    assert among >= 0.85 * total


def test_the_engine_makes_the_vectors_of_transformers(
    model: BertModel, tokenizer: Tokenizer
) -> None:
    llm = LLM(DEMO_EMBEDDINGS, dtype="float32")
    made = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS)])
    with torch.no_grad():
        expected = embed(model, tokenizer, TEXTS)

    torch.testing.assert_close(made, expected, atol=1e-4, rtol=0)
