"""The self-check of an archive: silent on every sound one, loud where whole bytes mean something else."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from archives import GENERATION, edit, pack, random_adapter, random_model, rewrite_weights

from drafter import self_check, streams
from drafter.adapter import Adapter
from drafter.archive import stream_specs
from drafter.engine import Draft, DraftEngine, TransformersEngine
from drafter.self_check import SelfCheckError, check
from drafter.streams import ArchiveError
from model_io import load_model, pack_adapter, verify

# Leads of random weights are small: these are wide enough that half of the positions are no near-ties.
WIDE = {"initializer_range": 0.4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_dir):
    """base/ and model/ of a model whose leads are wide."""
    folder = tmp_path_factory.mktemp("wide")
    model = random_model("qwen3", **WIDE)
    pack(model, folder / "base", tokenizer_dir)
    pack_adapter(folder / "model", base_dir=folder / "base", adapter=random_adapter(model, folder / "base"))
    return folder


def compared(document) -> int:
    return sum(gap > document["margin"] for case in document["drafts"] for gap in case["gaps"])


def engines(path):
    for dtype in ("bfloat16", "float32"):
        yield lambda dtype=dtype: DraftEngine(load_model(path, "packed", dtype))
        yield lambda dtype=dtype: TransformersEngine(load_model(path, "merged", dtype))


# ---------------------------------------------------------------------------- what it holds


def test_the_document(folder):
    documents = {name: json.loads((folder / name / "self_check.json").read_text()) for name in ("base", "model")}
    document = documents["model"]
    assert document["margin"] >= 0.0625 and compared(document) > 20
    assert documents["base"] != document, "an adapter changes the drafts"
    loaded = load_model(folder / "model", "merged", torch.float32)
    assert loaded.self_check == document
    for case in document["drafts"]:
        draft, gaps = case["draft"], case["gaps"]
        assert len(case["tokens"]) + 16 <= loaded.context and len(draft) == len(gaps)
        assert len(draft) == 16 or draft[-1] in loaded.stop_ids, "a stop id is kept, and ends it"
        with torch.no_grad():
            logits = loaded.model(torch.tensor([case["tokens"] + draft])).logits[0, :, : loaded.num_ids]
        for at, (token, gap) in enumerate(zip(draft, gaps, strict=True)):
            others = logits[len(case["tokens"]) - 1 + at].clone()
            lead = others[token].clone()
            others[token] = -torch.inf
            assert abs(float(lead - others.max()) - gap) < 2e-3


def test_threads_do_not_change_a_byte(folder, tokenizer_dir, tmp_path):
    torch.set_num_threads(2)
    try:
        pack(random_model("qwen3", **WIDE), tmp_path / "base", tokenizer_dir)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert verify(tmp_path / "base").archive_id == verify(folder / "base").archive_id


@pytest.mark.parametrize("context", [2, 3, 17, 64])
def test_prompts_fit_every_context(context, tokenizer_dir, tmp_path):
    pack(random_model("llama", **WIDE), tmp_path / "base", tokenizer_dir, generation={**GENERATION, "context": context})
    for case in verify(tmp_path / "base").self_check["drafts"]:
        assert len(case["tokens"]) + len(case["draft"]) <= context
    DraftEngine(load_model(tmp_path / "base", "packed"))


# ---------------------------------------------------------------------------- sound archives pass


def test_sound_archives_pass_in_every_engine_and_dtype(folder, packed):
    for path in (folder / "base", folder / "model", packed[0] / "base", packed[0] / "model"):
        for engine in engines(path):
            check(engine(), verify(path).self_check)


@pytest.mark.parametrize("seed", range(6))
def test_sound_archives_of_many_weights_pass(seed, tokenizer_dir, tmp_path):
    torch.manual_seed(seed)
    model = random_model(("qwen3", "llama")[seed % 2], initializer_range=0.05 * (seed + 1), num_hidden_layers=4)
    for parameter in model.parameters():
        parameter.data.mul_(1 + 0.1 * torch.randn_like(parameter))
    pack(model, tmp_path / "base", tokenizer_dir, storage=("zst", "plain")[seed % 2])
    for engine in engines(tmp_path / "base"):
        check(engine(), verify(tmp_path / "base").self_check)


# ---------------------------------------------------------------------------- damage is seen


def refused_at_load(path, form="packed") -> SelfCheckError:
    """Every byte of the archive is as its documents say; only what it drafts is another thing."""
    document = verify(path).self_check
    with pytest.raises(SelfCheckError, match="drafts otherwise.*Next: ") as caught:
        DraftEngine(load_model(path, form))
    for engine in engines(path):
        with pytest.raises(ArchiveError):
            check(engine(), document)
    return caught.value


def test_a_zeroed_adapter_signed_again(folder, tmp_path):
    """Such an archive verifies, loads and drafts; only acceptance fell to that of the base."""
    shutil.copytree(folder / "model", tmp_path / "model")
    own = load_model(folder / "model", "packed").adapter
    zeros = {name: torch.zeros_like(tensor) for name, tensor in own.state_dict().items()}
    zeroed = Adapter(zeros, own.rank, own.alpha, own.scale, own.targets, own.base_sha256)
    pack_adapter(tmp_path / "zeroed", base_dir=folder / "base", adapter=zeroed)
    shutil.copy(folder / "model" / "self_check.json", tmp_path / "zeroed")
    edit(tmp_path / "zeroed", "self_check.json", lambda document: None)
    error = refused_at_load(tmp_path / "zeroed")
    assert error.file == "self_check.json" and error.expected != error.found


def test_changed_blocks_signed_again(folder, tmp_path):
    for name in ("model.layers.0.self_attn.v_proj.weight.codes", "model.layers.1.mlp.down_proj.weight.codes"):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        shutil.copytree(folder / "model", tmp_path / "model")
        specs = stream_specs(json.loads((tmp_path / "model" / "quantization.json").read_text()))
        start = len(streams.safetensors_header(specs, {"format": 1, "kind": "weights"}))
        sizes = {other: torch.Size(shape).numel() * dtype.itemsize for other, (dtype, shape) in specs.items()}
        start += sum(size for other, size in sizes.items() if list(specs).index(other) < list(specs).index(name))

        def swap_nibbles(stream, start=start, size=sizes[name]):
            for at in range(start, start + size):
                stream[at] = stream[at] >> 4 | (stream[at] & 15) << 4

        rewrite_weights(tmp_path / "model", swap_nibbles)
        refused_at_load(tmp_path / "model")


def test_settings_of_the_arithmetic_signed_again(folder, tmp_path):
    """config.json decides how the same weights are used; nothing in the archive contradicts another rope theta."""
    for change in (
        lambda document: document["rope_parameters"].update(rope_theta=10.0),
        lambda document: document.update(rms_norm_eps=0.5),
        lambda document: document.update(hidden_act="relu"),
    ):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        shutil.copytree(folder / "base", tmp_path / "model")
        edit(tmp_path / "model", "config.json", change)
        document = verify(tmp_path / "model").self_check
        with pytest.raises(ArchiveError):
            check(TransformersEngine(load_model(tmp_path / "model", "merged")), document)
        with pytest.raises(ValueError):  # SelfCheckError, or an activation that the own forward pass refuses
            DraftEngine(load_model(tmp_path / "model", "packed"))


def retemplated(document):
    document["chat_template"] = document["chat_template"].replace("{{", "{{ ' ' + ", 1)


def swapped(document):
    vocabulary = document["model"]["vocab"]
    vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", retemplated),
        ("tokenizer.json", swapped),
        ("tokenizer.json", lambda document: document.update(normalizer={"type": "Lowercase"})),
    ],
)
def test_a_text_that_is_rendered_otherwise(folder, tmp_path, file, change):
    """The drafts are kept as ids, so that another template or tokenizer drafted as before and was not seen: each
    request was then answered for another text than its client had rendered."""
    shutil.copytree(folder / "model", tmp_path / "model")
    edit(tmp_path / "model", file, change)
    verify(tmp_path / "model")
    for form in ("packed", "merged"):
        with pytest.raises(SelfCheckError, match=r"prompt \d is rendered otherwise.*requirements-serve.txt"):
            load_model(tmp_path / "model", form)


def test_a_template_that_writes_the_date_is_not_held_to_it(folder, tmp_path):
    """Llama 3.2's writes today's date: sound archives of it would be refused from the day after they were packed."""
    shutil.copytree(folder / "model", tmp_path / "model")

    def dated(document):
        document["chat_template"] = "{{ strftime_now('%d %b %Y') }}" + document["chat_template"]

    edit(tmp_path / "model", "tokenizer_config.json", dated)
    DraftEngine(load_model(tmp_path / "model", "packed"))


def test_every_engine_checks_before_it_drafts(folder):
    """`server.py --engine transformers` served what it had not checked."""
    for form, engine in (("packed", DraftEngine), ("merged", TransformersEngine)):
        loaded = load_model(folder / "model", form, torch.float32)
        case = loaded.self_check["drafts"][0]
        sure = next(at for at, gap in enumerate(case["gaps"]) if gap > loaded.self_check["margin"])
        case["draft"][sure] += 1
        with pytest.raises(SelfCheckError, match="prompt 0"):
            engine(loaded)


def test_a_kernel_that_reads_a_matrix_the_wrong_way_round(folder):
    loaded = load_model(folder / "model", "merged", torch.float32)
    weight = loaded.model.model.layers[1].self_attn.q_proj.weight  # [64, 64]: transposed, it fits
    with torch.no_grad():
        weight.copy_(weight.T.clone())
    with pytest.raises(SelfCheckError):
        check(TransformersEngine(loaded), loaded.self_check)


# ---------------------------------------------------------------------------- the comparison itself


class Stub:
    """An engine that continues each known text from a table; `asked` keeps the batches."""

    def __init__(self, text: list[int], changed: dict[int, int] | None = None):
        self.text, self.changed, self.asked = text, changed or {}, []

    def draft(self, requests):
        self.asked.append([(len(request.tokens), request.k) for request in requests])
        answers = []
        for request in requests:
            assert list(request.tokens) == self.text[: len(request.tokens)]
            places = range(len(request.tokens), len(request.tokens) + request.k)
            answers.append(Draft([self.changed.get(at, self.text[at]) for at in places], "length", {}))
        return answers


def test_what_is_compared_lies_between_the_near_ties():
    document = {
        "margin": 0.5,
        "drafts": [
            {"tokens": [1, 2], "draft": [3, 4, 5, 6, 7], "gaps": [0.5, 0.6, 3.0, -0.1, 0.7]},
            {"tokens": [1], "draft": [2, 3], "gaps": [0.2, 0.4]},
            {"tokens": [1, 2, 3], "draft": [4], "gaps": [9.0]},
        ],
    }
    engine = Stub([1, 2, 3, 4, 5, 6, 7])
    check(engine, document)
    # of the first prompt positions 3 and 4, then 6: each run in a batch of its own, near-ties only as prefix
    assert engine.asked == [[(3, 2), (3, 1)], [(6, 1)]]
    for near_tie in (2, 5):
        check(Stub([1, 2, 3, 4, 5, 6, 7], {near_tie: 99}), document)
    for place in (3, 4, 6):
        with pytest.raises(SelfCheckError, match="99") as caught:
            check(Stub([1, 2, 3, 4, 5, 6, 7], {place: 99}), document)
        assert caught.value.file == "self_check.json" and "prompt 0" in str(caught.value)

    class Short(Stub):
        def draft(self, requests):
            return [SimpleNamespace(tokens=draft.tokens[:-1]) for draft in super().draft(requests)]

    with pytest.raises(SelfCheckError):
        check(Short([1, 2, 3, 4, 5, 6, 7]), document)
    check(Stub([]), {"margin": 1.0, "drafts": []})


def test_the_prompts_are_of_every_kind(folder):
    chat = load_model(folder / "base").chat
    texts, drafted = self_check.prompts(chat, 261, 4096)
    assert drafted == 16 and len(texts) == 6 and max(map(len, texts)) > 100
    assert all(0 <= token < 261 for text in texts for token in text)
    assert len(set(texts[-1])) == len(texts[-1]), "raw ids spread over the table"
