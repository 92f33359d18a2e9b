"""Train the bundled embedding model: a small encoder whose vectors of a question and its answer are
similar.

`python demo/train_embeddings.py --out common/headrace_common/demo_embeddings` makes the
shipped files. Runs on a CPU; with the same versions, machine type and `--threads` the result
is the same. The loss is a softmax over the cosines of a batch (van den Oord et al., 2018,
arXiv:1807.03748).
"""

import argparse
import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional
from tqdm import tqdm
from transformers import BertConfig, BertModel

from knowledge import Topic, topics
from passages import fact
from turns import casual

SEED = 21
STEPS = 240
PAIRS_PER_STEP = 48
VOCABULARY = 2048
POSITIONS = 256
HIDDEN = 128
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 50
TEMPERATURE = 0.05
DROPPED_WORDS = 0.1  # share of words left out, so that single words matter less


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of lower-cased text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<pad>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def new_model() -> BertModel:
    """The untrained encoder, float32."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertModel(config, add_pooling_layer=False)


def embed(model: BertModel, tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """Normalised means of the last hidden states, [texts, hidden]."""
    rows = [tokenizer.encode(text).ids[:POSITIONS] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return functional.normalize(means, dim=-1)


def pairs(rng: random.Random, known: Sequence[Topic]) -> list[tuple[str, str]]:
    """Pairs of texts that belong together. No two pairs fit each other; half are about a topic."""
    found = [_about(rng, topic) for topic in rng.sample(known, PAIRS_PER_STEP // 2)]
    facts: dict[str, str] = {}
    while len(found) + len(facts) < PAIRS_PER_STEP:
        sentence, question = fact(rng)
        facts.setdefault(casual(rng, question), _thinned(rng, sentence))
    return [*found, *facts.items()]


def _about(rng: random.Random, topic: Topic) -> tuple[str, str]:
    """A question, and an answer or another question."""
    question = casual(rng, rng.choice(topic.training))
    others = [*topic.answers, *filter(None, [topic.more])]
    other = rng.choice(topic.training if rng.random() < 0.3 else others)
    return _thinned(rng, question), _thinned(rng, other)


def _thinned(rng: random.Random, text: str) -> str:
    words = text.split()
    kept = [word for word in words if len(words) < 4 or rng.random() > DROPPED_WORDS]
    return " ".join(kept) or text


def train(model: BertModel, tokenizer: Tokenizer, known: Sequence[Topic], steps: int) -> None:
    """Train with AdamW. The learning rate rises over WARM_UP_STEPS, then falls linearly to zero."""
    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    bar = tqdm(range(steps), desc="training", unit="step", mininterval=10)
    for step in bar:
        for group in optimizer.param_groups:
            rate = min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - step / steps)
            group["lr"] = LEARNING_RATE * rate
        questions, others = zip(*pairs(rng, known), strict=True)
        vectors = embed(model, tokenizer, [*questions, *others])
        cosines = vectors[:PAIRS_PER_STEP] @ vectors[PAIRS_PER_STEP:].T / TEMPERATURE
        wanted = torch.arange(PAIRS_PER_STEP)
        loss = functional.cross_entropy(cosines, wanted) + functional.cross_entropy(
            cosines.T, wanted
        )
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item() / 2:.3f}", refresh=False)


def found(model: BertModel, tokenizer: Tokenizer, known: Sequence[Topic]) -> tuple[int, int, int]:
    """Counts of the held-out questions: nearest to an answer of their own topic, with such an
    answer among the nearest three, and all."""
    answers = [(at, text) for at, topic in enumerate(known) for text in topic.answers]
    asked = [(at, text) for at, topic in enumerate(known) for text in topic.held_out]
    with torch.no_grad():
        places = embed(model, tokenizer, [text for _, text in answers])
        near = (embed(model, tokenizer, [text for _, text in asked]) @ places.T).topk(3).indices
    ranks = [
        [answers[place][0] for place in row].index(at)
        if at in [answers[place][0] for place in row]
        else 3
        for (at, _), row in zip(asked, near.tolist(), strict=True)
    ]
    return ranks.count(0), len(ranks) - ranks.count(3), len(ranks)


def save(model: BertModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights (bfloat16), tokenizer and configuration, as sentence-transformers does."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "1_Pooling").mkdir(parents=True)
    model.bfloat16().save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, (path, kind) in enumerate(parts)
    ]
    (out / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
    (out / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2) + "\n")


def main() -> None:
    """Train and save the model, then show how well it finds answers."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    known = [*topics("headrace"), *topics("talk")]
    texts = [text for topic in known for text in (*topic.training, *topic.answers, topic.more)]
    texts += [text for _ in range(2000) for text in fact(rng)]
    tokenizer = train_tokenizer(texts)
    model = new_model()
    print(f"{model.num_parameters():,} parameters, {len(known)} topics")
    began = time.monotonic()
    train(model, tokenizer, known, arguments.steps)
    print(f"trained for {(time.monotonic() - began) / 60:.1f} minutes")
    nearest, among, total = found(model, tokenizer, known)
    print(f"held-out questions: {nearest} of {total} nearest, {among} among the nearest three")
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
