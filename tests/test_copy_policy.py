"""Prompt lookup against a brute-force search that reads like its definition."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.copy_policy import NgramIndex, prompt_lookup


def brute_force(tokens, k, max_ngram):
    for n in range(min(max_ngram, len(tokens)), 0, -1):
        suffix = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):  # most recent first; a token must follow
            if tokens[start : start + n] == suffix:
                return tokens[start + n : start + n + k]
    return []


def test_worked_example():
    assert prompt_lookup([7, 1, 2, 3, 9, 9, 1, 2, 3, 4, 5, 8, 2, 3], 4) == [4, 5, 8, 2]


def test_nothing_to_copy():
    assert prompt_lookup([], 4) == prompt_lookup([1], 4) == prompt_lookup([1, 2, 3], 4) == []
    assert prompt_lookup([1, 1], 4) == [1]  # a draft may be shorter than k: only one token followed
    with pytest.raises(ValueError, match="max_ngram must be at least 1, got 0"):
        prompt_lookup([1, 2], 4, max_ngram=0)


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    k=st.integers(1, 8),
    max_ngram=st.integers(1, 5),
    cut=st.integers(0, 40),
)
def test_equals_brute_force_whole_and_grown(tokens, k, max_ngram, cut):
    """A small alphabet makes overlapping and repeated matches common; growing the index token by token must give
    the drafts of a fresh one."""
    assert prompt_lookup(tokens, k, max_ngram) == brute_force(tokens, k, max_ngram)
    index = NgramIndex(tokens[:cut], max_ngram)
    index.extend(tokens[cut:])
    assert index.draft(k) == brute_force(tokens, k, max_ngram)


def test_linear_in_the_request():
    """A scan of the request for each suffix is quadratic on repetitive text. Work is counted, not timed: 100,000
    tokens of one id enter at most max_ngram n-grams each."""
    index = NgramIndex([5] * 100_000)
    assert index.draft(16) == [5]
    assert len(index._behind) == 3
