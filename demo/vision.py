"""The vision demo model: a tower and a small Llama in transformers' SmolVLM, its tokenizer, and
conversations about pictures as its token ids."""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from torch.utils.data import IterableDataset
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

from drawings import NAMES, Picture, draw
from picture_questions import ask, ask_nothing
from turns import Turn

SIDE, PATCH, SCALE = 96, 16, 2  # pixels of a picture and of a patch; patches of a token's side
ROW = SIDE // PATCH  # patches
IMAGE_TOKENS = (ROW // SCALE) ** 2
HIDDEN, HEAD_SIZE, INNER = 128, 32, 256
TOWER_LAYERS, LAYERS, KV_HEADS = 3, 2, 2
CONTEXT = 2048
VOCABULARY = 640
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
SPECIAL = (END_OF_TEXT, START, END, IMAGE, AROUND, WHOLE)
CHAT_TEMPLATE = Path(__file__).parent / "vision_chat_template.jinja"
# Words and single digits, with the space before them.
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
_SYSTEMS = ("You are a helpful assistant.", "You describe pictures.", "Answer briefly.")
_TEXTS = 8000
# Shares of the conversations with a system prompt, with a turn without a picture, and of the
# messages whose text is before the picture.
_WITH_SYSTEM, _BLIND, _TEXT_FIRST = 0.1, 0.08, 0.4
_MORE_TURNS, _MORE_PICTURES = (0, 1, 1), 0.15
_USES = 4  # of a picture, each with other questions
_NOTHING = 0.2  # weight of a patch without a centre
_SORTED = 8  # batches whose conversations are made together and sorted by their length


class Said(NamedTuple):
    """A turn with the picture that the message shows, if it shows one."""

    turn: Turn
    picture: Picture | None = None
    text_first: bool = False

    @property
    def message(self) -> str:
        """The message as the chat template writes it."""
        image = IMAGE if self.picture else ""
        text = self.turn.prompt
        return text + image if self.text_first else image + text


class Conversation(NamedTuple):
    """What is said, after a system prompt if there is one."""

    said: tuple[Said, ...]
    system: str = ""

    @property
    def parts(self) -> Iterator[tuple[str, bool]]:
        """The text as the chat template writes it, and whether the model writes the part."""
        if self.system:
            yield f"{START}system\n{self.system}{END}\n", False
        for said in self.said:
            yield f"{START}user\n{said.message}{END}\n{START}assistant\n", False
            yield f"{said.turn.reply}{END}", True
            yield "\n", False


class Batch(NamedTuple):
    """Conversations, one in a row and padded on the right.

    `pixels` [pictures, SIDE, SIDE, 3] are bytes; `names` [pictures, patches] says what has its
    centre in a patch, an index in drawings.NAMES or their number for nothing; `ids` is
    [rows, width]; `places` are the flat positions with a label in `labels`.
    """

    pixels: torch.Tensor
    names: torch.Tensor
    ids: torch.Tensor
    places: torch.Tensor
    labels: torch.Tensor


def converse(rng: random.Random, show: Callable[[random.Random], Picture]) -> Conversation:
    """A conversation about one picture or two that `show` returns; sometimes there is a question
    before the first one."""
    system = rng.choice(_SYSTEMS) if rng.random() < _WITH_SYSTEM else ""
    said: list[Said] = []
    if rng.random() < _BLIND:
        said.append(Said(ask_nothing(rng)))
    for _ in range(2 if rng.random() < _MORE_PICTURES else 1):
        picture = show(rng)
        said.append(Said(ask(rng, picture), picture, rng.random() < _TEXT_FIRST))
        said += [Said(_worded(rng, picture)) for _ in range(rng.choice(_MORE_TURNS))]
    return Conversation(tuple(said), system)


def _worded(rng: random.Random, picture: Picture) -> Turn:
    while not (turn := ask(rng, picture)).prompt:
        pass
    return turn


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE tokenizer of questions and answers: every text can be encoded."""
    rng = random.Random(seed)
    pictures = [draw(rng) for _ in range(_TEXTS // 8)]
    turns = [ask(rng, rng.choice(pictures)) for _ in range(_TEXTS)]
    turns += [ask_nothing(rng) for _ in range(_TEXTS // 4)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        show_progress=False,
    )
    texts = [text for turn in turns for text in (turn.prompt, turn.reply)]
    roles = ["system", "user", "assistant"] * _TEXTS  # a token each
    tokenizer.train_from_iterator([*texts, *_SYSTEMS, *roles], trainer)
    return tokenizer


def pixels_of(image: Image.Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes [SIDE, SIDE, 3] that the tower reads."""
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS))


class Example(NamedTuple):
    """A conversation as token ids; `written` are the positions of those that the model writes."""

    ids: list[int]
    written: list[int]
    pictures: list[Picture]


def encode(tokenizer: Tokenizer, conversation: Conversation) -> Example:
    """The conversation, with the tokens of its images."""
    expanded = f"{AROUND}{WHOLE}{IMAGE * IMAGE_TOKENS}{AROUND}"
    ids: list[int] = []
    written: list[int] = []
    for text, by_model in conversation.parts:
        found = tokenizer.encode(text.replace(IMAGE, expanded)).ids
        if by_model:
            written += range(len(ids), len(ids) + len(found))
        ids += found
    return Example(ids, written, [said.picture for said in conversation.said if said.picture])


