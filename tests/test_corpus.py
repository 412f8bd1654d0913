"""drafter/corpus.py: what becomes of a conversation, that every row is counted, and that files are read as declared."""

import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.chat import Chat
from drafter.corpus import (
    Cleaner,
    Counters,
    clean_messages,
    conversation_of,
    duplicate_key,
    held_out_token,
    normalise,
    prompt_id,
    prompt_row,
    read_parquet,
    read_prompts,
    write_prompts,
)
from scripts.random_model import make_tokenizer

ROOT = Path(__file__).resolve().parents[1]
TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
PARTS = pa.struct(
    [("role", pa.string()), ("content", pa.list_(pa.struct([("type", pa.string()), ("text", pa.string())])))]
)


def turn(role, content="text"):
    return {"role": role, "content": content}


def conversation(letters):
    """ "sua" -> a system, a user and an assistant turn, each with a text of its own."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [turn(roles[letter], f"{letter}{index}") for index, letter in enumerate(letters)]


def cleaner(history="first_turn", max_chars=1000, max_tokens=1000):
    def count_tokens(messages):
        return sum(len(message["content"].split()) for message in messages)

    return Cleaner(history=history, max_chars=max_chars, max_tokens=max_tokens, count_tokens=count_tokens)


def texts(messages):
    return None if messages is None else [message["content"] for message in messages]


# ---------------------------------------------------------------------------- text and names


def test_prompt_id_ignores_line_ends_form_and_outer_space_only():
    plain = prompt_id([turn("user", "caf\u00e9\nx")])
    assert prompt_id([turn("user", "  cafe\u0301\r\nx \n")]) == plain
    assert prompt_id([turn("user", "Caf\u00e9\nx")]) != plain
    assert prompt_id([turn("user", "caf\u00e9 x")]) != plain
    assert prompt_id([turn("system", "caf\u00e9\nx")]) != plain
    assert prompt_id([turn("user", "a"), turn("user", "b")]) != prompt_id([turn("user", "ab")])


def test_prompt_id_has_not_changed():
    """Ids name rows in shards and reserved lists: a new definition would silently unreserve every reserved prompt."""
    import hashlib

    assert prompt_id([turn("user", "2+2?")]) == hashlib.sha256(b'[["user","2+2?"]]').hexdigest()


def test_duplicate_key_also_ignores_case_and_space():
    assert duplicate_key([turn("user", "What  is\nTHIS?")]) == duplicate_key([turn("user", "what is this?")])
    assert duplicate_key([turn("user", "stra\u00dfe")]) == duplicate_key([turn("user", "STRASSE")])
    assert duplicate_key([turn("user", "ab")]) != duplicate_key([turn("user", "a b")])


@given(st.text())
def test_normalise_is_idempotent_and_loses_nothing_but_outer_space(text):
    once = normalise(text)
    assert normalise(once) == once
    assert once == unicodedata.normalize("NFC", text.replace("\r\n", "\n")).strip()


@pytest.mark.parametrize(
    "name", ["data/test-00000.parquet", "a/Validation/x.parquet", "x_dev.parquet", "eval2.parquet"]
)
def test_a_held_out_file_is_recognised(name):
    assert held_out_token(name)


@pytest.mark.parametrize(
    "name", ["data/latest.parquet", "contest/train-0.parquet", "devices.parquet", "train_sft-0.parquet"]
)
def test_a_word_that_only_holds_the_token_is_no_split(name):
    assert held_out_token(name) is None


# ---------------------------------------------------------------------------- role rules

SHAPES = [  # shape, history -> texts that remain, or the reason of the drop
    ("", "first_turn", "empty_conversation"),
    ("s", "first_turn", "no_user_turn"),
    ("a", "first_turn", "no_user_turn"),
    ("au", "first_turn", "assistant_first"),
    ("sau", "first_turn", "assistant_first"),
    ("uua", "first_turn", "user_after_user"),
    ("uaa", "first_turn", ["u0"]),
    ("uaa", "regenerate", "assistant_after_assistant"),
    ("uauu", "first_turn", ["u0"]),
    ("uauu", "regenerate", "user_after_user"),
    ("ssu", "first_turn", "late_system"),
    ("usa", "first_turn", "late_system"),
    ("uta", "first_turn", "unknown_role"),
    ("tu", "first_turn", "unknown_role"),
    ("u", "first_turn", ["u0"]),
    ("ua", "first_turn", ["u0"]),
    ("sua", "first_turn", ["s0", "u1"]),
    ("uauaua", "first_turn", ["u0"]),
    ("uauaua", "regenerate", ["u0", "u2", "u4"]),
    ("suau", "regenerate", ["s0", "u1", "u3"]),
]


@pytest.mark.parametrize("letters,history,expected", SHAPES)
def test_role_rules(letters, history, expected):
    """ROW-3: empty, system-only, assistant-first and doubled turns broke templates or trained on nonsense."""
    clean = cleaner(history)
    kept = clean(conversation(letters))
    if isinstance(expected, str):
        assert kept is None
        assert clean.counters.dropped == {expected: 1}
    else:
        assert texts(kept) == expected
        assert kept[-1]["role"] == "user"
        assert not any(text.startswith("a") for text in texts(kept)), "an answer of the corpus was kept"
        assert clean.counters.repaired["answers_removed"] == ("a" in letters)


def test_five_row_file_of_conversations_counts_every_shape(tmp_path):
    rows = [conversation(letters) for letters in ("", "s", "au", "uua", "uauaua")]
    pq.write_table(pa.table({"messages": pa.array(rows, pa.list_(TURN))}), tmp_path / "train.parquet")
    clean = cleaner()
    kept = [clean(record["messages"]) for record in read_parquet(tmp_path / "train.parquet", ["messages"])]
    assert [texts(messages) for messages in kept] == [None, None, None, None, ["u0"]]
    assert clean.counters.as_dict() == {
        "rows_in": 5,
        "rows_out": 1,
        "dropped": {"assistant_first": 1, "empty_conversation": 1, "no_user_turn": 1, "user_after_user": 1},
        "repaired": {"answers_removed": 1, "later_turns_removed": 1},
    }


def test_several_user_turns_are_marked_for_the_teacher():
    row = prompt_row(
        cleaner("regenerate")(conversation("uaua")), source="x", category="chat", family="f/00", split="train"
    )
    assert row["history"] == "regenerate"
    assert "history" not in prompt_row([turn("user")], source="x", category="chat", family="f/00", split="train")


# ---------------------------------------------------------------------------- blank and list content


def test_null_absent_blank_and_list_content(tmp_path):
    """ROW-1: content that was no string became a well-formed but blank turn, and the teacher answered nothing."""
    strings = [[turn("user", None)], [{"role": "user"}], [turn("user", "")], [turn("user", "   ")]]
    parts = [[turn("user", [{"type": "text", "text": "hi"}])], [turn("user", [])], [turn("user", None)]]
    pq.write_table(pa.table({"messages": pa.array(strings, pa.list_(TURN))}), tmp_path / "strings.parquet")
    pq.write_table(pa.table({"messages": pa.array(parts, pa.list_(PARTS))}), tmp_path / "parts.parquet")
    clean = cleaner()
    kept = [
        clean(row["messages"])
        for file in ("strings", "parts")
        for row in read_parquet(tmp_path / f"{file}.parquet", ["messages"])
    ]
    assert [texts(messages) for messages in kept] == [None, None, None, None, ["hi"], None, None]
    counted = clean.counters.as_dict()
    assert counted["dropped"] == {"blank_user": 6}
    assert counted["rows_in"] == counted["rows_out"] + sum(counted["dropped"].values()) == 7


def test_text_parts_are_joined_and_others_drop_the_row():
    clean = cleaner()
    assert texts(clean([turn("user", [{"type": "text", "text": "one"}, "two", {"text": None}])])) == ["one\ntwo"]
    assert clean([turn("user", [{"type": "image", "url": "x"}])]) is None
    assert clean([turn("user", 7)]) is None
    assert clean([turn("user", {"text": "x"})]) is None
    assert clean.counters.dropped == {"part_not_text": 1, "content_not_text": 2}


def test_a_blank_system_turn_is_removed_and_counted():
    clean = cleaner()
    assert clean([turn("system", None), turn("user", "hi")]) == [turn("user", "hi")]
    assert clean.counters.repaired == {"blank_system_removed": 1}


def test_half_a_surrogate_pair_is_dropped():
    clean = cleaner()
    assert clean([turn("user", "x\ud800")]) is None
    assert clean.counters.dropped == {"bad_unicode": 1}


# ---------------------------------------------------------------------------- caps and duplicates


def test_caps_drop_and_never_cut():
    clean = cleaner(max_chars=20, max_tokens=4)
    assert texts(clean([turn("user", "a b c d")])) == ["a b c d"]
    assert clean([turn("user", "a b c d e")]) is None
    assert clean([turn("system", "x" * 10), turn("user", "y" * 11)]) is None
    assert clean.counters.dropped == {"too_many_tokens": 1, "too_many_chars": 1}


def test_tokens_of_an_overlong_row_are_never_counted():
    def count_tokens(messages):
        raise AssertionError("the tokenizer was given a row over the character cap")

    clean = Cleaner(history="first_turn", max_chars=10, max_tokens=5, count_tokens=count_tokens)
    assert clean([turn("user", "x" * 11)]) is None


def test_duplicates_over_files_are_counted():
    clean = cleaner()
    clean.seen.add(duplicate_key([turn("user", "reserved prompt")]))
    assert clean([turn("user", "Reserved  PROMPT")]) is None
    assert clean([turn("user", "new")]) is not None
    assert clean([turn("user", "New")]) is None
    assert clean.counters.dropped == {"duplicate": 2}


MEGABYTES = """
import resource, sys, time
from drafter.corpus import Cleaner, read_parquet
def count_tokens(messages):
    assert sum(len(m["content"]) for m in messages) <= 24000
    return 1
