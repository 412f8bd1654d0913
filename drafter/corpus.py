"""Rows of a corpus -> clean `messages` -> prompt rows, in constant memory, every dropped row counted.

A prompt row is {"id", "source", "category", "family", "split", "messages"}. The answers that a corpus carries are
thrown away: the teacher writes its own. What becomes of a conversation is decided by its shape alone:

    shape                                        rule      counter
    null, not a list, []                         drop      empty_conversation
    a turn that is no struct, or has no role     drop      turn_without_role
    no user turn: [system], [assistant]          drop      no_user_turn
    [assistant, user, ...] (after a system too)  drop      assistant_first
    two user turns in a row                      drop      user_after_user
    two assistant turns in a row                 drop      assistant_after_assistant
    a system turn that is not the first          drop      late_system
    tool, function, any other role               drop      unknown_role
    an image or another part that is no text     drop      part_not_text
    content that is a number, a dict, ...        drop      content_not_text
    null, absent, "" or white space of a user    drop      blank_user
    the same of the system                       repair    blank_system_removed
    a list of text parts                         repair    parts_joined (with a line feed)
    a trailing assistant turn, earlier answers   repair    answers_removed
    turns after the first (first_turn only)      repair    later_turns_removed
    half a surrogate pair                        drop      bad_unicode
    more characters than the cap                 drop      too_many_chars (before any other text work)
    more tokens than the cap                     drop      too_many_tokens
    seen before (case, white space aside)        drop      duplicate
    near to a held-out row (5-grams, J >= .8)    drop      near_held_out
    near to an earlier row of the corpora        drop      near_duplicate
    shares an 8-gram with the list of --against  drop      against

With history "first_turn" only the system text, the first user turn and the role after it are looked at. With
"regenerate" the whole conversation must alternate; all user turns are kept and the teacher answers them in order.
"""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from drafter.provenance import atomic_write, canonical_json

HISTORIES = ("first_turn", "regenerate")
SPLITS = ("train", "selection", "development", "final")

# ---------------------------------------------------------------------------- text and names


def normalise(text: str) -> str:
    """Unicode NFC, CRLF -> LF, outer white space stripped; nothing else is lost."""
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n")).strip()


def _canonical_turns(messages: Iterable[Mapping]) -> bytes:
    return canonical_json([[turn["role"], normalise(turn["content"])] for turn in messages])


def prompt_id(messages: Iterable[Mapping]) -> str:
    """sha256 of the canonical JSON of [[role, content], ...] after `normalise`: the name of a prompt."""
    return hashlib.sha256(_canonical_turns(messages)).hexdigest()


def duplicate_key(messages: Iterable[Mapping]) -> bytes:
    """16 bytes that are equal for prompts that differ in case or white space only.

    128 bits: over 10^6 rows two different prompts share a key with probability 10^12 / 2^129, below 10^-26.
    """
    turns = [[turn["role"], " ".join(normalise(turn["content"]).casefold().split())] for turn in messages]
    return hashlib.sha256(canonical_json(turns)).digest()[:16]


# ---------------------------------------------------------------------------- files that no step may open

HELD_OUT_TOKENS = frozenset({"test", "validation", "valid", "dev", "eval"})


def held_out_token(file_name: str) -> str | None:
    """The token by which a corpus file names a split that is not ours to train on, or None.

    Tokens stand between / - _ . and digits, in any case: "data/Test-00000.parquet" does, "latest/contest.parquet"
    does not. Give the name inside the corpus, not a local path: /dev/shm is no split.
    """
    tokens = re.split(r"[/\-_.0-9]+", file_name.casefold())
    return next((token for token in tokens if token in HELD_OUT_TOKENS), None)


# ---------------------------------------------------------------------------- counters


