"""Incremental text: however the tokens are cut, the text is that of decoding them at once."""

import random

import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_common.text.detokenizer import ChoiceText, Detokenizer, StopMatcher
from headrace_common.text.tokenizer import Tokenizer
from headrace_testing.tokenizers import byte_level_tokenizer, metaspace_tokenizer

TEXTS = (
    "Hello world, this is plain.",
    "你好世界 mixed with naïve café 🙂🙃🦊 end",
    "  leading   spaces\n\nand lines\t",
    "Привет, мир! " * 20,
)


@pytest.fixture(scope="module", params=["byte-level", "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "byte-level":
        backend, specials = byte_level_tokenizer(), {"eos_token": "<|im_end|>"}
    else:
        backend, specials = metaspace_tokenizer(), {"bos_token": "<s>", "eos_token": "</s>"}
    eos = backend.token_to_id(specials["eos_token"])
    assert eos is not None
    return Tokenizer(backend, special_tokens=specials, eos_token_ids=[eos])


def pieces(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push([token]) for token in output), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)

    assert "".join(pieces(tokenizer, [], ids)) == tokenizer.decode(ids) == text


def test_no_piece_holds_half_a_character(tokenizer: Tokenizer) -> None:
    shown = pieces(tokenizer, [], tokenizer.encode("🦊🙂 你好"))

    assert "\ufffd" not in "".join(shown)


@pytest.mark.parametrize("cut", range(1, 12))
def test_output_continues_the_prompts_text(tokenizer: Tokenizer, cut: int) -> None:
    text = "The quick brown fox jumps over the lazy dog"
    ids = tokenizer.encode(text)

    output = "".join(pieces(tokenizer, ids[:cut], ids[cut:]))

    assert tokenizer.decode(ids[:cut]) + output == text


def test_pieces_are_the_same_in_larger_steps(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXTS[1])
    whole = Detokenizer(tokenizer)

    assert whole.push(ids) + whole.flush() == "".join(pieces(tokenizer, [], ids))


def test_random_bytes_are_output_and_not_held_back_indefinitely(tokenizer: Tokenizer) -> None:
    generator = random.Random(7)
    ids = [generator.randrange(3, 259) for _ in range(2000)]
    detokenizer = Detokenizer(tokenizer)

    shown = [detokenizer.push([token]) for token in ids]

    held = max(len(run) for run in "".join("x" if s else "." for s in shown).split("x"))
    assert held < 70


def test_random_bytes_of_a_byte_level_tokenizer_equal_the_whole_text() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), special_tokens={}, eos_token_ids=[])
    generator = random.Random(11)
    for _ in range(50):
        ids = [generator.randrange(3, 259) for _ in range(120)]
        assert "".join(pieces(tokenizer, [], ids)) == tokenizer.decode(ids)


class Decoding(Tokenizer):
    """A tokenizer that knows no token's text by itself: every piece is decoded with what precedes
    it."""

    def fixed_text(self, token_id: int) -> str | None:
        return None


