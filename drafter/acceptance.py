"""The only acceptance arithmetic of the project: training, evaluation, metrics and speculation all count here.

Pure Python and numpy; no model, no tensor library. Everything follows from one small array per row:

    runs[t] = how many leading tokens of a draft that starts at continuation position t equal the target's

For a greedy autoregressive drafter one teacher-forced forward is enough to know it. Up to its first mistake the
drafter has written exactly the target's tokens, so it has seen the prefix that the teacher-forced forward saw:
with bits[t] = "is the argmax at position t the target's token?", runs[t] is the number of consecutive true bits
from t on (`run_lengths`). Any other drafter (prompt lookup) fills `runs` by drafting at every position.

The replay protocol, for a continuation y[0] .. y[N-1] of the target and drafts of at most k tokens:

    start     the first round starts at position 1: y[0] is the target's own first token
    accepted  m = leading drafted tokens equal to the target's, at most k and at most N - start
    emitted   m + 1, the bonus y[start + m] being the target's own; m if the accepted tokens end the text
    next      start + emitted
    dropped   in a row cut by length, a round whose window (k drafted tokens and the bonus: start .. start + k)
              passes the end, and with it the rest of the row, whatever it would have accepted: keeping only
              the rounds that fail early would bias the mean. In a row that ended by a stop id nothing is
              dropped: behind its last token there is nothing to guess.

    tau = tokens emitted / rounds, pooled over all rows (never a mean of per-row means)

Worked example, N = 6, bits 1 1 0 1 1 1 (bit 0 belongs to the target's own token):

    ended by a stop id, k = 2   start 1: accepted 1, emitted y1 y2;  start 3: accepted 2, emitted y3 y4 y5
                                tau = 5 / 2 = 2.5
    ended by a stop id, k = 4   start 1: accepted 1, emitted y1 y2;  start 3: accepted 3, the text ends: emitted 3
                                tau = 5 / 2 = 2.5
    cut by length, k = 4        start 1: window 1..5 fits, emitted y1 y2;  start 3: window 3..7 passes the end
                                tau = 2 / 1 = 2.0

Dims: R rows (prompts), N continuation tokens of a row, k drafted tokens.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np

NEAR_TIE_GAP = 0.0625  # top-2 logit gap: one bf16 step for logits in 8..16, so rounding alone may swap the two
FINISH_REASONS = ("stop", "length")

# ---------------------------------------------------------------------------- one row: rounds


@dataclass(frozen=True)
class Round:
    """One draft and its check. `start` counts continuation tokens; `drafted` is None where no draft was made."""

    start: int
    accepted: int
    emitted: int
    drafted: int | None = None


def run_lengths(bits: Sequence[bool]) -> np.ndarray:
    """bits [N] -> int64 [N]: how many consecutive true bits start at each position.

    >>> run_lengths([True, True, False, True]).tolist()
    [2, 1, 0, 1]
    """
    right = np.asarray(bits, dtype=bool)
    at = np.arange(right.size)
    # position of the nearest false bit at or after t: running minimum from the right
    wrong_at = np.minimum.accumulate(np.where(right, right.size, at)[::-1])[::-1]
    return wrong_at - at


def leading_matches(drafted: Sequence[int], target: Sequence[int]) -> int:
    """How many leading drafted tokens equal the target's."""
    count = 0
    for ours, theirs in zip(drafted, target, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def has_round(start: int, k: int, length: int, finish_reason: str) -> bool:
    """Does a round start here? Not past the end; in a length-cut row start .. start + k must lie inside.

    A stop id that the row holds ends the text also for the drafter, so the two kinds differ only in the window.
    Raises ValueError for an unknown finish reason or k < 1.
    """
    if finish_reason not in FINISH_REASONS:
        raise ValueError(f"finish_reason must be one of {FINISH_REASONS}, got {finish_reason!r}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return start < length if finish_reason == "stop" else start + k < length


def rounds_from_runs(runs: Sequence[int], finish_reason: str, k: int) -> list[Round]:
    """All kept rounds of one row, from runs [N] (each value known up to k at least)."""
    length, start, rounds = len(runs), 1, []
    while has_round(start, k, length, finish_reason):
        accepted = min(int(runs[start]), k, length - start)
        emitted = min(accepted + 1, length - start)  # the text ended inside the accepted tokens: no bonus
        rounds.append(Round(start, accepted, emitted))
        start += emitted
    return rounds


def replay(
    prompt: Sequence[int], continuation: Sequence[int], finish_reason: str, k: int
) -> Generator[list[int], Sequence[int], list[Round]]:
    """The same protocol with real drafts: yields a prefix, takes its draft (at most k ids, maybe none) by `send`.

    The oracle of `rounds_from_runs`, and a generator so that many rows can share one batched drafter
    (`replay_rows`). Raises ValueError when a draft is longer than k.
    """
    length, start, rounds = len(continuation), 1, []
    while has_round(start, k, length, finish_reason):
        draft = yield [*prompt, *continuation[:start]]
        if len(draft) > k:
            raise ValueError(f"a draft of at most {k} tokens was asked for, got {len(draft)}")
        accepted = leading_matches(draft, continuation[start:])
        ended = start + accepted == length
        emitted = accepted if ended else accepted + 1
        rounds.append(Round(start, accepted, emitted, len(draft)))
        start += emitted
    return rounds


def replay_rows(
    rows: Sequence[tuple[Sequence[int], Sequence[int], str]],
    k: int,
    draft_batch: Callable[[list[list[int]]], Sequence[Sequence[int]]],
) -> list[list[Round]]:
    """Replay rows (prompt ids, continuation ids, finish_reason) in lockstep: one `draft_batch` call a round.

    `draft_batch` takes the prefixes of all rows still running and returns one draft for each, in order.
    """
    result: list[list[Round]] = [[] for _ in rows]
    walks = [replay(*row, k) for row in rows]
    answers: dict[int, Sequence[int] | None] = dict.fromkeys(range(len(rows)))  # None starts a generator
    while answers:
        prefixes: dict[int, list[int]] = {}
        for index, answer in answers.items():
            try:
                prefixes[index] = walks[index].send(answer)
            except StopIteration as end:
                result[index] = end.value
        drafts = draft_batch(list(prefixes.values())) if prefixes else []
        answers = dict(zip(prefixes, drafts, strict=True))
    return result


# ---------------------------------------------------------------------------- many rows: counts, tau and curves


@dataclass(frozen=True)
class RoundCounts:
    """Per-row sums of one k, enough for every pooled number and for resampling whole prompts.

    emitted [R]: tokens emitted; accepted [R, k + 1]: how many rounds accepted exactly 0 .. k tokens.
    """

    k: int
    emitted: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, rounds_by_row: Sequence[Sequence[Round]], k: int) -> "RoundCounts":
        emitted = np.array([sum(r.emitted for r in rounds) for rounds in rounds_by_row], dtype=np.int64)
        accepted = np.zeros((len(rounds_by_row), k + 1), dtype=np.int64)
        for row, rounds in enumerate(rounds_by_row):
            for one in rounds:
                accepted[row, one.accepted] += 1
        return cls(k, emitted, accepted)

    @classmethod
    def from_runs(cls, runs: Sequence[Sequence[int]], finish_reasons: Sequence[str], k: int) -> "RoundCounts":
        pairs = zip(runs, finish_reasons, strict=True)
        return cls.of([rounds_from_runs(run, reason, k) for run, reason in pairs], k)

    @property
    def rounds(self) -> np.ndarray:
        return self.accepted.sum(axis=1)  # [R]

    def tau(self, rows: np.ndarray | slice = slice(None)) -> float | None:
        """Tokens emitted / rounds, over all rows or those selected; None when there is no round."""
        return ratio(self.emitted[rows], self.rounds[rows])

    def cumulative(self, rows: np.ndarray | slice = slice(None)) -> list[float | None]:
        """Position i = 1 .. k: share of rounds with at least i accepted. Never rises with i."""
        at_least = self._at_least(rows)
        return [_share(count, at_least[0]) for count in at_least[1:]]

    def conditional(self, rows: np.ndarray | slice = slice(None)) -> list[float | None]:
        """Position i = 1 .. k: share of the rounds with at least i - 1 accepted that have at least i."""
        at_least = self._at_least(rows)
        return [_share(count, before) for before, count in zip(at_least, at_least[1:], strict=False)]

    def _at_least(self, rows: np.ndarray | slice) -> np.ndarray:
        return self.accepted[rows].sum(axis=0)[::-1].cumsum()[::-1]  # [k + 1], entry 0 = all rounds


def fixed_prefix_counts(runs: Sequence[Sequence[int]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Accepted tokens at fixed prefixes: (sum [R], number of positions [R]); their ratio is the mean accepted.

    "Uniformly drawn positions" means all of them: every start 1 <= t with t + k <= N, so that all k drafted
    tokens can be compared, in both kinds of rows. Unlike tau, which visits position t + m + 1 after a mistake at
    t + m and so starts many rounds just behind one, each position counts once: what one /draft call sees.
    """
    total, positions = [], []
    for run in runs:
        window = np.minimum(np.asarray(run[1 : max(1, len(run) - k + 1)], dtype=np.int64), k)
        total.append(int(window.sum()))
        positions.append(window.size)
    return np.array(total, dtype=np.int64), np.array(positions, dtype=np.int64)


def agreement_counts(runs: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(right [R], positions [R]): at how many of all continuation positions, the first included, the next token
    is the target's. Their ratio is the agreement; for a long text tau at k = infinity is 1 / (1 - agreement)."""
    right = np.array([int((np.asarray(run) > 0).sum()) for run in runs], dtype=np.int64)
    return right, np.array([len(run) for run in runs], dtype=np.int64)


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> float | None:
    """Pooled ratio of per-row sums; None when the denominator sums to nothing."""
    return _share(numerator.sum(), denominator.sum())


def _share(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None


# ---------------------------------------------------------------------------- intervals
# Whole prompts are resampled, since tokens of one prompt are not independent.


def _resampled(numerator: np.ndarray, denominator: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Pooled ratios [resamples] over prompts drawn with replacement; NaN where a draw holds no denominator.

    Drawing R of R rows with replacement is one multinomial count vector, so a resample of a ratio of sums is two
    dot products. The same seed and R give the same draws: differences are paired by construction.
    """
    count = len(numerator)
    times = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    below = times @ denominator  # [resamples]
    return np.divide(times @ numerator, below, out=np.full(resamples, np.nan), where=below > 0)


def interval(
    numerator: np.ndarray, denominator: np.ndarray, *, resamples: int = 1000, seed: int = 0, level: float = 0.95
) -> list[float] | None:
    """Percentile bootstrap [low, high] of sum(numerator) / sum(denominator) over rows [R]; None without data."""
    if ratio(numerator, denominator) is None:
        return None
    return _percentiles(_resampled(numerator, denominator, resamples, seed), level)


def paired_difference(
    ours: tuple[np.ndarray, np.ndarray],
    theirs: tuple[np.ndarray, np.ndarray],
    *,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[float, list[float]] | None:
    """(ours - theirs, its interval) for two pooled ratios, each (numerator [R], denominator [R]), same prompts.

    Raises ValueError when the two sides do not hold the same number of rows. None where a side has no data.
    """
    if len(ours[0]) != len(theirs[0]):
        raise ValueError(f"paired comparison needs the same prompts: {len(ours[0])} rows against {len(theirs[0])}")
    left, right = ratio(*ours), ratio(*theirs)
    if left is None or right is None:
        return None
    draws = _resampled(*ours, resamples, seed) - _resampled(*theirs, resamples, seed)
    return left - right, _percentiles(draws, level)


def _percentiles(draws: np.ndarray, level: float) -> list[float]:
    outside = (1 - level) / 2
    low, high = np.nanquantile(draws, [outside, 1 - outside])
    return [float(low), float(high)]


# ---------------------------------------------------------------------------- near ties
# Where two correct computations in low precision may choose differently.


def near_tie_equal(reference: Sequence, values: Sequence, reference_gaps: Sequence[float] | None) -> bool:
    """Equal, or the reference's top-2 logit gap at the first difference is at most 0.0625.

    `reference` and `values` are tokens, or verdicts on the target's tokens. reference_gaps [len(reference)]: gap of
    the logits behind reference[i]; None where equality must be exact (fp32). Behind the first difference the two
    texts have different prefixes and prove nothing. One being a beginning of the other is no near-tie: a tie swaps
    a token, it does not lose one.
    """
    same = leading_matches(values, reference)
    if same == len(values) == len(reference):
        return True
    if same in (len(values), len(reference)) or reference_gaps is None:
        return False
    return float(reference_gaps[same]) <= NEAR_TIE_GAP


def near_tie_share(gaps: Sequence[np.ndarray]) -> float | None:
    """Share of positions, pooled over rows, whose top-2 logit gap is at most 0.0625."""
    flat = np.concatenate([np.asarray(g, dtype=np.float32) for g in gaps]) if gaps else np.empty(0)
    return float((flat <= NEAR_TIE_GAP).mean()) if flat.size else None
