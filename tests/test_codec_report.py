"""scripts.codec_report on the `tiny` chain: every row, its arithmetic against plain computations, llama.cpp stubbed.

The stub stands where llama-cpp-python's environment would: a program that takes the same arguments and quantizes with
the gguf package. What llama.cpp itself does with our file is seen when the report is recorded.
"""

import json
import sys

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from drafter.acceptance import RoundCounts
from drafter.checkpoint import codecs_of, meta_model
from drafter.provenance import ROOT, read_json
from drafter.scoring import evaluate_model
from model_io import load_model, sizes, verify
from scripts import _gguf, codec_report, pack_model
from scripts.codec_report import COLUMNS, FULL_SIZE, GGUF, OURS, PLAIN, Coded, States
from scripts.evaluate import split_rows
from scripts.random_model import RandomWeights

SHAPE = {
    "vocab_size": 272, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip

STUB = """#!{python}
# As `python -c PROGRAM source target file_type threads`: matrices of blocks become Q4_0, the table Q8_0.
import sys
sys.path.insert(0, {root!r})
import gguf, numpy as np
source, target = sys.argv[3:5]
reader = gguf.GGUFReader(source)
writer = gguf.GGUFWriter(target, "stub")
for tensor in reader.tensors:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    kind = gguf.GGMLQuantizationType.Q4_0 if tensor.name.startswith("blk.") else gguf.GGMLQuantizationType.Q8_0
    if values.ndim > 1:
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(tensor.name, np.array(values, dtype=np.float32))
writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()
"""


@pytest.fixture(scope="module")
def llama_python(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "python"
    path.write_text(STUB.format(python=sys.executable, root=str(ROOT)))
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def document(chain, llama_python):
    """The result document of one run of the command, full size at a small shape."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_report, "QWEN3_1_7B", {"model_type": "qwen3", **SHAPE})
        patch.setattr(codec_report.results, "record", lambda made: chain.root / "recorded.json")
        argv = ["--recipe", "tiny", "--report", "--llama-python", llama_python, "--full-size", "--record"]
        assert pack_model.main(argv) == 0
    return read_json(chain.root / "runs" / "tiny" / "codecs.json")


@pytest.fixture(scope="module")
def rows(document):
    return {row["codec"]: row for row in document["rows"]}


# ---------------------------------------------------------------------------- rows


def test_every_codec_has_a_row_with_every_column(document, rows):
    assert list(rows) == [*PLAIN, *OURS, *GGUF, *FULL_SIZE] and document["name"] == "codecs"
    assert all(tuple(row) == COLUMNS for row in document["rows"])
    assert [row["model"] for row in document["rows"]] == ["tiny"] * 12 + ["qwen3-1.7b"] * 2
    for codec, row in rows.items():
        measured = [row[name] for name in ("kl_to_bf16", "tau16", "tau16_interval")]
        assert all(one is None for one in measured) == (codec in FULL_SIZE), codec
        with_adapter = row["bits_per_weight_linear_with_adapter"] is not None
        assert with_adapter == codec.endswith("-adapter"), codec
    assert "--report" in document["command"] and str(ROOT) not in document["command"]


def test_bits_follow_from_the_formats(chain, rows):
    """The narrow matrices of `tiny` are 64 and 128 wide: a row's bf16 scale is 16 / 64 or 16 / 128 bit a weight."""
    bits = {codec: row["bits_per_weight_linear"] for codec, row in rows.items()}
    assert bits["bf16"] == 16 and bits["bitsandbytes-nf4"] == 4.5
    assert bits["nf4-absmax"] == bits["nf4-search"] == bits["nf4-search-moments"] == 4.25
    assert bits["nf4-search-dq"] < 4.25
    assert [bits[codec] for codec in GGUF] == [4.5] * 3
    config = read_json(chain.root / "runs/tiny/polish/config.json")
    model = meta_model(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    linear = [shapes[name] for name, kind in codecs_of(model).items() if kind == "nf4"]
    count = sum(rows * columns for rows, columns in linear)
    assert bits["int8"] == round(sum(8 * r * c + 16 * r for r, c in linear) / count, 3)
    table = shapes["model.embed_tokens.weight"]
    norms = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    whole = 4.5 * count + 8 * table[0] * table[1] + 16 * table[0] + 32 * norms
    assert rows["bitsandbytes-nf4"]["bits_per_weight_all"] == round(whole / (count + table[0] * table[1] + norms), 3)
    final = sizes(verify(chain.model_dir))
    assert rows["nf4-qat-adapter"]["archive_bytes"] == final["size_bytes"]
    assert (
        rows["nf4-qat-adapter"]["bits_per_weight_linear_with_adapter"] == final["bits_per_weight_linear_with_adapter"]
    )
    assert rows["nf4-qat-adapter"]["bits_per_weight_linear"] == final["bits_per_weight_linear"]


def test_tau_is_that_of_evaluate(chain, rows):
    """Another loop with other weights in the same model must not score otherwise than the archive by itself."""
    selection, ks = split_rows(chain.recipe, "selection"), chain.recipe.evaluation.draft_lengths
    folders = {"nf4-qat": chain.root / "runs/tiny/base", "nf4-qat-adapter": chain.model_dir}
    for codec, folder in folders.items():
        result = evaluate_model(load_model(folder).model, selection, num_ids=chain.recipe.base.num_ids, ks=ks)
        assert rows[codec]["tau16"] == round(result.tau[16], 4), codec
        assert rows[codec]["tau16_interval"] == result.record["tau16_interval"]


def test_errors_are_ordered_as_codecs_are(rows):
    """bf16 is the reference; INT8 lies far below any 4 bits; the search minimises just the weights' squared error."""
    assert rows["bf16"]["kl_to_bf16"] == 0 and rows["bf16"]["weight_rel_error"] < 0.005
    for column in ("weight_rel_error", "output_rel_error"):
        assert 0 < rows["int8"][column] < rows["nf4-search"][column] / 4
        assert rows["nf4-search"][column] < rows["nf4-absmax"][column] * 1.01
    assert rows["nf4-search"]["weight_rel_error"] <= rows["nf4-search-moments"]["weight_rel_error"]
    assert rows["nf4-search-moments"]["output_rel_error"] < rows["nf4-search"]["output_rel_error"]
    assert rows["nf4-absmax"]["weight_rel_error"] == pytest.approx(
        rows["bitsandbytes-nf4"]["weight_rel_error"], rel=0.02
    )
    assert rows["nf4-qat-adapter"]["weight_rel_error"] is None
    assert all(row["kl_to_bf16"] > 0 for codec, row in rows.items() if codec not in ("bf16", *FULL_SIZE))


# ---------------------------------------------------------------------------- arithmetic


def test_kl_in_blocks_is_kl_at_once(monkeypatch):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(37, 16, generator=generator)
    heads = [torch.randn(50, 16, generator=generator) for _ in range(3)]
    reference, *others = [States((hidden + at / 10).bfloat16(), head.bfloat16()) for at, head in enumerate(heads)]
    monkeypatch.setattr(codec_report, "LOGITS", 50 * 8)  # blocks of 8 positions, the last one of 5
    seen: list[int] = []
    found = codec_report.mean_kls(reference, [reference, *others], seen.append)
    assert seen == [8, 8, 8, 8, 5] and found[0] == 0
    log_probs = [F.log_softmax(one.hidden.double() @ one.head.double().T, -1) for one in (reference, *others)]
    for kl, log_q in zip(found[1:], log_probs[1:], strict=True):
        assert kl == pytest.approx(float(F.kl_div(log_q, log_probs[0], log_target=True, reduction="batchmean")), 1e-5)


def test_relative_errors_by_hand():
    """A tenth more of one of two equally large layers: 0.1 and 0 in the outputs, 0.1 / sqrt(2) over both weights."""
    source = {"a": torch.eye(4).bfloat16(), "b": torch.tensor([[2.0, 0, 0, 0]])}  # |a| = |b| = 2
    coded = Coded("x", {"a": 1.1 * source["a"].float(), "b": source["b"]}, {}, source)
    inputs = {"a": torch.randn(5, 4).bfloat16(), "b": torch.ones(3, 4)}
    weight, output = codec_report.relative_errors(coded, inputs)
    assert weight == pytest.approx(0.1 / 2**0.5, rel=1e-4) and output == pytest.approx(0.05, rel=1e-4)
    assert codec_report.relative_errors(Coded("x", {}, {}), inputs) == (None, None)


def test_goals_say_what_was_missed():
    """A difference of tau inside its own interval was once called met: on another day's run it had the other sign."""

    def counts(first: int, second: int | None = None) -> RoundCounts:
        accepted = np.zeros((2, 17), dtype=np.int64)
        accepted[:, 2] = 10  # ten rounds in each of two rows
        return RoundCounts(16, np.array([first, first if second is None else second]), accepted)

    bits = {"nf4-search": 4.25, "nf4-qat": 4.25, "nf4-qat-adapter": 4.25, "gguf-q4_0": 4.5, "gguf-iq4_nl": 4.2}
    rows = [{"codec": codec, "bits_per_weight_linear": one} for codec, one in bits.items()]
    emitted = {"nf4-search": 30, "nf4-qat": 33, "nf4-qat-adapter": 33, "gguf-q4_0": 32, "gguf-iq4_nl": 31}
    said = codec_report.goals(rows, {codec: counts(one) for codec, one in emitted.items()}, 10)
    assert said[0].startswith("missed: nf4-search 4.25 bits, tau -0.200 [-0.200, -0.200] over gguf-q4_0, 4.5 bits")
    assert said[2].startswith("met   : nf4-qat 4.25 bits, tau +0.100")
    assert said[3].startswith("missed: nf4-qat 4.25 bits, tau +0.200"), "more bits than the other"
    assert len(said) == 7 and said[-1].startswith("nf4-qat and its adapter were trained longer")
    mixed = {codec: counts(30) for codec in bits} | {"nf4-search": counts(36, 27)}  # +0.6 and -0.3 in its two rows
    said = codec_report.goals(rows, mixed, 100)
    assert said[0].startswith("open  : nf4-search 4.25 bits, tau +0.150 [-0.300, +0.600]")
    assert said[1].startswith("missed: nf4-search"), "more bits are a miss, whatever tau says"
    sizes_of = [
        {"codec": FULL_SIZE[0], "bits_per_weight_linear_with_adapter": 5.1, "archive_bytes": 10},
        {"codec": FULL_SIZE[1], "bits_per_weight_linear": 4.89, "archive_bytes": 11},
    ]
    said = codec_report.goals(sizes_of, {}, 10)
    assert said == [
        "missed: 5.1 bits a linear weight, adapter included, against 4.89",
        "met   : 10 bytes, adapter included, against 11",
    ]


# ---------------------------------------------------------------------------- GGUF files


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gguf_file_gives_back_every_bit(tmp_path, kind, dtype):
    """llama.cpp keeps q and k of arch llama in another order of rows: left out, scores would be of a broken model."""
    config = {"model_type": kind, **SHAPE}
    weights = {name: tensor.to(dtype) * 1.001 for name, tensor in RandomWeights(config).items()}
    path = tmp_path / "student.gguf"
    _gguf.write_gguf(path, weights, config)
    back = dict(_gguf.read_weights(path, config))
    assert set(back) == set(weights)
    assert all(torch.equal(back[name], weights[name].float()) for name in weights)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    q_rows = torch.from_numpy(
        np.array(gguf.quants.dequantize(stored["blk.1.attn_q.weight"].data, stored["blk.1.attn_q.weight"].tensor_type))
    )
    ours = weights["model.layers.1.self_attn.q_proj.weight"].float()
    half = SHAPE["head_dim"] // 2
    for row in range(64):
        head, within = divmod(row, 2 * half)
        # rows of a head in the file: 0, half, 1, half + 1, ...
        source = head * 2 * half + within // 2 + within % 2 * half if kind == "llama" else row
        assert torch.equal(q_rows[row], ours[source])


def test_sizes_are_read_from_the_file(tmp_path, llama_python):
    config = {"model_type": "llama", **SHAPE}
    weights, source, path = RandomWeights(config), tmp_path / "source.gguf", tmp_path / "q.gguf"
    _gguf.write_gguf(source, weights, config)
    assert _gguf.read_sizes(source, config)["bits_per_weight_linear"] == 16
    _gguf.quantize_gguf(source, "Q4_0", path, llama_python)
    found = _gguf.read_sizes(path, config)
    assert found["bits_per_weight_linear"] == 4.5 and found["size_bytes"] == path.stat().st_size
    assert found["types"] == {"linear": {"Q4_0": 14}, "tables": {"Q8_0": 1}}
    assert _gguf.said_types(found["types"]) == "linear 14 Q4_0, tables 1 Q8_0"
    table, linear, norms = 272 * 64, sum(weights[n].numel() for n in weights if "proj" in n), 64 * 5
    assert found["bits_per_weight_all"] == pytest.approx(
        (8.5 * table + 4.5 * linear + 32 * norms) / (table + linear + norms)
    )
    with pytest.raises(ValueError, match="holds other tensors"):
        _gguf.read_sizes(path, {**config, "num_hidden_layers": 3})


def test_an_environment_that_does_not_work_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="no/python cannot be run.*pip install llama-cpp-python"):
        _gguf.quantize_gguf(tmp_path / "a", "Q4_0", tmp_path / "b", "no/python")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no module named llama_cpp' >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ValueError, match="did not make Q4_0.*no module named llama_cpp"):
        _gguf.quantize_gguf(tmp_path / "a", "Q4_0", tmp_path / "b", str(broken))


# ---------------------------------------------------------------------------- command line


def test_what_is_left_out_says_what_adds_it(chain, capsys):
    assert pack_model.main(["--recipe", "tiny", "--report", "--record"]) == 1
    said = capsys.readouterr()
    assert "gguf-q4_0 is left out; it needs --llama-python" in said.out and "nf4-search-dq-adapter" in said.out
    assert "--record keeps the whole table" in said.err and said.err.count("\n") == 1
    assert pack_model.main(["--recipe", "tiny", "--report", "--dry-run", "--full-size"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["codecs"] == [*PLAIN, *OURS, FULL_SIZE[0]] and plan["missing"] == []
    assert plan["estimated_s"] > 0 and set(plan["left_out"]) == {*GGUF, "gguf-q4_k_m"}
    for argv in (["--record"], ["--full-size"], ["--llama-python", "x"]):
        with pytest.raises(SystemExit):
            pack_model.main(["--recipe", "tiny", *argv])


def test_a_run_that_is_not_finished(chain, tmp_path, capsys):
    run = tmp_path / "tiny"
    (run / "polish").mkdir(parents=True)
    document = read_json(chain.root / "runs/tiny/architecture.json")
    document["phase_log"] = [entry for entry in document["phase_log"] if entry["phase"] != "adapter"]
    (run / "architecture.json").write_text(json.dumps(document))
    for phase in ("polish", "qat"):
        (run / phase).mkdir(exist_ok=True)
        (run / phase / "model.safetensors").symlink_to(chain.root / "runs/tiny" / phase / "model.safetensors")
    assert pack_model.main(["--recipe", "tiny", "--report", "--run", str(run)]) == 1
    assert "train.py --phase adapter --recipe tiny" in capsys.readouterr().err