@pytest.mark.parametrize("skip", [True, False])
def test_cached_texts_of_single_tokens_equal_decoding(tokenizer: Tokenizer, skip: bool) -> None:
    whole = Decoding(
        tokenizer._backend,
        special_tokens=tokenizer.special_tokens,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    generator = random.Random(5)
    texts = [tokenizer.encode(text) for text in TEXTS]
    for _ in range(60):
        noise = [generator.randrange(tokenizer.vocab_size + 3) for _ in range(20)]
        ids = [*noise[:4], *generator.choice(texts)[:30], *noise[4:], *generator.choice(texts)[:9]]
        prompt = ids[: generator.randrange(4)]
        fast = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
        slow = Detokenizer(whole, prompt, skip_special_tokens=skip)

        assert [fast.push([i]) for i in ids] == [slow.push([i]) for i in ids]
        assert fast.flush() == slow.flush()


def test_a_tokens_text_is_cached_only_if_neighbours_do_not_change_it(
    tokenizer: Tokenizer,
) -> None:
    hello, part = tokenizer.encode("Hello")[-1], tokenizer.encode("🎈")[-1]
    unknown = tokenizer.vocab_size + 7

    assert tokenizer.fixed_text(hello)
    assert [tokenizer.fixed_text(i) for i in (part, tokenizer.eos_token_ids[0], unknown)] == [
        None
    ] * 3


def test_special_tokens_are_skipped_unless_requested(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_ids[0]
    ids = [*tokenizer.encode("Hello"), eos]

    shown = Detokenizer(tokenizer, skip_special_tokens=False)

    assert Detokenizer(tokenizer).push(ids) == "Hello"
    assert shown.push(ids) == "Hello" + str(tokenizer.id_to_token(eos))


def scan(stops: list[str], texts: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop=include)
    shown = ""
    for text in texts:
        result = matcher.push(text)
        shown += result.text
        if result.stop is not None:
            return shown, result.stop
    return shown + matcher.flush(), None


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_span_pieces(include: bool) -> None:
    expected = "one END" if include else "one "

    assert scan(["END"], ["one E", "N", "D two"], include=include) == (expected, "END")


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["\n\nUser:"])

    assert matcher.push("text\n").text == "text"
    assert matcher.push("more\n\nUs").text == "\nmore"
    assert matcher.push("ed").text == "\n\nUsed"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert scan(["late stop", "stop"], ["a late stop"]) == ("a ", "late stop")
    assert scan(["abcd", "bc"], ["abcd"]) == ("a", "bc")


def test_a_stop_string_that_repeats_itself_is_found() -> None:
    assert scan(["aab"], list("aaab")) == ("a", "aab")


def test_stop_matching_does_not_depend_on_how_text_is_split() -> None:
    generator = random.Random(3)
    for _ in range(500):
        stops = [
            "".join(generator.choices("ab", k=generator.randint(1, 4)))
            for _ in range(generator.randint(1, 3))
        ]
        text = "".join(generator.choices("abc", k=20))
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        end, _, stop = min(ends, default=(len(text), 0, None))
        expected = text[: end - len(stop or "")]

        assert scan(stops, list(text)) == (expected, stop)
        assert scan(stops, [text[:7], text[7:]]) == (expected, stop)


def choice(tokenizer: Tokenizer, **params: object) -> ChoiceText:
    return ChoiceText(tokenizer, [], SamplingParams(**params))  # type: ignore[arg-type]


def test_tokens_after_a_stop_string_do_not_count(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world, this is")
    position = next(i for i in range(len(ids)) if "world" in tokenizer.decode(ids[: i + 1]))

    piece = choice(tokenizer, stop=["world"]).push(ids)

    assert (piece.text, piece.tokens, piece.stop) == ("Hello ", position + 1, "world")


def test_a_stop_tokens_text_is_hidden_unless_included(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world")
    last = tokenizer.decode(ids)[len(tokenizer.decode(ids[:-1])) :]

    hidden = choice(tokenizer).push(ids, finish_reason="stop", stop_token=ids[-1])
    included = choice(tokenizer, include_stop_str_in_output=True).push(
        ids, finish_reason="stop", stop_token=ids[-1]
    )

    assert hidden.text + last == included.text == "Hello world"
    assert hidden.tokens == len(ids)


def test_a_possible_stop_string_is_output_at_the_end(tokenizer: Tokenizer) -> None:
    text = choice(tokenizer, stop=["world!"])
    first = text.push(tokenizer.encode("Hello world"))
    last = text.push([], finish_reason="length")

    assert first.text + last.text == "Hello world"


def test_stop_strings_count_only_after_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world")

    piece = choice(tokenizer, stop=["H"], min_tokens=len(ids), max_tokens=100).push(ids)

    assert (piece.text, piece.stop) == ("Hello world", None)
