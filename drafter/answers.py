"""Any prompts file of a user's own -> rows with the teacher's answers, kept beside the cache.

One JSON object a line, with one of

    "messages": [{"role": "user", "content": "..."}, ...]     as everywhere; an assistant's turns are left out
    "turns": ["first question", "and the next", ...]          Spec-Bench
    "prompt": "..."

and, if wanted, `category`, `family`, `id`, `source`. The teacher answers every user turn itself, in order, over its own
earlier answers; each turn becomes one row to score. Nothing is dropped in silence: a row that cannot be used is an
error that names line and field, for a benchmark with missing rows is another benchmark.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drafter.chat import Chat
from drafter.corpus import Dropped, clean_messages
from drafter.decoding import greedy_decode, load_causal_lm
from drafter.provenance import code_hash, sha256_file, sha256_json
from drafter.recipe import Recipe
from drafter.teacher_data import ShardWriter, TeacherRow, kept_length, read_shards, shard_paths

PROMPT_FIELDS = ("messages", "turns", "prompt")
CHARS_PER_ID = 16  # of the context: longer texts are refused before they are tokenized; the exact limit is on ids


@dataclass
class Conversation:
    """One line of the file: the turns still to be answered, and what has been said so far."""

    line: int
    pending: list[dict[str, str]]
    category: str
    family: str
    id: str
    source: str
    said: list[dict[str, str]] = field(default_factory=list)


# ---------------------------------------------------------------------------- reading


def read_conversations(path: str | Path, *, max_chars: int) -> list[Conversation]:
    """All lines of a prompts file, checked. ValueError names file, line and field; blank lines are left out."""
    path = Path(path)
    conversations = []
    with open(path, encoding="utf-8", newline="\n") as file:  # only \n ends a line: U+2028 may stand in a text
        try:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    conversations.append(_conversation(text, line, path, max_chars))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path.name}: not UTF-8 ({error.reason} at byte {error.start})") from None
    if not conversations:
        raise ValueError(f"{path.name} holds no prompts")
    return conversations


def _conversation(text: str, line: int, path: Path, max_chars: int) -> Conversation:
    def bad(where: str, why: str) -> ValueError:
        return ValueError(f"{path.name}, line {line}, {where}: {why}")

    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise bad("(line)", f"not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise bad("(line)", f"must be a JSON object, not {type(row).__name__}")
    given = [name for name in PROMPT_FIELDS if name in row]
    if len(given) != 1:
        raise bad("(line)", f"needs exactly one of {', '.join(PROMPT_FIELDS)}; has {', '.join(given) or 'none'}")
    [name] = given
    value = row[name]
    if name == "messages":
        messages = value
    elif name == "prompt":
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value:
        # Users only: the answers between the turns are the teacher's to write. The blank stand-ins make the roles
        # alternate for the checker, which leaves every assistant turn out.
        messages = [turn for user in value for turn in ({"role": "user", "content": user}, {"role": "assistant"})]
    else:
        raise bad(name, "must be a non-empty list of texts")
    if name != "messages":
        for at, user in enumerate(value if name == "turns" else [value]):
            if not isinstance(user, str):
                raise bad(f"{name}[{at}]" if name == "turns" else name, f"must be text, not {type(user).__name__}")
    if isinstance(messages, list) and "history" in row:
        messages = _alternating(messages)  # our own prompt rows keep user turns only, and say so
    try:
        pending, _ = clean_messages(messages, history="regenerate", max_chars=max_chars)
    except Dropped as drop:
        limit = f" (limit {max_chars} characters)" if drop.reason == "too_many_chars" else ""
        raise bad(name, drop.reason.replace("_", " ") + limit) from None
    named = {}
    for key, default in (("category", "user"), ("family", path.stem), ("source", path.name), ("id", "")):
        named[key] = row.get(key, default)
        if key == "id" and isinstance(named[key], int):
            named[key] = str(named[key])
        if not isinstance(named[key], str):
            raise bad(key, f"must be text, not {type(named[key]).__name__}")
    return Conversation(line, pending, **named)


def _alternating(messages: Sequence[Any]) -> list[Any]:
    """[user, user] -> [user, assistant, user]; other turns as they are."""
    out: list[Any] = []
    for turn in messages:
        follows_user = bool(out) and isinstance(out[-1], Mapping) and out[-1].get("role") == "user"
        if follows_user and isinstance(turn, Mapping) and turn.get("role") == "user":
            out.append({"role": "assistant"})
        out.append(turn)
    return out


# ---------------------------------------------------------------------------- answering


def answer(
    conversations: Sequence[Conversation],
    model: Any,
    chat: Chat,
    *,
    max_new_tokens: int,
    max_prompt_tokens: int,
    top_k: int,
    batch_size: int,
    progress: Callable[[int], None] | None = None,
) -> Iterator[TeacherRow]:
    """One TeacherRow a user turn, turn by turn over all conversations (so that batches stay full).

    A tail that repeats itself is cut as in training. Raises ValueError, naming the line, for a prompt of more than
    `max_prompt_tokens` ids.
    """
    turn = 0
    while active := [one for one in conversations if one.pending]:
        turn += 1
        for one in active:
            while one.pending and one.pending[0]["role"] != "user":
                one.said.append(one.pending.pop(0))  # the system text
            one.said.append(one.pending.pop(0))
        prompts = [chat.render(one.said) for one in active]
        for one, prompt in zip(active, prompts, strict=True):
            if len(prompt) > max_prompt_tokens:
                raise ValueError(
                    f"{one.source}, line {one.line}, user turn {turn}: {len(prompt)} prompt tokens; the limit is "
                    f"{max_prompt_tokens} (serving.context less generation.max_new_tokens of the recipe)"
                )
        decoded = greedy_decode(
            model,
            prompts,
            max_new_tokens,
            stop_ids=chat.stop_ids,
            num_ids=chat.num_ids,
            batch_size=batch_size,
            top_k=top_k,
            progress=progress,
        )
        for one, prompt, text in zip(active, prompts, decoded, strict=True):
            one.said.append({"role": "assistant", "content": chat.decode(text.tokens).strip()})
            kept = kept_length(text.tokens, text.finish_reason)
            yield TeacherRow(
                id=f"{one.id or one.line}/{turn}",
                source=one.source,
                category=one.category,
                family=one.family,
                split="final",
                prompt_ids=prompt,
                continuation_ids=text.tokens[:kept],
                finish_reason=text.finish_reason,
                topk_ids=text.topk_ids[:kept],
                topk_logprobs=text.topk_logprobs[:kept],
                tail_logprob=text.tail_logprob[:kept],
            )


def answered_file(
    path: str | Path, recipe: Recipe, *, progress: Callable[[int], None] | None = None
) -> list[TeacherRow]:
    """Rows of a prompts file with the answers of the recipe's teacher; made once per file content and settings.

    Kept as data/cache/RECIPE/answers/KEY-00000.parquet, KEY from the file's sha256, the settings and the code that
    makes answers. ValueError when the teacher has not been downloaded, or for a bad row.
    """
    teacher_folder = recipe.cache_dir / "models" / "teacher"
    if not (teacher_folder / "config.json").exists():
        raise ValueError(
            f"no teacher in data/cache/{recipe.name}/models/teacher; run "
            f"`python -m scripts.download_models --recipe {recipe.name}` first"
        )
    generation = recipe.generation
    settings = {
        "file_sha256": sha256_file(path),
        "teacher": recipe.document()["teacher"],
        "chat": recipe.document()["chat"],
        "generation": recipe.document()["generation"],
        "code_sha256": code_hash(
            *(f"drafter/{name}.py" for name in ("answers", "decoding", "chat", "corpus", "teacher_data"))
        ),
    }
    folder, name = recipe.cache_dir / "answers", sha256_json(settings)[:16]
    if found := shard_paths(folder, name):
        return read_shards(found)
    chat = Chat.load(
        teacher_folder,
        thinking=recipe.chat.thinking,
        stop_ids=recipe.teacher.stop_ids,
        num_ids=recipe.teacher.num_ids,
    )
    context = recipe.serving.context
    conversations = read_conversations(path, max_chars=context * CHARS_PER_ID)
    model = load_causal_lm(teacher_folder, getattr(torch, generation.dtype), stop_ids=recipe.teacher.stop_ids)
    rows = list(
        answer(
            conversations,
            model,
            chat,
            max_new_tokens=generation.max_new_tokens,
            max_prompt_tokens=context - generation.max_new_tokens,
            top_k=generation.top_k,
            batch_size=generation.batch_size,
            progress=progress,
        )
    )
    # One shard for the whole file: it is there whole or not at all, for a later turn needs the earlier answers.
    writer = ShardWriter(folder, name, generation.top_k, settings, rows_per_shard=len(rows) + 1)
    for row in rows:
        writer.add(row)
    writer.flush()
    return rows
