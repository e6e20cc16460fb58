from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import DataError
from tracekit.tasks import PromptSampler


@given(st.integers(1, 30), st.lists(st.integers(0, 40), max_size=8))
def test_every_problem_comes_once_an_epoch(size, counts):
    sampler = PromptSampler(size, seed=3)
    drawn = [index for count in counts for index in sampler.next(count)]
    seen = Counter(drawn)
    epochs, rest = divmod(len(drawn), size)
    assert all(seen[index] in (epochs, epochs + bool(rest)) for index in range(size))
    for epoch in range(epochs):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(st.integers(0, 70), st.integers(0, 70))
def test_state_continues_the_order_exactly(before, after):
    whole = PromptSampler(30, seed=1).next(before + after)
    first = PromptSampler(30, seed=1)
    assert first.next(before) == whole[:before]
    resumed = PromptSampler(30, seed=1)
    resumed.load_state_dict(first.state_dict())
    assert resumed.next(after) == whole[before:]


def test_orders_differ_by_seed_and_epoch():
    sampler = PromptSampler(50, seed=0)
    first, second = sampler.next(50), sampler.next(50)
    assert first != second and first != PromptSampler(50, seed=1).next(50)


@pytest.mark.parametrize(
    ("other", "named"),
    [((31, 1, "a"), "size"), ((30, 2, "a"), "seed"), ((30, 1, "b"), "fingerprint")],
)
def test_another_runs_state_is_refused(other, named):
    state = PromptSampler(30, seed=1, fingerprint="a").state_dict()
    with pytest.raises(DataError, match=named):
        PromptSampler(*other).load_state_dict(state)
