"""Which prompts are nearly the same: word n-grams, exact Jaccard against a few rows, MinHash clusters over many.

The n-grams of a text are hashed to 64 bits each. Two texts are near when the Jaccard similarity of their sets of word
5-grams is 0.8 or more: in a text of 100 words one changed word costs 5 of 96 n-grams on each side (J = .90), two that
stand apart 10 (J = .81). Held-out rows are few, so a train row is compared with them exactly; the rows of a corpus are
a million, so they are clustered by MinHash, whose answer is right with high probability (see `Signatures`).

Dims: N rows, P = 64 slots of a signature.
"""

import base64
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

NEAR_NGRAM, NEAR_JACCARD = 5, 0.8
AGAINST_NGRAM = 8

# ---------------------------------------------------------------------------- n-grams

# Scripts written without spaces between words: there each character counts as a word (Thai, Lao, Khmer, kana, Han).
_UNSPACED = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def words(text: str) -> list[str]:
    """The words of a text, case-folded; punctuation and white space separate and do not count."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def ngrams(text: str, n: int) -> set[int]:
    """64-bit hashes of the word n-grams of a text; a shorter text has one, itself. Empty where there is no word.

    64 bits: over 10^8 different n-grams two share a hash with probability 10^16 / 2^65, below 3e-4.
    """
    found = words(text)
    grams = [found] if 0 < len(found) < n else [found[at : at + n] for at in range(len(found) - n + 1)]
    digests = (hashlib.blake2b(" ".join(gram).encode(), digest_size=8).digest() for gram in grams)
    return {int.from_bytes(digest, "little") for digest in digests}


def user_text(messages: Iterable[Mapping]) -> str:
    """What is compared: the user's turns. A system text that many rows share would make all of them near."""
    return "\n".join(turn["content"] for turn in messages if turn["role"] == "user")


def jaccard(first: Collection[int], second: Collection[int]) -> float:
    """Size of the intersection over size of the union of two sets; 0 for two empty ones."""
    common = len(set(first) & set(second))
    return common / (len(first) + len(second) - common) if common else 0.0


def pack_hashes(hashes: Collection[int]) -> str:
    """64-bit hashes as one line of base64 (11 characters each), sorted; `unpack_hashes` is the way back."""
    return base64.b64encode(np.array(sorted(hashes), dtype="<u8").tobytes()).decode()


def unpack_hashes(text: str) -> set[int]:
    return set(np.frombuffer(base64.b64decode(text), dtype="<u8").tolist())


# ---------------------------------------------------------------------------- few rows: exact