def batch_of(examples: Sequence[Example]) -> Batch:
    """A batch of these conversations."""
    width = max(len(example.ids) for example in examples)
    shown = [picture for example in examples for picture in example.pictures]
    pixels = [pixels_of(picture.image) for picture in shown]
    names = torch.full((len(shown), ROW * ROW), len(NAMES))
    for at, picture in enumerate(shown):
        for x, y, name in picture.centres:
            names[at, int(y * ROW) * ROW + int(x * ROW)] = name
    return Batch(
        torch.from_numpy(np.array(pixels, np.uint8).reshape(-1, SIDE, SIDE, 3)),
        names,
        torch.tensor([example.ids + [0] * (width - len(example.ids)) for example in examples]),
        torch.tensor(
            [n * width + at - 1 for n, each in enumerate(examples) for at in each.written]
        ),
        torch.tensor([each.ids[at] for each in examples for at in each.written]),
    )


class Pool:
    """Shows new pictures, each several times. In between there are many others."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._pictures: list[Picture] = []

    def show(self, rng: random.Random) -> Picture:
        """A picture that was shown seldom."""
        if len(self._pictures) < self._size:
            self._pictures.append(draw(rng))
            return self._pictures[-1]
        at = rng.randrange(self._size)
        if rng.random() < 1 / _USES:
            self._pictures[at] = draw(rng)
        return self._pictures[at]


class Batches(IterableDataset[Batch]):
    """Endless batches of `rows` new conversations; each worker of a DataLoader makes others."""

    def __init__(self, tokenizer: Tokenizer, rows: int, seed: int) -> None:
        self._tokenizer, self._rows, self._seed = tokenizer, rows, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self._seed} {worker.id if worker else 0}")
        pool = Pool()
        while True:
            made = [
                encode(self._tokenizer, converse(rng, pool.show))
                for _ in range(_SORTED * self._rows)
            ]
            made.sort(key=lambda example: len(example.ids))
            parts = [made[at : at + self._rows] for at in range(0, len(made), self._rows)]
            rng.shuffle(parts)
            yield from map(batch_of, parts)


def new_model(tokenizer: Tokenizer) -> SmolVLMForConditionalGeneration:
    """The untrained model, float32."""
    ends = [tokenizer.token_to_id(token) for token in (END, END_OF_TEXT)]
    fields: dict[str, Any] = {"pad_token_id": ends[1], "eos_token_id": ends}
    config = SmolVLMConfig(
        vision_config={
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": TOWER_LAYERS,
            "num_attention_heads": HIDDEN // HEAD_SIZE,
            "image_size": SIDE,
            "patch_size": PATCH,
            "initializer_range": 0.05,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HIDDEN // HEAD_SIZE,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_SIZE,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.05,
            "pad_token_id": ends[1],
            "bos_token_id": None,
            "eos_token_id": ends,
            "tie_word_embeddings": True,
        },
        scale_factor=SCALE,
        image_token_id=tokenizer.encode(IMAGE).ids[0],
        tie_word_embeddings=True,
        **fields,
    )
    return SmolVLMForConditionalGeneration(config)


def loss_of(
    model: SmolVLMForConditionalGeneration, batch: Batch, namer: torch.nn.Linear
) -> torch.Tensor:
    """Mean cross entropy of the tokens that the model writes, and of what `namer` says is in each
    patch from the tower's states: so the tower learns to see from few pictures."""
    scores, seen = logits(model, batch)
    loss = functional.cross_entropy(scores, batch.labels)
    weights = torch.ones(len(NAMES) + 1)
    weights[-1] = _NOTHING
    named = namer(seen).float().flatten(0, 1)
    return loss + functional.cross_entropy(named, batch.names.flatten(), weights)


def logits(
    model: SmolVLMForConditionalGeneration, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [places, VOCABULARY] of the positions with a label, float32, and the tower's states
    [pictures, patches, HIDDEN]."""
    inner: Any = model.model
    embedding = inner.text_model.get_input_embeddings()
    embedded = embedding(batch.ids)
    pixels = (batch.pixels.permute(0, 3, 1, 2).float() / 127.5 - 1).to(embedded.dtype)
    seen = inner.vision_model(pixels).last_hidden_state
    is_image = (batch.ids == model.config.image_token_id)[..., None]
    embedded = embedded.masked_scatter(is_image, inner.connector(seen))
    hidden = inner.text_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    wanted = hidden.reshape(-1, HIDDEN).index_select(0, batch.places)
    return functional.linear(wanted, embedding.weight).float(), seen


def save(model: SmolVLMForConditionalGeneration, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights (bfloat16), tokenizer, chat template and configuration as transformers does."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    cast(Any, model).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    edge = {"longest_edge": SIDE}
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": {
            "image_processor_type": "SmolVLMImageProcessor",
            "do_image_splitting": False,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "max_image_size": edge,
            "size": edge,
        },
        "processor_config.json": {
            "processor_class": "SmolVLMProcessor",
            "image_seq_len": IMAGE_TOKENS,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "eos_token": END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE.read_text(encoding="utf-8"),
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
