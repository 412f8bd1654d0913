"""Prompt lookup against a brute-force search that reads like its definition."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.acceptance import replay_rows, rounds_from_runs
from drafter.archive import check_copy_policy
from drafter.copy_policy import POLICY_NGRAM, CopyPolicy, NgramIndex, prompt_lookup
from drafter.engine import DraftEngine, DraftRequest
from drafter.scoring import score_forward
from drafter.teacher_data import read_shards, shard_paths
from model_io import load_model


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


# ---------------------------------------------------------------------------- the policy

SURE = CopyPolicy((0.0, 0.1, 0.3, 1.0, math.inf, math.inf, math.inf, math.inf))


@pytest.fixture
def engine(chain):
    loaded = load_model(chain.model_dir, "packed", torch.float32)
    engine = DraftEngine(loaded)
    engine.loaded = loaded
    return engine


def test_the_candidate_is_the_first_id_of_the_draft():
    index = NgramIndex([7, 1, 2, 3, 9, 9, 1, 2, 3, 4, 5, 8, 2, 3], 3)
    assert index.candidate() == (2, 4)
    assert NgramIndex([1, 2, 3]).candidate() is None


def test_a_copy_overrides_below_its_limit_alone():
    policy, index = CopyPolicy((0.0, 1.0) + (5.0,) * 6), NgramIndex([1, 2, 3, 1, 2], POLICY_NGRAM)  # suffix 1 2, then 3
    assert policy.choose(index, 8, 0.9) == (3, "copy")
    assert policy.choose(index, 8, 1.0) == (8, "model")
    assert policy.choose(index, 3, 0.1) == (3, "model")  # the model says so itself
    assert policy.choose(NgramIndex([4, 5, 4], POLICY_NGRAM), 8, -1.0) == (5, "copy")
    assert policy.choose(NgramIndex([4, 5, 4], POLICY_NGRAM), 8, 0.0) == (8, "model")  # limit 0: never
    assert policy.choose(NgramIndex([4], POLICY_NGRAM), 8, 0.0) == (8, "model")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12).map(float), st.booleans(), st.booleans()), max_size=40))
def test_the_fitted_limits_win_the_most_tokens(cases):
    policy = CopyPolicy.fit(cases)
    for length in (1, 2, 3):
        own = [(gap, int(copy) - int(model)) for n, gap, copy, model in cases if n == length]

        def won(limit, own=own):
            return sum(gain for gap, gain in own if gap < limit)

        assert won(policy.limits[length - 1]) == max([0, *(won(gap + 1e-9) for gap, _ in own)])
    assert policy.limits[3:] == (0.0,) * (POLICY_NGRAM - 3)


def test_lengths_whose_copies_are_right_more_often_than_the_model_need_no_model():
    """From a length on: what is few is noise, and a longer suffix is no reason to doubt more."""
    cases = [(2, 1.0, True, True), (7, 0.5, True, False), (8, 2.0, True, True), (8, 3.0, False, True)]
    cases += [(7, 1.0, False, False)]
    assert CopyPolicy.fit(cases, agreement=0.4).limits[6:] == (math.inf, math.inf)
    assert CopyPolicy.fit(cases, agreement=0.4).limits[1] == 0.0  # between stand lengths of which nothing is known
    assert CopyPolicy.fit(cases, agreement=0.5).limits[6:] == (math.nextafter(0.5, math.inf), 0.0)
    assert math.inf not in CopyPolicy.fit([(8, 1.0, True, True)]).limits  # the default leaves none


def test_a_policy_is_its_document():
    assert CopyPolicy.read({"enabled": False}) is None
    policy = CopyPolicy((0.0, 0.5, 1.0, 2.0, 9.0, math.inf, math.inf, math.inf))
    assert CopyPolicy.read(check_copy_policy(json.loads(json.dumps(policy.document())))) == policy


@pytest.mark.parametrize("policy", [CopyPolicy((0.3, 0.6, 1.0, 2.0, 9.0, 9.0, 9.0, 9.0)), SURE], ids=["gaps", "sure"])
def test_teacher_forcing_with_the_policy_is_replay_with_it(chain, engine, policy):
    """tau says what is served: the policy acts in both, on the same text, and every token knows where it came from."""
    engine.copy_policy = policy
    paths = shard_paths(chain.recipe.cache_dir / "teacher", "development")
    rows, seen = read_shards(paths), set()
    scores = score_forward(engine.forward, rows, copy_policy=engine.copy_policy)
    assert any(one.copied for one in scores) == (math.inf in policy.limits)

    def draft(prefixes):
        drafts = engine.draft([DraftRequest(prefix, 16) for prefix in prefixes])
        assert all(len(one.sources) == len(one.tokens) for one in drafts)
        seen.update(source for one in drafts for source in one.sources)
        return [one.tokens for one in drafts]

    replayed = replay_rows([(r.prompt_ids, r.continuation_ids, r.finish_reason) for r in rows], 16, draft)
    by_bits = [rounds_from_runs(one.runs, row.finish_reason, 16) for one, row in zip(scores, rows, strict=True)]
    assert [[one.accepted for one in row] for row in replayed] == [[one.accepted for one in row] for row in by_bits]
    assert seen == {"model", "copy"}


# ---------------------------------------------------------------------------- drafts with copies


@torch.inference_mode()
def one_by_one(loaded, policy, tokens, k) -> tuple[list[int], list[str]]:
    """The definition: the model is asked for every token, by a plain forward, and the policy decides."""
    drafted, sources = [], []
    while len(drafted) < k and not set(drafted[-1:]) & loaded.stop_ids:
        text = [*tokens, *drafted]
        best, ids = loaded.model(input_ids=torch.tensor([text])).logits[0, -1, : loaded.num_ids].topk(2)
        index = NgramIndex(text, POLICY_NGRAM)
        token, source = policy.choose(index, int(ids[0]), float(best[0] - best[1]))
        drafted.append(token)
        sources.append("copy" if policy.sure(index) is not None else source)
    return drafted, sources


def requests(chain):
    """Ends of real texts: where the model goes on by itself, and where it stands in a passage that it has copied."""
    rows = read_shards(shard_paths(chain.recipe.cache_dir / "teacher", "development"))[:10]
    texts = [[*row.prompt_ids, *row.continuation_ids[: 2 * at]] for at, row in enumerate(rows)]
    texts += [[*text[-60:], *text[-60 : -60 + 3 * at]] for at, text in enumerate(texts, 1)]
    return [DraftRequest(text, 3 + at % 14) for at, text in enumerate(texts)]


def test_copies_fed_late_change_no_draft(chain, engine):
    """Runs are fed with the token behind them, in batches, cold and warm; each draft is as if each token were asked."""
    engine.copy_policy, wanted = SURE, requests(chain)
    expected = [one_by_one(engine.loaded, SURE, one.tokens, one.k) for one in wanted]
    for batches in (
        [wanted],
        [[one] for one in wanted],
        [wanted[::-1]],
        [wanted[at : at + 5] for at in range(0, 20, 5)],
    ):
        found = {id(one): draft for batch in batches for one, draft in zip(batch, engine.draft(batch), strict=True)}
        drafts = [found[id(one)] for one in wanted]
        assert [(draft.tokens, draft.sources) for draft in drafts] == expected
    assert all(draft.finish_reason == ("stop" if draft.tokens[-1] in (256, 258) else "length") for draft in drafts)


class Counted:
    """A forward pass that remembers what it was fed."""

    def __init__(self, forward):
        self.forward, self.fed = forward, []

    def __call__(self, cache, tokens, *places, **more):
        self.fed += tokens
        return self.forward(cache, tokens, *places, **more)

    def __getattr__(self, name):
        return getattr(self.forward, name)


def test_a_draft_of_copies_alone_asks_no_model(engine):
    """And where the copied passage holds a stop id, the draft ends with it. What was never fed is not in the cache."""
    engine.copy_policy, passage = SURE, list(range(40, 60))
    engine.forward = counted = Counted(engine.forward)
    draft = engine.draft([DraftRequest([*passage, *passage[:5]], 12)])[0]
    assert (draft.tokens, draft.sources, counted.fed) == (passage[5:17], ["copy"] * 12, [])
    draft = engine.draft([DraftRequest([*passage, 258, *passage[:17]], 12)])[0]
    assert (draft.tokens, draft.finish_reason, counted.fed) == ([*passage[17:], 258], "stop", [])
    request = [*passage, *passage[:5], 7]
    assert engine.draft([DraftRequest(request, 1)])[0].sources == ["model"] and counted.fed == request
