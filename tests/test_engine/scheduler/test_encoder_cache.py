"""Which images a step encodes, and which encoded ones are dropped: least recently used first,
within a budget of a step and the room for encoded images. No image waits indefinitely."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.core.images import PromptImage
from headrace_engine.scheduler.encoder_cache import EncoderCache, whole_images
from headrace_testing.engine import prompt_image


def step(cache: EncoderCache, *runs: tuple[list[PromptImage], int, int]) -> tuple[list[int], str]:
    """The ends of a step's runs, and the images that it encodes and drops (after a -)."""
    ends = [cache.reach(*run) for run in runs]
    encoded, dropped = cache.finish_step()
    names = [each.span.digest.decode().strip() for each in encoded]
    names += [f"-{digest.decode().strip()}" for digest in dropped]
    return ends, " ".join(names)


def test_a_run_encodes_the_images_that_it_reads() -> None:
    cache = EncoderCache(capacity=100, budget=100)
    images = [prompt_image("a", 2, 4), prompt_image("b", 10, 4), prompt_image("c", 20, 4)]
    assert step(cache, (images, 0, 12)) == ([12], "a b")
    assert step(cache, (images, 12, 20)) == ([20], "")
    assert step(cache, (images, 20, 30)) == ([30], "c")
    assert (cache.queries, cache.hits, cache.encoded) == (3, 0, 3)


def test_runs_of_several_prompts_share_an_image() -> None:
    cache = EncoderCache(capacity=100, budget=100)
    runs = [([prompt_image("a", start, 4)], 0, 20) for start in (2, 3, 4)]
    assert step(cache, *runs) == ([20, 20, 20], "a")
    assert (cache.queries, cache.hits, cache.encoded) == (3, 2, 1)


def test_a_run_ends_before_an_image_beyond_the_budget_of_the_step() -> None:
    cache = EncoderCache(capacity=100, budget=6)
    images = [prompt_image("a", 2, 4), prompt_image("b", 10, 4)]
    assert step(cache, (images, 0, 20), ([prompt_image("c", 0, 4)], 0, 9)) == ([10, 0], "a")
    assert step(cache, (images, 10, 20), ([prompt_image("c", 0, 4)], 0, 9)) == ([20, 0], "b")
    assert step(cache, ([prompt_image("c", 0, 4)], 0, 9)) == ([9], "c")


def test_an_image_above_the_budget_is_encoded_alone() -> None:
    cache = EncoderCache(capacity=100, budget=6)
    large, small = [prompt_image("a", 0, 50)], [prompt_image("b", 0, 2)]
    assert step(cache, (large, 0, 9), (small, 0, 9)) == ([9, 0], "a")


def test_the_least_recently_used_image_is_dropped() -> None:
    cache = EncoderCache(capacity=10, budget=100)
    for name in ("a", "b", "a"):
        step(cache, ([prompt_image(name, 0, 5)], 0, 9))
    assert step(cache, ([prompt_image("c", 0, 5)], 0, 9)) == ([9], "c -b")
    assert step(cache, ([prompt_image("d", 0, 6)], 0, 9)) == ([9], "d -a -c")


def test_what_a_run_of_the_step_reads_is_not_dropped() -> None:
    cache = EncoderCache(capacity=10, budget=100)
    first, second = [prompt_image("a", 0, 5)], [prompt_image("b", 4, 6)]
    step(cache, (first, 0, 3))
    assert step(cache, (first, 3, 9), (second, 0, 9)) == ([9, 4], "")
    assert step(cache, (second, 4, 9)) == ([9], "b -a")


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    orders=st.lists(st.permutations(range(8)), min_size=1, max_size=6),
    budget=st.integers(1, 30),
)
def test_the_first_run_of_a_step_is_never_kept_waiting(
    sizes: list[int], orders: list[list[int]], budget: int
) -> None:
    """And the images that are kept never need more than the room."""
    cache = EncoderCache(capacity=20, budget=budget)
    kept: dict[bytes, int] = {}
    for order in orders:
        images = [prompt_image(str(at), 0, sizes[at]) for at in order if at < len(sizes)]
        ends = [cache.reach([one], 0, 5) for one in images]
        assert ends[0] == 5
        encoded, dropped = cache.finish_step()
        for digest in dropped:
            del kept[digest]
        for one in encoded:
            assert one.span.digest not in kept
            kept[one.span.digest] = one.span.length
        assert sum(kept.values()) <= 20
        for one, end in zip(images, ends, strict=True):
            assert end == (5 if one.span.digest in kept else 0)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 4, 4),  # before the image
        (0, 7, 5),  # the run ends before it
        (5, 7, 9),  # it begins with it, and contains all of it
        (6, 7, 9),  # after a prefix hit
        (0, 9, 9),
        (5, 12, 12),
    ],
)
def test_a_run_does_not_end_inside_a_whole_image(start: int, end: int, expected: int) -> None:
    images = [prompt_image("a", 5, 4)]
    assert whole_images(images, start, end) == expected


def test_a_run_without_blocks_for_a_whole_image_waits() -> None:
    assert whole_images([prompt_image("a", 5, 4)], 5, 7, grow=False) == 5