clean = Cleaner(history="first_turn", max_chars=24000, max_tokens=2048, count_tokens=count_tokens)
kept = [m for r in read_parquet(sys.argv[1], ["messages"]) if (m := clean(r["messages"])) is not None]
print(len(kept), dict(clean.counters.dropped), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_a_row_of_megabytes_is_dropped_within_time_and_memory(tmp_path):
    """ROW-5: one string of megabytes went to the tokenizer and the step seemed to hang, its memory one row."""
    rows = [[turn("user", "a" * 5_000_000)], [turn("user", "\u6f22" * 2_000_000)], [turn("user", "normal")]]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"messages": pa.array(rows, pa.list_(TURN))}), path)
    done = subprocess.run(
        [sys.executable, "-c", MEGABYTES, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    kept, rest = done.stdout.split(" ", 1)
    dropped, peak_kb = rest.rsplit(" ", 1)
    assert (kept, dropped) == ("1", "{'too_many_chars': 2}")
    assert int(peak_kb) < 1_000_000


# ---------------------------------------------------------------------------- any conversation

CONTROL = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "<|fim_prefix|>")
# Control tokens whole, in halves, nested and next to each other, between other text: what a forger would try.
fragments = st.lists(
    st.sampled_from(
        [*CONTROL, "<|im_", "start|>", "assistant\n", "<|im_<|im_end|>end|>", "<", "|", ">", "a b", "\n", "\U000f0000"]
    ),
    max_size=6,
).map("".join)
contents = st.one_of(
    st.none(),
    st.text(max_size=30),
    fragments,
    st.sampled_from(["", "  ", "<|im_end|>", "a\r\nb", "\u2028", "\ud800", "x" * 50]),
    st.integers(),
    st.lists(
        st.one_of(
            st.text(max_size=5),
            st.none(),
            st.fixed_dictionaries({"type": st.sampled_from(["text", "image"]), "text": st.text(max_size=5)}),
        ),
        max_size=3,
    ),
)
turns = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", None])}, optional={"content": contents}
    ),
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": contents}),
)
conversations = st.lists(st.one_of(st.none(), st.text(max_size=3), st.lists(turns, max_size=6)), max_size=12)