class NearIndex:
    """Sets of n-grams that can be asked whether another set is near to one of them. Exact: no sampling, no miss."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.rows_of: dict[int, list[int]] = {}  # n-gram -> numbers of the rows that hold it

    def add(self, grams: Collection[int]) -> None:
        for gram in grams:
            self.rows_of.setdefault(gram, []).append(len(self.sizes))
        self.sizes.append(len(grams))

    def nearest(self, grams: Collection[int]) -> tuple[int | None, float]:
        """(number of the row of the highest Jaccard similarity, that similarity); (None, 0.0) without a common n-gram.

        |A ∩ B| is counted per row, and |A ∪ B| = |A| + |B| - |A ∩ B|.
        """
        common = Counter(row for gram in grams if gram in self.rows_of for row in self.rows_of[gram])
        scored = ((count / (len(grams) + self.sizes[row] - count), -row) for row, count in common.items())
        similarity, row = max(scored, default=(0.0, None))
        return (None if row is None else -row), similarity

    def is_near(self, grams: Collection[int]) -> bool:
        return self.nearest(grams)[1] >= NEAR_JACCARD


class Overlap:
    """The word 8-grams of a list of the user's own; says which of its lines a text shares one with."""

    def __init__(self, path: Path) -> None:
        """Reads text lines, or JSON lines of which every string value counts. ValueError for an empty list."""
        self.line_of: dict[int, int] = {}  # n-gram -> the first line that holds it
        for number, text in _texts(path):
            for gram in ngrams(text, AGAINST_NGRAM):
                self.line_of.setdefault(gram, number)
        if not self.line_of:
            raise ValueError(f"{path} holds no text; --against takes text lines or JSON lines")

    def line(self, text: str) -> int | None:
        """The first line of the list that shares an 8-gram with the text (a shorter text: that equals it), or None."""
        shared = [self.line_of[gram] for gram in ngrams(text, AGAINST_NGRAM) if gram in self.line_of]
        return min(shared, default=None)


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    with open(path, encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                value = json.loads(line) if line.lstrip()[:1] in ("{", "[") else line
            except json.JSONDecodeError:
                value = line  # a text may begin with a bracket too
            yield from ((number, text) for text in _strings(value))


def _strings(value: object) -> Iterator[str]:
    """Every string in a JSON value; keys do not count."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for inner in value.values() for text in _strings(inner))
    elif isinstance(value, list):
        yield from (text for inner in value for text in _strings(inner))


# ---------------------------------------------------------------------------- many rows: MinHash

SLOTS, BAND_SLOTS, CHUNK_ROWS = 64, 4, 4096
# A pair is joined when this share of its slots agrees. At J = .8 the share has mean .8 and sd sqrt(.8 * .2 / 64) = .05,
# so .7 keeps 98 % of the pairs that are just near, and pairs of J <= .55 (3 sd below) stay apart.
JOINED_SHARE = 0.7


class Signatures:
    """MinHash signatures of N rows, and the clusters of rows that are near to each other.

    A signature has P = 64 slots; two slots agree with probability J. Of each slot the low 16 bits are kept (two
    different minima share them once in 65,536), so that a row takes 128 bytes and a band of 4 slots is one 64-bit
    number. Rows that share one of the 16 bands are compared: a pair of J = .8 shares one with probability
    1 - (1 - .8^4)^16 = .9998. Clustering adds the band at hand, its order and the parents, 8 bytes a row each, and
    what sorting takes: 174 bytes a row in all, measured over a million rows.
    """

    def __init__(self) -> None:
        self.chunks: list[np.ndarray] = []  # uint16 [CHUNK_ROWS, P], the last one possibly shorter
        self.waiting: list[list[int]] = []

    def __len__(self) -> int:
        return sum(map(len, self.chunks)) + len(self.waiting)

    def add(self, grams: Collection[int]) -> int:
        """Adds a row; -> its number. A row without a word is near to nothing, whatever its number."""
        self.waiting.append(list(grams))
        if len(self.waiting) == CHUNK_ROWS:
            self._flush()
        return len(self) - 1

    def _flush(self) -> None:
        from rensa import RMinHash

        if not self.waiting:
            return
        start = sum(map(len, self.chunks))
        # The number of an empty row stands in for its n-grams: it must not be near to other empty ones.
        sets = [grams or [start + at] for at, grams in enumerate(self.waiting)]
        rows = RMinHash.digest_matrix_from_token_hash_sets(sets, SLOTS, 0).to_rows()
        self.chunks.append(np.array(rows, dtype=np.uint32).astype(np.uint16))
        self.waiting = []

    def clusters(self) -> np.ndarray:
        """int64 [N]: for each row the smallest number in its cluster (its own, where it is near to no earlier row).

        Joining is transitive: a chain of near rows is one cluster. Of the rows that share a band each is compared
        with the one before it and with the first of them, not with all: of m rows m (m - 1) / 2 pairs would be too
        many, and a pair that is left out here meets again in other bands.
        """
        self._flush()
        total = len(self)
        parents = np.arange(total)
        for band in range(SLOTS // BAND_SLOTS if total else 0):
            columns = slice(band * BAND_SLOTS, (band + 1) * BAND_SLOTS)
            bands = np.concatenate([np.ascontiguousarray(chunk[:, columns]) for chunk in self.chunks])
            bands = bands.view(np.uint64)[:, 0]  # [N]
            order = np.argsort(bands, kind="stable")
            same = bands[order[1:]] == bands[order[:-1]]
            del bands
            first = previous = -1
            for at in np.flatnonzero(same):
                one, two = int(order[at]), int(order[at + 1])
                first = first if one == previous else one  # a new run of equal bands begins
                previous = two
                if not self._join(parents, one, two) and one != first:
                    self._join(parents, first, two)
        for row in range(total):  # parents[row] <= row: one pass upwards reaches every root
            parents[row] = parents[parents[row]]
        return parents

    def _join(self, parents: np.ndarray, one: int, two: int) -> bool:
        """Whether rows one and two are near (or known to be in one cluster); joins their clusters if so."""
        roots = _root(parents, one), _root(parents, two)
        if roots[0] == roots[1]:
            return True
        near = np.count_nonzero(self._row(one) == self._row(two)) >= JOINED_SHARE * SLOTS
        if near:
            parents[max(roots)] = min(roots)
        return near

    def _row(self, row: int) -> np.ndarray:
        return self.chunks[row // CHUNK_ROWS][row % CHUNK_ROWS]


def _root(parents: np.ndarray, row: int) -> int:
    while parents[row] != row:
        parents[row] = parents[parents[row]]  # halves the path
        row = int(parents[row])
    return row
