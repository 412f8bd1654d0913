"""The packed archive: pack, verify, load.

    model/
      manifest.json             every file with size and sha256; archive_id = sha256 of that list
      config.json  generation.json  architecture.json  copy_policy.json  tokenizer files
      self_check.json           a few prompts and what is drafted for them, compared at each load (self_check.py)
      draft_vocabulary.json     the ids that compete in a draft beside those of its request; without it, all
      quantization.json         codec and shape of every tensor, ties, size and sha256 of the decompressed stream, and
                                the checkpoint that was quantized (its phase and sha256)
      weights.safetensors.zst   NAME.codes, NAME.scales (with NAME.scales2 where they are double-quantized), small
                                tensors as they are (or weights.safetensors, mapped)
      adapter.safetensors.xz    with adapter.json (rank, alpha, scale, targets, sha256 of the base), or neither
      evidence/                 written later, outside the list

    archive = verify("model")                       # everything but building the model; ArchiveError on any fault
    loaded = load_model("model", form="merged")     # .model (transformers), .chat, .generation, .archive_id, .info
    pack_base("runs/R/base", weights=Checkpoint("runs/R/qat"), ...)    # NF4 + INT8; frozen from then on
    pack_adapter("model", base_dir="runs/R/base", adapter=Adapter.load("runs/R/adapter"))

`drafter/archive.py` says what an archive is and reads it; this file writes one and makes models of it. Loading needs no
git and no network, runs no code of the folder's, and unpickles nothing.

Legend: R rows and D columns of a matrix.
"""

import contextlib
import dataclasses
import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from drafter import quantization as q
from drafter.acceptance import NEAR_TIE_GAP
from drafter.adapter import Adapter, check_unmerged, linear_names, mark_merged
from drafter.archive import (
    CONFIG_KEYS,
    DRAFT_VOCABULARY,
    FORMAT,
    WEIGHTS,
    WEIGHTS_METADATA,
    Archive,
    adapter_metadata,
    adapter_specs,
    check_copy_policy,
    check_draft_vocabulary,
    check_generation,
    check_quantization,
    document_bytes,
    draft_vocabulary_document,
    kind_of,
    manifest_bytes,
    read_archive,
    stream_specs,
)
from drafter.chat import Chat, copy_tokenizer
from drafter.checkpoint import (
    EMBEDDING,
    HEAD,
    check_names,
    check_weights,
    codecs_of,
    meta_model,
    refuse_teacher,
    ties_of,
)
from drafter.packed_layers import PackedEmbedding, PackedHead, PackedLinear, PackedTable
from drafter.provenance import canonical_json, sha256_bytes, sha256_file
from drafter.streams import (
    DTYPE_NAMES,
    XZ_FILTERS,
    ArchiveError,
    ContentError,
    safetensors_header,
    stream_size,
    tensor_bytes,
    write_plain,
    write_zstd,
)


def verify(folder: str | Path) -> Archive:
    """Checks an archive whole: every byte, and that its tensors are those of its config. Returns it without them.

    Raises ArchiveError. No model is built but an empty one, of names and shapes.
    """
    archive = read_archive(folder)
    check_names(meta_model(archive.config), archive.quantization)
    return dataclasses.replace(archive, tensors={}, adapter=None)


# ---------------------------------------------------------------------------- load


@dataclasses.dataclass
class LoadedModel:
    """A model ready to run, and what it must be run with."""

    model: nn.Module
    chat: Chat
    generation: dict[str, Any]
    archive_id: str
    base_sha256: str
    info: dict[str, Any]
    # packed form: NAME.codes, NAME.scales (bf16, however they are stored) and small tensors; merged form: empty
    tensors: dict[str, Tensor]
    adapter: Adapter | None  # packed form: attached to the model
    self_check: dict[str, Any]  # compared by the engine that drafts with it
    copy_policy: dict[str, Any]  # {"enabled": False}, or the limits of a CopyPolicy
    draft_vocabulary: np.ndarray | None  # rising int32 ids; None: all existing ones

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.generation["stop_ids"])

    @property
    def num_ids(self) -> int:
        return self.generation["num_ids"]

    @property
    def context(self) -> int:
        return self.generation["context"]