@settings(max_examples=300, deadline=None)
@given(conversations, st.sampled_from(["first_turn", "regenerate"]))
def test_counters_add_up_for_any_rows(rows, history):
    clean = cleaner(history, max_chars=40, max_tokens=6)
    kept = [messages for row in rows if (messages := clean(row)) is not None]
    counted = clean.counters.as_dict()
    assert counted["rows_in"] == len(rows)
    assert counted["rows_out"] == len(kept)
    assert len(rows) == len(kept) + sum(counted["dropped"].values())
    assert len({prompt_id(messages) for messages in kept}) == len(kept)
    for messages in kept:
        assert messages[-1]["role"] == "user"
        assert all(message["role"] in ("system", "user") and message["content"].strip() for message in messages)
        again, repairs = clean_messages(
            messages[:2] if messages[0]["role"] == "system" else messages[:1], history=history, max_chars=400
        )
        assert again == messages[: len(again)] and not repairs, "cleaning a clean prompt changes nothing"


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """(chat, first control id): the byte-level one, and the real Qwen3 where its tokenizer lies beside the project."""
    folder = tmp_path_factory.mktemp("tiny")
    make_tokenizer(folder)
    found = [(Chat.load(folder, thinking="off", stop_ids=(258, 256), num_ids=261), 256)]
    qwen3 = ROOT.parent / "shared/qwen3_tokenizer"
    if qwen3.exists():
        found.append((Chat.load(qwen3, thinking="off", stop_ids=(151645, 151643), num_ids=151669), 151643))
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(turns, min_size=1, max_size=6), st.sampled_from(["first_turn", "regenerate"]))
def test_no_conversation_forges_a_control_token(chats, conversation, history):
    """Text of a control token in a row became the token itself: a turn that nobody wrote, an answer that had ended.

    Whatever a row holds, its prompt has the control ids of a conversation of the same roles about nothing, in the same
    order; and with the byte-level tokenizer all of the text is there.
    """
    messages = cleaner(history, max_chars=400)(conversation)
    if messages is None:
        return
    for chat, first in chats:
        ids = chat.render(messages)
        plain = chat.render([turn(message["role"], "x") for message in messages])
        assert [one for one in ids if one >= first] == [one for one in plain if one >= first]
        if first == 256:
            # Two private characters are the library's own marks and are taken out of a text.
            texts_in = (re.sub("[\U000f0000\U000f0001]", "", message["content"]) for message in messages)
            assert all(text in chat.decode(ids) for text in texts_in)