class Counters:
    """Rows in = rows out + all drops, always. A row is dropped for one reason; it may be repaired in several ways."""

    def __init__(self) -> None:
        self.rows_in = 0
        self.rows_out = 0
        self.dropped: Counter[str] = Counter()
        self.repaired: Counter[str] = Counter()

    def as_dict(self) -> dict:
        """For a manifest; checks the sum first, so that no manifest with a lost row is ever written."""
        assert self.rows_in == self.rows_out + self.dropped.total(), (self.rows_in, self.rows_out, self.dropped)
        return {
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "dropped": dict(sorted(self.dropped.items())),
            "repaired": dict(sorted(self.repaired.items())),
        }


class Dropped(ValueError):
    """Raised by `clean_messages` for a row that a rule drops; `reason` is a counter of the table above."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


# ---------------------------------------------------------------------------- one conversation

_MISPLACED = {"user": "user_after_user", "assistant": "assistant_after_assistant", "system": "late_system"}


def _text_of(content: object, repairs: set[str]) -> str:
    """The text of a turn: a string, null (blank), or a list of text parts joined by a line feed."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise Dropped("content_not_text")
    texts = []
    for part in content:
        if isinstance(part, Mapping):
            if part.get("type", "text") != "text":
                raise Dropped("part_not_text")
            part = part.get("text")
        if part is not None and not isinstance(part, str):
            raise Dropped("part_not_text")
        texts.append(part or "")
    repairs.add("parts_joined")
    return "\n".join(texts)


