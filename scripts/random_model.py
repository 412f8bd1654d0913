"""The `tiny` pair: a random Qwen3-shaped model and a byte-level tokenizer with turn and think tokens, for tests.

256 byte ids, five control tokens, and a template of our own with a thinking switch; the table has more rows than
there are ids, so that everything that must keep to existing ids is tested with some that do not exist.
"""

import json
from pathlib import Path

from drafter.recipe import Model

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")  # ids 256 .. 260

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    """A tokenizer whose ids 0..255 are the bytes themselves."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # The byte-level alphabet in byte order: id = byte for printable bytes is not needed, only 256 distinct ids.
    vocabulary = {character: at for at, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def make_random_model(model: Model, folder: Path) -> None:
    """Write tokenizer and random weights into `folder`, the same bytes for the same seed."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from drafter.decoding import neutral_generation_config

    make_tokenizer(folder)
    fields = dict(model.source.config)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    config = Qwen3Config(**fields, eos_token_id=sorted(model.stop_ids), pad_token_id=None, bos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.source.seed)
        network = Qwen3ForCausalLM(config)
    network.generation_config = neutral_generation_config(model.stop_ids)
    network.save_pretrained(folder)