def load_model(folder: str | Path, form: str = "merged", dtype: torch.dtype | str = torch.bfloat16) -> LoadedModel:
    """Verify an archive and make a model of it, in eval mode, on the CPU.

    merged  every weight decoded, adapter added in fp32, cast once to `dtype`: plain transformers.
    packed  codes and scales kept, decoded in each forward, adapter beside them: slow, the oracle of fused kernels.

    ArchiveError for anything wrong with the folder; ValueError for an unknown form.
    """
    if form not in ("merged", "packed"):
        raise ValueError(f"form must be merged or packed, not {form!r}")
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    archive = read_archive(folder)
    model = meta_model(archive.config)
    check_names(model, archive.quantization)
    if form == "merged":
        _fill_merged(model, archive, dtype)
    else:
        _fill_packed(model, archive, dtype)
    leftover = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not leftover, leftover
    # Nothing of a vendor's generation file can act: there is none in an archive, and what transformers derives
    # from the config is replaced.
    from drafter.attention import use_grouped_attention
    from drafter.decoding import neutral_generation_config
    from drafter.self_check import check_prompts

    model.generation_config = neutral_generation_config(archive.generation["stop_ids"])
    use_grouped_attention(model)
    settings = {key: archive.generation[key] for key in ("thinking", "stop_ids", "num_ids")}
    try:
        chat = Chat.load(archive.path, **settings)
        check_prompts(chat, chat.num_ids, archive.generation["context"], archive.self_check)
    except (ArchiveError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # whatever the tokenizer and template libraries make of damaged content; a panic in Rust is not an Exception
        raise ContentError("tokenizer.json", f"{type(error).__name__}: {error}"[:300]) from None
    return LoadedModel(
        model=model,
        chat=chat,
        generation=archive.generation,
        archive_id=archive.archive_id,
        base_sha256=archive.base_sha256,
        info=_info(archive),
        tensors=archive.tensors if form == "packed" else {},
        adapter=archive.adapter if form == "packed" else None,
        self_check=archive.self_check,
        copy_policy=archive.copy_policy,
        draft_vocabulary=archive.draft_vocabulary,
    )


def load_base(folder: str | Path, dtype: torch.dtype | str = torch.bfloat16) -> LoadedModel:
    """The frozen base for the adapter phase: decoded weights, and `.base_sha256`, which the adapter must name."""
    if (Path(folder) / "adapter.json").exists():
        raise ValueError(f"{folder} has an adapter; the adapter phase starts from the base: pack_model --base makes it")
    return load_model(folder, "merged", dtype)


def _info(archive: Archive) -> dict[str, Any]:
    """What /info tells about the model; plain JSON values."""
    kept = ("phase", "steps", "tokens", "elapsed_s", "selection_after", "checkpoint_sha256")
    log = [{key: entry[key] for key in kept if key in entry} for entry in archive.architecture["phase_log"]]
    return {
        "recipe": archive.architecture["recipe_name"],
        "model_type": archive.config["model_type"],
        "layers": archive.config["num_hidden_layers"],
        "hidden_size": archive.config["hidden_size"],
        "rows": archive.config["vocab_size"],
        "draft_vocabulary": None if archive.draft_vocabulary is None else len(archive.draft_vocabulary),
        "copy_policy": archive.copy_policy["enabled"],
        "adapter_rank": archive.adapter_document["rank"] if archive.adapter_document else None,
        **sizes(archive),
        "phase_log": log,
    }


def decoded(tensors: Mapping[str, Tensor], name: str, entry: Mapping[str, Any]) -> Tensor:
    """fp32 weight of one stored tensor."""
    if entry["codec"] == "nf4":
        return q.nf4_dequantize(tensors[f"{name}.codes"], tensors[f"{name}.scales"], entry["shape"])
    if entry["codec"] == "int8":
        return q.int8_dequantize(tensors[f"{name}.codes"], tensors[f"{name}.scales"])
    return tensors[name].float()


def _fill_merged(model: nn.Module, archive: Archive, dtype: torch.dtype) -> None:
    targets = set(archive.adapter.targets) if archive.adapter else set()
    state = {}
    for name, entry in archive.quantization["tensors"].items():
        weight = decoded(archive.tensors, name, entry)  # fp32 [R, D]
        if name.removesuffix(".weight") in targets:
            weight = archive.adapter.merged(name.removesuffix(".weight"), weight)
        # the one cast; a clone, where nothing was cast, so that no weight stays a view into the stream
        state[name] = weight.to(dtype, copy=True) if entry["codec"] == "none" else weight.to(dtype)
    for name, source in archive.quantization["ties"].items():
        state[name] = state[source]
    model.load_state_dict(state, strict=True, assign=True)
    if HEAD in archive.quantization["ties"]:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.requires_grad_(False)
    if archive.adapter:
        mark_merged(model.config)


def _fill_packed(model: nn.Module, archive: Archive, dtype: torch.dtype) -> None:
    tensors, entries = archive.tensors, archive.quantization["tensors"]
    tables = {
        name: PackedTable(tensors[f"{name}.codes"], tensors[f"{name}.scales"])
        for name, entry in entries.items()
        if entry["codec"] == "int8"
    }
    for name in linear_names(model):
        bias = tensors.get(f"{name}.bias")
        weight = (tensors[f"{name}.weight.codes"], tensors[f"{name}.weight.scales"])
        model.set_submodule(name, PackedLinear(*weight, entries[f"{name}.weight"]["shape"], bias))
    model.model.embed_tokens = PackedEmbedding(tables[EMBEDDING], dtype)
    model.lm_head = PackedHead(tables[archive.quantization["ties"].get(HEAD, HEAD)])
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:  # norms
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(tensors[name].to(dtype), requires_grad=False))
    if archive.adapter:
        archive.adapter.attach(model)
        for parameter in archive.adapter.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)  # stored in bf16: exact in fp32 too


