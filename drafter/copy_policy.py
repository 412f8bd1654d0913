"""Drafting without a model: copy what followed the last time these tokens stood in the request (prompt lookup).

The baseline that every trained stage must beat, and the prior of a policy that lets a copied token override the model's
where copies were measured to be right more often.

Worked example, max_ngram = 3:

    tokens   7 1 2 3 9 9 1 2 3 4 5 8 2 3        k = 4
    suffix   8 2 3 (three ids)  never stood before
             2 3   (two ids)    stood at 2..3 and at 7..8; the most recent one counts
    draft    what followed it there: 4 5 8 2

The longest suffix wins over the most recent one: a longer match is more often right. A suffix of one id is still
tried; where even that is new, the draft is empty, and the round costs nothing but the target's own step.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_NGRAM = 3
POLICY_NGRAM = 8  # longest suffix that a policy tells apart


class NgramIndex:
    """Where each n-gram (1 .. max_ngram ids) of a growing sequence last stood with a token behind it.

    `extend` costs O(max_ngram) per token and `draft` O(max_ngram + k): linear over a whole request, where a scan
    per draft would be quadratic.
    """

    def __init__(self, tokens: Iterable[int] = (), max_ngram: int = MAX_NGRAM):
        if max_ngram < 1:
            raise ValueError(f"max_ngram must be at least 1, got {max_ngram}")
        self.max_ngram = max_ngram
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # n-gram -> position behind its most recent occurrence
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            # Entered only now that a token follows: so the current suffix can never find itself.
            for suffix in self._suffixes():
                self._behind[suffix] = len(self._tokens)
            self._tokens.append(token)

    def draft(self, k: int) -> list[int]:
        """At most k ids: what followed the longest known suffix; shorter near the end of the sequence, maybe []."""
        for suffix in self._suffixes():
            start = self._behind.get(suffix)
            if start is not None:
                return self._tokens[start : start + k]
        return []

    def candidate(self) -> tuple[int, int] | None:
        """(length of the longest known suffix, the id that followed it); None where even the last id is new."""
        for suffix in self._suffixes():
            start = self._behind.get(suffix)
            if start is not None:
                return len(suffix), self._tokens[start]
        return None

    def _suffixes(self) -> list[tuple[int, ...]]:
        """All suffixes of the sequence of up to max_ngram ids, longest first."""
        longest = min(self.max_ngram, len(self._tokens))
        tail = tuple(self._tokens[len(self._tokens) - longest :])
        return [tail[skip:] for skip in range(longest)]


def prompt_lookup(tokens: Sequence[int], k: int, max_ngram: int = MAX_NGRAM) -> list[int]:
    """At most k drafted ids for one list of tokens; see the example above. ValueError if max_ngram < 1."""
    return NgramIndex(tokens, max_ngram).draft(k)


# ---------------------------------------------------------------------------- the policy


@dataclass(frozen=True)
class CopyPolicy:
    """limits[n - 1]: a copy behind a suffix of n ids overrides a model's token whose logit gap is below it.

    The gap to the second best id is what a model knows of its own precision, the length of the suffix what is known of
    the copy's. `fit` finds, for each length, the limit below which copies were right more often than the model.
    """

    limits: tuple[float, ...]

    def choose(self, index: NgramIndex, token: int, gap: float) -> tuple[int, str]:
        """(the id to draft, "model" or "copy"), given what the model chose and its gap."""
        found = index.candidate()
        if found is not None and found[1] != token and gap < self.limits[found[0] - 1]:
            return found[1], "copy"
        return token, "model"

    @classmethod
    def fit(cls, cases: Iterable[tuple[int, float, bool, bool]]) -> "CopyPolicy":
        """cases: (suffix length, gap, was the copy right?, was the model?) where the two differed.

        For each length the limit with the most tokens won: copies right less models right, over all gaps below it.
        """
        by_length: dict[int, list[tuple[float, int]]] = {length: [] for length in range(1, POLICY_NGRAM + 1)}
        for length, gap, copy_right, model_right in cases:
            by_length[length].append((gap, int(copy_right) - int(model_right)))
        limits = []
        for length in range(1, POLICY_NGRAM + 1):
            best, won, limit = 0, 0, 0.0
            for gap, gain in sorted(by_length[length]):
                won += gain
                if won > best:
                    best, limit = won, math.nextafter(gap, math.inf)
            limits.append(limit)
        return cls(tuple(limits))
