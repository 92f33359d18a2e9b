"""Cross-encoders: each pair's score equals transformers', in any batch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace_common.text.checkpoint import is_cross_encoder
from headrace_common.text.tokenizer import Tokenizer
from headrace_testing.embedders import embed, save_cross_encoder

PAIRS = [
    ("where is the river", "the river is in the valley"),
    ("mill", "a mill grinds corn, and the water turns its wheel " * 3),
    ("water", "w"),
    ("a wheel of the mill turns", "b"),
]


def reference(folder: Path, *, sigmoid: bool) -> list[float]:
    """Each pair alone, with the token types of the tokenizer itself."""
    load: Any = transformers.AutoModelForSequenceClassification.from_pretrained
    model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
    load_tokenizer: Any = transformers.PreTrainedTokenizerFast
    tokenizer = load_tokenizer(tokenizer_file=str(folder / "tokenizer.json"), pad_token="<pad>")
    types = getattr(model.config, "type_vocab_size", 1) > 1
    found = []
    for pair in PAIRS:
        inputs = tokenizer(*pair, return_tensors="pt", return_token_type_ids=types)
        with torch.inference_mode():
            score = model(**inputs).logits[0, 0]
        found.append(float(score.sigmoid() if sigmoid else score))
    return found


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
@pytest.mark.parametrize("shape", ["bert", "xlm-roberta", "electra", "modernbert"])
def test_scores_are_those_of_transformers(
    shape: str, activation: str | None, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"type_vocab_size": 2} if shape in ("bert", "electra") else {}
    folder = save_cross_encoder(tmp_path / "model", shape, **changes)
    config = json.loads((folder / "config.json").read_text())
    assert is_cross_encoder(config)
    if activation is not None:
        config["sentence_transformers"] = {"activation_fn": activation}
        (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(folder)
    prompts = [tokenizer.encode_pair(*pair) for pair in PAIRS]

    scores = [float(vector[0]) for vector in embed(folder, prompts)]

    assert len(set(scores)) == len(PAIRS)
    np.testing.assert_allclose(
        scores, reference(folder, sigmoid=activation is None), rtol=1e-5, atol=1e-6
    )


def test_a_classifier_of_several_labels_is_not_a_cross_encoder() -> None:
    names = ["BertForSequenceClassification"]
    assert not is_cross_encoder({"architectures": names, "id2label": {"0": "no", "1": "yes"}})
    assert not is_cross_encoder({"architectures": ["BertModel"], "num_labels": 1})
    assert is_cross_encoder({"architectures": names, "id2label": {"0": "LABEL_0"}})