def _kept_turns(messages: object, history: str, repairs: set[str]) -> list[Mapping]:
    """System turn (if any) and the user turns that `history` keeps; the role rules of the table above."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise Dropped("empty_conversation")
    if not all(isinstance(turn, Mapping) and isinstance(turn.get("role"), str) for turn in messages):
        raise Dropped("turn_without_role")
    roles = [turn["role"] for turn in messages]
    if "user" not in roles:
        raise Dropped("no_user_turn")
    start = 1 if roles[0] == "system" else 0
    if roles[start] == "assistant":
        raise Dropped("assistant_first")

    # first_turn: the user turn and the one behind it, which must be its answer (or nothing).
    window = range(start, min(start + 2, len(roles)) if history == "first_turn" else len(roles))
    for position in window:
        expected = "assistant" if (position - start) % 2 else "user"
        if roles[position] != expected:
            raise Dropped(_MISPLACED.get(roles[position], "unknown_role"))
    if "assistant" in roles:
        repairs.add("answers_removed")
    if history == "first_turn" and "user" in roles[start + 1 :]:
        repairs.add("later_turns_removed")
    return list(messages[:start]) + [messages[position] for position in window if roles[position] == "user"]


def clean_messages(messages: object, *, history: str, max_chars: int) -> tuple[list[dict], set[str]]:
    """-> (messages of a prompt row, names of the repairs made). Raises `Dropped` with the counted reason.

    The cap counts the characters of the kept turns as stored, before NFC or anything else touches them: a row of
    megabytes costs one `len`.
    """
    assert history in HISTORIES, history
    repairs: set[str] = set()
    turns = _kept_turns(messages, history, repairs)
    texts = [_text_of(turn.get("content"), repairs) for turn in turns]
    if sum(map(len, texts)) > max_chars:
        raise Dropped("too_many_chars")

    cleaned = []
    for turn, text in zip(turns, map(normalise, texts), strict=True):
        if text:
            cleaned.append({"role": turn["role"], "content": text})
        elif turn["role"] == "user":
            raise Dropped("blank_user")
        else:
            repairs.add("blank_system_removed")
    try:
        "".join(turn["content"] for turn in cleaned).encode("utf-8")
    except UnicodeEncodeError:
        raise Dropped("bad_unicode") from None
    return cleaned, repairs


# ---------------------------------------------------------------------------- streams


def read_parquet(path: Path, columns: Sequence[str], batch_size: int = 512) -> Iterator[dict]:
    """The rows of a Parquet file as dicts of exactly `columns`, read batch by batch (512 chats of 10 kB: 5 MB).

    The footer is asked for each column by name before a row is read: a shard with other columns, another order or an
    all-null column gives the same rows. ValueError names the file and the column that it lacks.
    """
    with pq.ParquetFile(path, pre_buffer=False) as file:
        present = file.schema_arrow.names
        for column in columns:
            if column not in present:
                raise ValueError(f"{path}: no column {column!r}; it has {', '.join(present) or 'none'}")
        for batch in file.iter_batches(batch_size=batch_size, columns=list(columns), use_threads=False):
            for values in zip(*(batch.column(column).to_pylist() for column in columns), strict=True):
                yield dict(zip(columns, values, strict=True))


def conversation_of(record: Mapping, columns: Mapping[str, str]) -> object:
    """The raw messages of a corpus record: `columns` maps our words to the corpus' own column names.

    {"messages": NAME} for a column of turns; {"user": NAME, "system"?: NAME} for columns of text.
    """
    if "messages" in columns:
        return record[columns["messages"]]
    return [{"role": role, "content": record[columns[role]]} for role in ("system", "user") if role in columns]


class Cleaner:
    """Raw conversations -> messages of prompt rows; every row that goes in is counted, once.

    `seen` holds the `duplicate_key` of every prompt so far, over all files and steps (about 100 bytes a row in a
    Python set). Each of `rules` gives the counted reason to drop a prompt, or None (drafter/duplicates.py).
    `count_tokens` renders and counts a prompt; it is asked last, about what every other rule kept.
    """

    def __init__(
        self, *, history: str, max_chars: int, max_tokens: int, count_tokens: Callable[[list[dict]], int]
    ) -> None:
        self.history, self.max_chars, self.max_tokens = history, max_chars, max_tokens
        self.count_tokens = count_tokens
        self.rules: list[Callable[[list[dict]], str | None]] = []
        self.counters = Counters()
        self.seen: set[bytes] = set()

    def __call__(self, conversation: object) -> list[dict] | None:
        """The messages of the prompt row, or None where a rule dropped it."""
        self.counters.rows_in += 1
        try:
            messages, repairs = clean_messages(conversation, history=self.history, max_chars=self.max_chars)
            key = duplicate_key(messages)
            if key in self.seen:
                raise Dropped("duplicate")
            for rule in self.rules:
                if reason := rule(messages):
                    raise Dropped(reason)
            if self.count_tokens(messages) > self.max_tokens:
                raise Dropped("too_many_tokens")
        except Dropped as drop:
            self.counters.dropped[drop.reason] += 1
            return None
        self.seen.add(key)
        self.counters.rows_out += 1
        self.counters.repaired.update(repairs)
        return messages


# ---------------------------------------------------------------------------- prompt rows


def prompt_row(messages: list[dict], *, source: str, category: str, family: str, split: str) -> dict:
    """A prompt row. With several user turns (`history: regenerate`) it is marked: the teacher answers each in order."""
    assert split in SPLITS, split
    row = {"id": prompt_id(messages), "source": source, "category": category, "family": family, "split": split}
    row["messages"] = messages
    if sum(turn["role"] == "user" for turn in messages) > 1:
        row["history"] = "regenerate"
    return row


def stream_prompts(path: Path) -> Iterator[dict]:
    """The prompt rows of a JSONL file that a step wrote. Raises FileNotFoundError, ValueError with file and line."""
    with open(path, encoding="utf-8", newline="\n") as file:  # only \n ends a line: U+2028 may stand in a text
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not a JSON document ({error.msg})") from None


def read_prompts(path: Path) -> list[dict]:
    """All of `stream_prompts` at once."""
    return list(stream_prompts(path))


def write_prompts(path: Path, rows: Iterable[Mapping]) -> int:
    """Writes the rows as JSONL, atomically; -> number of rows."""
    count = 0
    with atomic_write(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n")
            count += 1
    return count