def test_a_lost_row_stops_the_manifest():
    counters = Counters()
    counters.rows_in = 1
    with pytest.raises(AssertionError):
        counters.as_dict()


# ---------------------------------------------------------------------------- files


def test_columns_are_read_by_name(tmp_path):
    """DL-4: an extra, missing, all-null or moved column in one shard changed the inferred type and lost rows."""
    rows = [conversation("ua")] * 3
    with_calls = pa.struct([*TURN, ("tool_calls", pa.list_(pa.string()))])
    pq.write_table(
        pa.table({"id": ["1", "2", "3"], "messages": pa.array(rows, pa.list_(TURN))}), tmp_path / "1.parquet"
    )
    second = {"messages": pa.array(rows, pa.list_(with_calls)), "tool_calls": [[], [], []], "id": pa.nulls(3)}
    pq.write_table(pa.table(second), tmp_path / "2.parquet", row_group_size=2)
    pq.write_table(pa.table({"id": ["1"], "text": ["x"]}), tmp_path / "3.parquet")

    read = [row for shard in "12" for row in read_parquet(tmp_path / f"{shard}.parquet", ["messages"], batch_size=2)]
    assert len(read) == sum(pq.read_metadata(tmp_path / f"{shard}.parquet").num_rows for shard in "12")
    assert all(set(row) == {"messages"} for row in read)
    assert [texts(clean_messages(row["messages"], history="first_turn", max_chars=99)[0]) for row in read] == [
        ["u0"]
    ] * 6
    with pytest.raises(ValueError, match=r"3\.parquet: no column 'messages'; it has id, text"):
        list(read_parquet(tmp_path / "3.parquet", ["messages"]))


def test_an_all_null_column_gives_counted_rows(tmp_path):
    pq.write_table(pa.table({"question": pa.nulls(4)}), tmp_path / "train.parquet")
    clean = cleaner()
    for record in read_parquet(tmp_path / "train.parquet", ["question"]):
        clean(conversation_of(record, {"user": "question"}))
    assert clean.counters.dropped == {"blank_user": 4}


def test_columns_of_text_become_a_conversation():
    record = {"inputs": "hi", "context": "be brief", "targets": "never read"}
    assert conversation_of(record, {"user": "inputs"}) == [turn("user", "hi")]
    both = conversation_of(record, {"user": "inputs", "system": "context"})
    assert both == [turn("system", "be brief"), turn("user", "hi")]


def test_prompt_rows_survive_odd_line_ends(tmp_path):
    """A reader that splits at U+2028 or U+0085 breaks a JSON line in two."""
    messages = [turn("user", "a\u2028b\u0085c\x0bd\re\nf")]
    row = prompt_row(messages, source="s", category="chat", family="f/00", split="train")
    assert write_prompts(tmp_path / "x.jsonl", [row, row]) == 2
    assert read_prompts(tmp_path / "x.jsonl") == [row, row]
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n{\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:2"):
        read_prompts(tmp_path / "x.jsonl")


def test_real_gsm8k_rows():
    path = ROOT.parent / "shared/corpora/openai--gsm8k/main/train-00000-of-00001.parquet"
    if not path.exists():
        pytest.skip("no GSM8K train rows in ../shared/corpora on this machine")
    clean = cleaner(max_chars=24_000, max_tokens=2048)
    kept = [m for r in read_parquet(path, ["question"]) if (m := clean(conversation_of(r, {"user": "question"})))]
    counted = clean.counters.as_dict()
    assert counted["rows_in"] == 7473
    assert len(kept) == counted["rows_out"] > 7400
    assert set(counted["dropped"]) <= {"duplicate"}
