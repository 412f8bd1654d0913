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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    the copy's. `fit` finds, for each length, the limit below which copies were right more often than the model. Where
    they were right more often than the model is on the whole, the limit is infinite: the gap does not matter, and so
    the model need not be asked. Such a copy costs no step; the next one feeds it together with its own token.

    What is chosen depends on the text alone, not on where a draft begins. So no limit of a run's length is needed: a
    copy that follows a copy stands behind a longer suffix, whose precision was measured like any other, and on a text
    that has gone wrong nothing is left to lose.
    """

    limits: tuple[float, ...]

    def sure(self, index: NgramIndex) -> int | None:
        """The id that is drafted without a model, if there is one."""
        found = index.candidate()
        return found[1] if found is not None and self.limits[found[0] - 1] == math.inf else None

    def choose(self, index: NgramIndex, token: int, gap: float) -> tuple[int, str]:
        """(the id to draft, "model" or "copy"), given what the model chose and its gap."""
        found = index.candidate()
        if found is not None and found[1] != token and gap < self.limits[found[0] - 1]:
            return found[1], "copy"
        return token, "model"

    @classmethod
    def fit(cls, cases: Iterable[tuple[int, float, bool, bool]], agreement: float = 1.0) -> "CopyPolicy":
        """cases: (suffix length, gap, was the copy right?, was the model?) of every position that has a copy.

        For each length the limit with the most tokens won: copies right less models right, over all gaps below it,
        where the two differ. Infinite for the lengths from which on copies are right more often than `agreement`, the
        model's share of right tokens at all positions; the default leaves none.
        """
        by_length: dict[int, list[tuple[float, bool, bool]]] = {n: [] for n in range(1, POLICY_NGRAM + 1)}
        for length, *case in cases:
            by_length[length].append(tuple(case))
        limits, sure = [], True
        for length in range(POLICY_NGRAM, 0, -1):  # a longer suffix is not less sure: what is few is noise
            own = by_length[length]
            sure = sure and bool(own) and sum(copied for _, copied, _ in own) > agreement * len(own)
            limits.append(math.inf if sure else cls._best_limit(own))
        return cls(tuple(limits[::-1]))

    @staticmethod
    def _best_limit(cases: Iterable[tuple[float, bool, bool]]) -> float:
        best, won, limit = 0, 0, 0.0
        for gap, copied, chosen in sorted(cases):
            won += int(copied) - int(chosen)
            if won > best:
                best, limit = won, math.nextafter(gap, math.inf)
        return limit

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> "CopyPolicy | None":
        """Of a checked copy_policy.json, where null stands for an infinite limit; None where it is not enabled."""
        if not document["enabled"]:
            return None
        return cls(tuple(math.inf if limit is None else limit for limit in document["limits"]))

    def document(self) -> dict[str, Any]:
        return {"enabled": True, "limits": [None if limit == math.inf else limit for limit in self.limits]}
