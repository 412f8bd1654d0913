"""Models of random weights: the `tiny` pair of the tests, and an archive of any shape made with little memory.

The tokenizer of `tiny` is byte-level, with turn and think tokens: 256 byte ids, five control tokens, and a template of
our own with a thinking switch; the table has more rows than there are ids, so that everything that must keep to
existing ids is tested with some that do not exist.

    pack_random_model(QWEN3_1_7B, folder)     # what a student of full size costs on disk, in memory and in seconds
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter.recipe import Model

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")  # ids 256 .. 260

# The config.json of Qwen3-1.7B, as far as it decides names, shapes and ends: 1.72e9 weights.
QWEN3_1_7B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}

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


# ---------------------------------------------------------------------------- archives of any shape


class RandomWeights(Mapping[str, Tensor]):
    """The tensors of a config's model in bf16, each drawn anew, and equally, whenever it is asked for.

    Matrices are normal with deviation 0.02, as before training; norms lie near 1. A drawn tensor depends on the seed
    and on its place in the model alone, so packing can read one several times and hold only that one.
    """

    def __init__(self, config: Mapping[str, Any], seed: int = 0):
        from drafter.checkpoint import meta_model, ties_of

        model = meta_model(config)
        ties = ties_of(model)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in ties}
        self.seeds = {name: (seed << 20) + at for at, name in enumerate(self.shapes)}

    def __getitem__(self, name: str) -> Tensor:
        shape, generator = self.shapes[name], torch.Generator().manual_seed(self.seeds[name])
        mean = 1.0 if len(shape) == 1 else 0.0
        return torch.empty(shape, dtype=torch.bfloat16).normal_(mean, 0.02, generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def random_adapter(config: Mapping[str, Any], rank: int, base_sha256: str, seed: int = 0) -> Any:
    """An Adapter on every linear layer of a config's model, A and B not zero: as incompressible as a trained one."""
    from drafter.adapter import Adapter
    from drafter.checkpoint import meta_model

    adapter = Adapter.create(meta_model(config), rank, float(rank), seed)
    adapter.base_sha256 = base_sha256
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in adapter.state_dict().items():
        if name.endswith(".lora_B"):
            tensor.normal_(0.0, 0.02, generator=generator)
    return adapter


def pack_random_model(
    config: Mapping[str, Any],
    folder: Path,
    *,
    tokenizer_dir: Path | None = None,
    rank: int = 32,
    seed: int = 0,
    double_quant: bool = True,
) -> dict[str, Any]:
    """An archive of random weights with an adapter -> pack_adapter's report, with the base's "streams" too.

    Scales are double-quantized as in the recipes. Takes no more memory than packing itself. Without `tokenizer_dir` it
    gets the byte-level tokenizer of `tiny`.
    """
    from tokenizers import Tokenizer

    from model_io import pack_adapter, pack_base

    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        if tokenizer_dir is None:
            tokenizer_dir = Path(temporary) / "tokenizer"
            make_tokenizer(tokenizer_dir)
        ids = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).get_vocab()
        stop_ids = sorted({ids[CONTROL[0]], ids[CONTROL[2]]})  # the same two texts end a text of Qwen3 and of `tiny`
        generation = {"stop_ids": stop_ids, "num_ids": max(ids.values()) + 1, "thinking": "off", "context": 4096}
        base = Path(temporary) / "base"
        report = pack_base(
            base,
            weights=RandomWeights(config, seed),
            config={**config, "eos_token_id": stop_ids, "bos_token_id": None, "pad_token_id": None},
            tokenizer_dir=tokenizer_dir,
            generation=generation,
            architecture={"format": 1, "recipe_name": "random", "recipe": {}, "phase_log": []},
            double_quant=double_quant,
        )
        adapter = random_adapter(config, rank, report["base_sha256"], seed)
        packed = pack_adapter(folder, base_dir=base, adapter=adapter)
    return {**packed, "streams": {**report["streams"], **packed["streams"]}}
