"""The one place that renders a chat template and knows the stop ids and which ids exist.

Teacher, trainer, evaluation, server and client all get their prompt ids from `Chat.render`, so that the
drafter is served the very text it was trained on. Three settings decide what it returns and travel with
every file made from it: the thinking switch, the stop ids, and `num_ids`, the number of ids that exist
(a table may have more rows than the tokenizer has ids; those rows are padding and never win an argmax).
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

THINKING = ("on", "off", "absent")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def _template_arguments(thinking: str) -> dict[str, Any]:
    # A template call that leaves the switch unset would mean whatever its author chose as default. It is
    # always said, except to templates that have none.
    return {} if thinking == "absent" else {"enable_thinking": thinking == "on"}


def copy_tokenizer(source: str | Path, target: str | Path) -> None:
    """Copy the tokenizer files as they are: a second save by the library may write them differently."""
    for name in TOKENIZER_FILES:
        if (Path(source) / name).exists():
            shutil.copyfile(Path(source) / name, Path(target) / name)


@dataclasses.dataclass(frozen=True)
class Chat:
    """A tokenizer with its template settings. `Chat.load` checks them against the files."""

    tokenizer: Any
    thinking: str
    stop_ids: frozenset[int]
    num_ids: int

    @classmethod
    def load(cls, folder: str | Path, *, thinking: str, stop_ids: Sequence[int], num_ids: int) -> "Chat":
        """Read the tokenizer in `folder` and hold the declared settings against what its files say.

        Raises ValueError when the template has a thinking switch and the recipe says "absent" (or the other
        way round), when a file names an end id that is not among `stop_ids`, or when the tokenizer's ids do
        not fit `num_ids`.
        """
        from transformers import AutoTokenizer

        folder = Path(folder)
        if not (folder / "tokenizer.json").exists():
            raise ValueError(f"{folder} holds no tokenizer.json: is it a model folder?")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # Every added token counts as control text, also those that the template itself never writes: a user
        # who types one gets its letters, not its id.
        tokenizer.chat_control_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        chat = cls(tokenizer, thinking, frozenset(stop_ids), num_ids)
        chat._check_switch()
        chat._check_ids(folder)
        return chat

    # ------------------------------------------------------------------ use

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Prompt ids of a conversation that ends with a user turn, up to where the answer begins.

        Control-token text inside a message is encoded as ordinary text. ValueError for an empty conversation
        or one that does not end with a user turn.
        """
        if not messages or messages[-1].get("role") != "user":
            raise ValueError("a prompt is a list of messages that ends with a user turn")
        rendered = self.tokenizer.apply_chat_template(
            [{"role": message["role"], "content": message["content"]} for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            sanitize_control_tokens=True,
            **_template_arguments(self.thinking),
        )
        return list(rendered["input_ids"])

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, no template, no special tokens added."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @property
    def settings(self) -> dict[str, Any]:
        """What every file made with this object records, as JSON values."""
        return {"thinking": self.thinking, "stop_ids": sorted(self.stop_ids), "num_ids": self.num_ids}

    # ------------------------------------------------------------------ checks

    def _check_switch(self) -> None:
        if self.thinking not in THINKING:
            raise ValueError(f"thinking must be one of {', '.join(THINKING)}, not {self.thinking!r}")
        if not self.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template")
        probe = [{"role": "user", "content": "x"}]
        on, off = (
            self.tokenizer.apply_chat_template(probe, add_generation_prompt=True, tokenize=False, enable_thinking=value)
            for value in (True, False)
        )
        has_switch = on != off
        if has_switch != (self.thinking != "absent"):
            raise ValueError(
                f"the template {'has' if has_switch else 'has no'} thinking switch but the recipe says "
                f"thinking = {self.thinking!r}; set chat.thinking to {'on or off' if has_switch else 'absent'}"
            )

    def _check_ids(self, folder: Path) -> None:
        highest = max(self.tokenizer.get_vocab().values())
        if highest >= self.num_ids:
            raise ValueError(f"the tokenizer has id {highest} but num_ids is {self.num_ids}")
        named = {"tokenizer": {self.tokenizer.eos_token_id} - {None}}
        for name in ("config.json", "generation_config.json"):
            if (folder / name).exists():
                value = json.loads((folder / name).read_bytes()).get("eos_token_id")
                named[name] = set(value if isinstance(value, list) else [value]) - {None}
        for source, ids in named.items():
            if not ids <= self.stop_ids:
                raise ValueError(
                    f"{source} in {folder} ends a text with ids {sorted(ids)} but the stop ids are "
                    f"{sorted(self.stop_ids)}: a draft would run past the end; add the missing ones to stop_ids"
                )
        if any(not 0 <= stop_id < self.num_ids for stop_id in self.stop_ids):
            raise ValueError(f"stop_ids {sorted(self.stop_ids)} must lie below num_ids {self.num_ids}")
