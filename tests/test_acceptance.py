"""Never / always / sometimes accept, with numbers worked out by hand, and replay as the oracle of the bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter import acceptance
from drafter.acceptance import Round, RoundCounts

# ---------------------------------------------------------------------------- hand-worked rows


def rounds_of(bits, finish_reason, k):
    return acceptance.rounds_from_runs(acceptance.run_lengths(bits), finish_reason, k)


def test_never_accept():
    """N = 5, nothing right: rounds at 1, 2, 3, 4 emit the bonus alone. tau = 4 / 4 = 1, its floor."""
    rounds = rounds_of([0, 0, 0, 0, 0], "stop", 4)
    assert rounds == [Round(s, 0, 1) for s in (1, 2, 3, 4)]
    counts = RoundCounts.of([rounds], 4)
    assert counts.tau() == 1.0
    assert counts.cumulative() == [0.0] * 4
    assert counts.conditional() == [0.0, None, None, None]


def test_always_accept():
    """N = 11, all right, k = 4: rounds at 1 and 6 accept 4 and emit 5 each: tau = 10 / 2 = 5 = k + 1, its ceiling."""
    counts = RoundCounts.of([rounds_of([1] * 11, "stop", 4)], 4)
    assert counts.tau() == 5.0
    assert counts.cumulative() == counts.conditional() == [1.0] * 4


def test_always_accept_and_the_text_ends_inside_the_draft():
    """N = 9, k = 4: start 1 accepts 4, emits 5; start 6 accepts 3, which end the text: no bonus, emits 3.
    tau = 8 / 2 = 4; position 4 is reached in one round of two."""
    rounds = rounds_of([1] * 9, "stop", 4)
    assert rounds == [Round(1, 4, 5), Round(6, 3, 3)]
    counts = RoundCounts.of([rounds], 4)
    assert counts.tau() == 4.0
    assert counts.cumulative() == [1.0, 1.0, 1.0, 0.5]


def test_bonus_that_is_the_stop_id_counts():
    """N = 6, k = 4, all right: start 1 accepts 4, and the target itself adds the stop id: emits 5 = N - 1."""
    assert rounds_of([1] * 6, "stop", 4) == [Round(1, 4, 5)]


def test_sometimes_accept():
    """The example of the module's docstring: bits 1 1 0 1 1 1.

    ended, k = 2: (1: 1 accepted, 2 emitted) (3: 2, 3) -> 5/2;  ended, k = 4: (1: 1, 2) (3: 3, no bonus, 3) -> 5/2
    cut,   k = 4: window 1..5 fits, window 3..7 does not -> 2/1;  cut, k = 5: window 1..6 does not fit -> no round
    """
    bits = [1, 1, 0, 1, 1, 1]
    assert rounds_of(bits, "stop", 2) == [Round(1, 1, 2), Round(3, 2, 3)]
    assert rounds_of(bits, "stop", 4) == [Round(1, 1, 2), Round(3, 3, 3)]
    assert rounds_of(bits, "length", 4) == [Round(1, 1, 2)]
    assert rounds_of(bits, "length", 5) == []


def test_length_cut_rounds_are_dropped_by_window_not_by_outcome():
    """A round at the end of a cut row that fails at once would be fully known; keeping it while dropping its
    successful neighbours would bias tau down, so the rule looks at the window only."""
    assert rounds_of([1, 0, 0, 0], "length", 2) == [Round(1, 0, 1)]  # window 2..4 passes the end (N = 4)
    assert rounds_of([1, 1, 1, 1], "length", 2) == [Round(1, 2, 3)]


def test_tau_is_pooled_over_rows():
    """Row a: 8 tokens in 2 rounds (4.0), row b: 2 tokens in 2 rounds (1.0): pooled 10 / 4 = 2.5; a row of one
    token has no round. The rows a user selects pool in the same way."""
    rows = [rounds_of([1] * 9, "stop", 4), rounds_of([0] * 3, "stop", 4), rounds_of([1], "stop", 4)]
    counts = RoundCounts.of(rows, 4)
    assert counts.tau() == 2.5
    assert counts.tau(np.array([True, False, False])) == 4.0
    assert counts.tau(np.array([False, False, True])) is None
    assert counts.conditional() == [0.5, 1.0, 1.0, 0.5]


def test_fixed_prefix_and_agreement():
    """bits 1 1 0 1 1 1, k = 2: starts 1..4 (start + 2 <= 6) accept 1, 0, 2, 2 -> 5 / 4. Agreement 5 / 6."""
    runs = [acceptance.run_lengths([1, 1, 0, 1, 1, 1]), acceptance.run_lengths([1])]
    assert acceptance.ratio(*acceptance.fixed_prefix_counts(runs[:1], 2)) == 1.25
    assert acceptance.fixed_prefix_counts(runs, 2)[1].tolist() == [4, 0]
    assert acceptance.ratio(*acceptance.agreement_counts(runs[:1])) == pytest.approx(5 / 6)


def test_agreement_and_tau_without_a_limit():
    """Each mistake costs one round: with independent bits of probability .72, tau at large k is 1 / .28 = 3.57,
    and tau@16 a little less."""
    bits = np.random.default_rng(0).random(200_000) < 0.72
    counts = RoundCounts.from_runs([acceptance.run_lengths(bits)], ["length"], 64)
    assert counts.tau() == pytest.approx(1 / 0.28, rel=0.01)


def test_wrong_arguments_name_the_value():
    with pytest.raises(ValueError, match="'eos'"):
        rounds_of([1, 1], "eos", 2)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        rounds_of([1, 1], "stop", 0)
    with pytest.raises(ValueError, match="at most 2 tokens was asked for, got 3"):
        acceptance.replay_rows([([1], [2, 3, 4], "stop")], 2, lambda prefixes: [[7, 7, 7]] * len(prefixes))


# ---------------------------------------------------------------------------- replay with real drafts is the oracle

STOP = 0


def stub_drafter(continuation, bits, k, prompt_length):
    """Autoregressive and greedy: right where the bit is set, else wrong (and then off the target's path, where it
    writes junk); ends with a stop id it believes in. Returns one draft for a prefix."""

    def draft(prefix):
        start, out = len(prefix) - prompt_length, []
        on_path = True
        while len(out) < k:
            at = start + len(out)
            on_path = on_path and at < len(continuation) and bool(bits[at])
            out.append(continuation[at] if on_path else 999)
            if out[-1] == STOP:
                break
        return out

    return draft


ROW = st.integers(1, 40).flatmap(
    lambda n: st.tuples(st.lists(st.booleans(), min_size=n, max_size=n), st.sampled_from(["stop", "length"]))
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=5), k=st.integers(1, 20))
def test_bits_equal_replay_and_invariants(rows, k):
    prompt = [5, 6, 7]
    full, drafters, by_bits = [], {}, []
    for index, (bits, reason) in enumerate(rows):
        continuation = [100 * (index + 1) + i for i in range(len(bits))]
        if reason == "stop":
            continuation[-1] = STOP
        full.append(([*prompt, index], continuation, reason))
        drafters[index] = stub_drafter(continuation, bits, k, len(prompt) + 1)
        by_bits.append(rounds_of(bits, reason, k))
    calls = []

    def draft_batch(prefixes):
        calls.append(len(prefixes))
        return [drafters[prefix[3]](prefix) for prefix in prefixes]

    replayed = acceptance.replay_rows(full, k, draft_batch)
    assert [[(r.start, r.accepted, r.emitted) for r in row] for row in replayed] == [
        [(r.start, r.accepted, r.emitted) for r in row] for row in by_bits
    ]
    assert calls == sorted(calls, reverse=True)  # rows leave the batch, none comes back
    for (bits, reason), row in zip(rows, by_bits, strict=True):
        covered = sum(r.emitted for r in row)
        if reason == "stop":
            assert covered == len(bits) - 1  # every token behind the first, once
        else:
            assert covered <= max(0, len(bits) - 1)
            assert not row or row[-1].start + k < len(bits)
        assert all(a.start + a.emitted == b.start for a, b in zip(row, row[1:], strict=False))
    counts = RoundCounts.of(by_bits, k)
    if counts.tau() is not None:
        assert 1 <= counts.tau() <= k + 1
        curve = counts.cumulative()
        assert curve == sorted(curve, reverse=True)


def test_short_and_empty_drafts():
    """A drafter with nothing to say: the round still emits the target's token. Continuation 1 2 3 stop, k = 3:
    start 1, no draft: emitted 1; start 2, draft [3]: accepted 1, bonus stop, emitted 2. tau = 3 / 2."""
    answers = iter([[[]], [[3]]])
    [rounds] = acceptance.replay_rows([([9], [1, 2, 3, STOP], "stop")], 3, lambda prefixes: next(answers))
    assert rounds == [Round(1, 0, 1, 0), Round(2, 1, 2, 1)]


# ---------------------------------------------------------------------------- intervals and near ties


def test_interval_matches_a_plain_loop():
    """The vectorised resampling against drawing rows one by one: same distribution, so nearly the same interval."""
    rng = np.random.default_rng(1)
    rounds = rng.integers(5, 40, size=60)
    emitted = rounds + rng.integers(0, 80, size=60)
    low, high = acceptance.interval(emitted, rounds)
    plain = []
    for _ in range(1000):
        drawn = rng.integers(0, 60, size=60)
        plain.append(emitted[drawn].sum() / rounds[drawn].sum())
    assert [low, high] == pytest.approx(np.quantile(plain, [0.025, 0.975]), rel=0.02)
    assert low < acceptance.ratio(emitted, rounds) < high
    assert acceptance.interval(emitted, rounds) == [low, high]  # seed 0: the same every time


def test_paired_difference_is_paired():
    """Two drafters, one always 10 % better on prompts that differ tenfold: unpaired intervals overlap widely, the
    paired one excludes 0 by far."""
    rng = np.random.default_rng(2)
    rounds = np.full(50, 10)
    emitted = rng.integers(10, 100, size=50)
    better = emitted + emitted // 10 + 1
    difference, (low, high) = acceptance.paired_difference((better, rounds), (emitted, rounds))
    assert 0 < low < difference < high
    own = acceptance.interval(emitted, rounds)
    assert (high - low) < 0.2 * (own[1] - own[0])
    with pytest.raises(ValueError, match="50 rows against 49"):
        acceptance.paired_difference((better, rounds), (emitted[1:], rounds[1:]))


def test_intervals_without_rounds():
    empty = np.zeros(3, dtype=np.int64)
    assert acceptance.interval(empty, empty) is None
    assert acceptance.paired_difference((empty, empty), (empty, empty)) is None
    # one row of three holds all rounds: some resamples hold none, and must not turn the interval into NaN
    assert acceptance.interval(np.array([0, 0, 9]), np.array([0, 0, 3]), resamples=100) == [3.0, 3.0]


def test_near_tie_rule():
    gaps = [3.0, 0.0625, 0.07]
    assert acceptance.near_tie_equal([1, 2, 3], [1, 2, 3], gaps)
    assert acceptance.near_tie_equal([1, 2, 3], [1, 9, 8], gaps)  # differs first where the gap is 0.0625
    assert not acceptance.near_tie_equal([1, 2, 3], [1, 2, 9], gaps)  # 0.07 is no tie
    assert not acceptance.near_tie_equal([1, 2, 3], [1, 2], gaps)  # a lost token is no tie
    assert not acceptance.near_tie_equal([1, 2], [1, 2, 3], gaps)
    assert not acceptance.near_tie_equal([1, 2, 3], [1, 9, 3], None)  # without gaps only equality counts
    right, wrong = True, False  # the verdicts of two replays: 2 accepted against 1, judged apart at position 1
    assert acceptance.near_tie_equal([right, right, wrong], [right, wrong], gaps)
    assert not acceptance.near_tie_equal([right, right, wrong], [wrong], gaps)
    assert acceptance.near_tie_share([np.array(gaps), np.array([0.0])]) == 0.5
    assert acceptance.near_tie_share([]) is None