# ---------------------------------------------------------------------------- pack


def pack_base(
    out_dir: str | Path,
    *,
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    tokenizer_dir: str | Path,
    generation: Mapping[str, Any],
    architecture: Mapping[str, Any],
    scales: Mapping[str, Tensor] | None = None,
    double_quant: bool = False,
    moments: Mapping[str, Tensor] | None = None,
    storage: str = "zst",
    teacher_dir: str | Path | None = None,
    source: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """Quantize a checkpoint and write it as an archive without adapter -> report (see `sizes`, plus "streams").

    weights     fp32 or bf16 tensors by their names in the model; a `Checkpoint` is read tensor by tensor
    config      content of the checkpoint's config.json
    generation  {"stop_ids", "num_ids", "thinking", "context"}
    scales      NF4 scales by tensor name, as quantization-aware training left them: used unchanged; searched if None
    double_quant  store NF4 scales in one byte each; given ones only where that loses nothing
    moments     mean square of each linear layer's inputs by tensor name, weights of the search; only without `scales`
    teacher_dir its checkpoint: weights that are the teacher's own are refused
    source      (phase, sha256 of its checkpoint) that the weights are, kept in the archive

    The folder is written beside `out_dir` and takes its place once it verifies. ValueError (ArchiveError, AdapterError)
    when something does not fit; nothing is left behind then.
    """
    if storage not in WEIGHTS:
        raise ValueError(f"storage must be {' or '.join(WEIGHTS)}, not {storage!r}")
    check_unmerged(config)
    config = _clean_config(config)
    generation = check_generation({"format": FORMAT, **generation})
    model = meta_model(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ties, codecs = ties_of(model), codecs_of(model)
    check_weights(weights, shapes, ties)
    linear = [name for name, codec in codecs.items() if codec == "nf4"]
    if teacher_dir is not None:
        refuse_teacher(weights, linear, teacher_dir)
    assert scales is None or moments is None, "scales that are given are not searched"
    if scales is not None and set(scales) != set(linear):
        differ = sorted(set(scales) ^ set(linear))
        raise ContentError("nf4_scales", "scales must name exactly the linear layers", len(linear), differ[:3])

    stored_shapes = {name: shape for name, shape in shapes.items() if name not in ties}
    entries, found, doubled = _choose_scales(weights, stored_shapes, codecs, scales, moments, double_quant)
    phase, checkpoint_sha256 = source or (None, None)
    dtype = str(weights[linear[0]].dtype).removeprefix("torch.")
    origin = {"dtype": dtype, "phase": phase, "checkpoint_sha256": checkpoint_sha256}
    quantization = {"format": FORMAT, "block_size": q.BLOCK, "source": origin, "ties": ties, "tensors": entries}
    specs = stream_specs(quantization)
    size = stream_size(specs, WEIGHTS_METADATA)

    def pieces():
        yield "header", safetensors_header(specs, WEIGHTS_METADATA)
        for stored, (dtype, _) in tqdm(specs.items(), "weights", delay=10, unit=" tensors"):
            kind = kind_of(stored, dtype)
            if stored in entries:
                yield kind, tensor_bytes(weights[stored])
                continue
            name, _, part = stored.rpartition(".")
            if part == "codes":
                quantize = q.nf4_quantize if entries[name]["codec"] == "nf4" else q.int8_quantize
                yield kind, tensor_bytes(quantize(weights[name], found[name], name))
            elif name in doubled:
                yield kind, tensor_bytes(doubled[name].codes if part == "scales" else doubled[name].groups)
            else:
                yield kind, tensor_bytes(found[name])

    with _new_folder(out_dir) as folder:
        with open(folder / WEIGHTS[storage], "wb") as file:
            sha256, streams = write_zstd(file, size, pieces()) if storage == "zst" else write_plain(file, pieces())
        quantization["weights"] = {"file": WEIGHTS[storage], "size_bytes": size, "sha256": sha256}
        (folder / "config.json").write_bytes(document_bytes(config))
        (folder / "generation.json").write_bytes(document_bytes(generation))
        (folder / "quantization.json").write_bytes(document_bytes(check_quantization(quantization)))
        (folder / "architecture.json").write_bytes(document_bytes(architecture))
        (folder / "copy_policy.json").write_bytes(document_bytes({"enabled": False}))
        copy_tokenizer(tokenizer_dir, folder)
        archive = _finish(folder)
    return {**_report(archive, out_dir), "streams": streams}


def _choose_scales(
    weights, shapes, codecs, given, moments, double_quant
) -> tuple[dict[str, dict], dict[str, Tensor], dict[str, q.DoubleQuantized]]:
    """({name: entry of quantization.json}, {name: bf16 scales, as they will decode}, {name: how they are stored})."""
    entries, found, doubled = {}, {}, {}
    # a bar appears only where a step takes more than ten seconds
    for name, shape in tqdm(shapes.items(), "scales", delay=10, unit=" tensors"):
        weight, codec = weights[name], codecs.get(name, "none")
        entries[name] = {"codec": codec, "shape": list(shape)}
        if codec == "int8":
            found[name] = q.int8_scales(weight, name)
        elif codec == "nf4" and given is not None:
            q.check_scales(given[name], q.block_count(shape), name)
            found[name] = given[name]
        elif codec == "nf4":
            found[name] = q.nf4_scales(weight, moments=(moments or {}).get(name), name=name)
        else:
            q.check_finite(weight, name)
            entries[name]["dtype"] = DTYPE_NAMES[weight.dtype]
        if codec == "nf4" and double_quant:
            stored = doubled[name] = q.double_quantize(found[name], 0.0 if given is not None else q.GROUP_LOSS)
            entries[name]["plain_groups"] = stored.plain
            found[name] = q.double_dequantize(stored.codes, stored.groups, stored.plain, found[name].numel(), name)
    return entries, found, doubled


def pack_adapter(
    out_dir: str | Path,
    *,
    base_dir: str | Path,
    adapter: Adapter,
    architecture: Mapping[str, Any] | None = None,
    copy_policy: Mapping[str, Any] | None = None,
    draft_vocabulary: np.ndarray | None = None,
) -> dict[str, Any]:
    """The base's files, byte for byte, with an adapter beside them -> report.

    A and B are stored in bf16 (rounded once), xz-compressed. `architecture` replaces the base's, because the log of
    phases has grown since, and `copy_policy` its copy_policy.json. `draft_vocabulary`: rising ids, the stop ids among
    them, or None for all. ValueError when the base has an adapter already, or is not the one that the adapter was
    trained beside.
    """
    base = read_archive(base_dir)
    if base.adapter_document is not None:
        raise ContentError("adapter.json", "the base has an adapter already", fix="pack from runs/RECIPE/base")
    if adapter.base_sha256 != base.base_sha256:
        name = base.architecture["recipe_name"]
        fix = f"python -m scripts.pack_model --recipe {name} --base makes the base of the run again"
        fix += f"; when that does not help, move runs/{name} away and train anew"
        raise ContentError(
            "adapter.json", "base_sha256, the base it was trained beside", base.base_sha256, adapter.base_sha256, fix
        )
    shapes = {name: tuple(entry["shape"]) for name, entry in base.quantization["tensors"].items()}
    document = adapter.document()
    specs, metadata = adapter_specs(document, shapes), adapter_metadata(document)
    for name, tensor in adapter.state_dict().items():
        if tuple(tensor.shape) != specs[name][1]:
            raise ContentError("adapter.safetensors", f"shape of {name}", specs[name][1], tuple(tensor.shape))
    stream = safetensors_header(specs, metadata)
    stream += b"".join(tensor_bytes(adapter.tensors[name].to(dtype)) for name, (dtype, _) in specs.items())
    document |= {"size_bytes": len(stream), "sha256": sha256_bytes(stream)}
    with _new_folder(out_dir) as folder:
        for entry in base.files:
            if entry["path"] != "architecture.json" or architecture is None:
                shutil.copyfile(base.path / entry["path"], folder / entry["path"])
        if architecture is not None:
            (folder / "architecture.json").write_bytes(document_bytes(architecture))
        if copy_policy is not None:
            (folder / "copy_policy.json").write_bytes(document_bytes(check_copy_policy(copy_policy)))
        if draft_vocabulary is not None:
            chosen = draft_vocabulary_document(draft_vocabulary, base.generation["num_ids"])
            check_draft_vocabulary(chosen, base.generation)
            (folder / DRAFT_VOCABULARY).write_bytes(document_bytes(chosen))
        # A bf16 number is a byte of noise and one of sign and exponent: contexts that tell the two apart (lp, pb) take
        # 5 % off what preset 6 makes of them, more than storing all first bytes before all second ones does.
        (folder / "adapter.safetensors.xz").write_bytes(lzma.compress(stream, lzma.FORMAT_XZ, filters=XZ_FILTERS))
        (folder / "adapter.json").write_bytes(document_bytes(document))
        archive = _finish(folder)
        if archive.base_sha256 != base.base_sha256:
            raise ContentError(
                WEIGHTS["zst"], "the base changed while it was copied", base.base_sha256, archive.base_sha256
            )
    stored = (Path(out_dir) / "adapter.safetensors.xz").stat().st_size
    return {**_report(archive, out_dir), "streams": {"adapter": [len(stream), stored]}}


def _clean_config(config: Mapping[str, Any]) -> dict[str, Any]:
    # without paths of the machine it was trained on, settings of other tasks, and all that could choose other code
    return {key: value for key, value in config.items() if key in CONFIG_KEYS}


def _finish(folder: Path) -> Archive:
    """Writes self_check.json and manifest.json, loading what was packed as a reader would."""
    from drafter import self_check

    unfinished = {"format": FORMAT, "margin": NEAR_TIE_GAP, "drafts": []}
    _write_last(folder, unfinished)
    _write_last(folder, self_check.make(lambda form, dtype: load_model(folder, form, dtype)))
    return verify(folder)


def _write_last(folder: Path, self_check: Mapping[str, Any]) -> None:
    (folder / "self_check.json").write_bytes(document_bytes(self_check))
    files = [
        {"path": path.name, "size_bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.iterdir())
        if path.name != "manifest.json"
    ]
    archive_id = sha256_bytes(canonical_json(files))
    (folder / "manifest.json").write_bytes(manifest_bytes(files, archive_id))


@contextlib.contextmanager
def _new_folder(out_dir: str | Path) -> Iterator[Path]:
    """A folder beside `out_dir` that replaces it when the block ends well, and is removed when it does not.

    An existing folder is replaced only when it is an archive, or empty. Its evidence/ is kept when the new archive_id
    is the old one: then it still speaks of these very bytes.
    """
    out = Path(out_dir).absolute()
    if out.exists() and not (out.is_dir() and ((out / "manifest.json").is_file() or not any(out.iterdir()))):
        raise ValueError(f"{out_dir} exists and is not a packed archive: choose another --output, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    old = folder.with_name(folder.name + ".old")
    try:
        yield folder
        os.chmod(folder, 0o755)  # mkdtemp makes a private folder; an archive is an ordinary one
        if out.exists():
            if (out / "evidence").is_dir() and _archive_id(out) == _archive_id(folder):
                shutil.copytree(out / "evidence", folder / "evidence")
            os.rename(out, old)
        try:
            os.rename(folder, out)
        except OSError:
            if old.exists():
                os.rename(old, out)
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _archive_id(folder: Path) -> str | None:
    try:
        return json.loads((folder / "manifest.json").read_bytes()).get("archive_id")
    except (OSError, ValueError, AttributeError):
        return None


# ---------------------------------------------------------------------------- sizes


def inventory(archive: Archive) -> list[dict[str, Any]]:
    """A row a stored tensor: name, codec, shape, elements, bytes before compression, bits an element, share of all."""
    rows = []
    specs = stream_specs(archive.quantization)
    stored = {name: tensor_size(spec) for name, spec in specs.items()}
    total = sum(stored.values())
    for name, entry in archive.quantization["tensors"].items():
        parts = (name, f"{name}.codes", f"{name}.scales", f"{name}.scales2")
        size, count = sum(stored.get(part, 0) for part in parts), _count(entry["shape"])
        row = {"name": name, "codec": entry["codec"], "shape": entry["shape"], "elements": count, "size_bytes": size}
        rows.append({**row, "bits": round(8 * size / count, 3), "share": round(size / total, 5)})
    return rows


def sizes(archive: Archive) -> dict[str, Any]:
    """Bits a weight (scales counted, before compression) without and with the adapter, and the size of the folder."""
    rows = inventory(archive)
    linear = [row for row in rows if row["codec"] == "nf4"]
    adapter_bytes = archive.adapter_document["size_bytes"] if archive.adapter_document else 0

    def bits(some, extra=0):
        return round(8 * (sum(row["size_bytes"] for row in some) + extra) / sum(row["elements"] for row in some), 3)

    return {
        "weights": sum(row["elements"] for row in rows),
        "bits_per_weight_linear": bits(linear),
        "bits_per_weight_linear_with_adapter": bits(linear, adapter_bytes),
        "bits_per_weight_all": bits(rows),
        "bits_per_weight_all_with_adapter": bits(rows, adapter_bytes),
        "size_bytes": sum(entry["size_bytes"] for entry in archive.files),
    }


def _count(shape) -> int:
    return int(torch.Size(shape).numel())


def tensor_size(spec: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return _count(spec[1]) * spec[0].itemsize


def _report(archive: Archive, out_dir: str | Path) -> dict[str, Any]:
    files = {entry["path"]: entry["size_bytes"] for entry in archive.files}
    identity = {"archive_id": archive.archive_id, "base_sha256": archive.base_sha256}
    return {"path": str(out_dir), **identity, **sizes(archive), "files": files}
