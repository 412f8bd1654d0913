"""A plain checkpoint beside the model that its config describes: names, shapes, and which codec each tensor gets.

Both directions of the archive ask here: the packer whether a checkpoint is whole and a student's own, the loader
whether an archive holds exactly the tensors of its model.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from drafter.adapter import linear_names
from drafter.provenance import sha256_file
from drafter.streams import ContentError, tensor_bytes

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


# ---------------------------------------------------------------------------- model and files


def meta_model(config: Mapping[str, Any]) -> nn.Module:
    """The transformers model of a config, weights on the meta device: names and shapes, no memory."""
    # Three families, by name: an Auto class would also build models that run code of the folder's or reach a hub.
    import transformers as hf

    families = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
    }
    if config.get("model_type") not in families:
        raise ContentError("config.json", "model_type", ", ".join(families), repr(config.get("model_type"))[:80])
    config_class, model_class = families[config["model_type"]]
    try:
        with torch.device("meta"):
            model = model_class(config_class(**{key: value for key, value in config.items() if key != "model_type"}))
        # rotary tables are buffers that no checkpoint holds: computed anew, off the meta device
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    except Exception as error:  # whatever transformers makes of a wrong value
        raise ContentError("config.json", f"no model can be built ({type(error).__name__}: {error})"[:300]) from None
    return model.eval()


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a plain checkpoint folder (one safetensors file or several), each read when it is asked for."""

    def __init__(self, folder: str | Path):
        paths = sorted(Path(folder).glob("model*.safetensors"))
        if not paths:
            raise ValueError(f"{folder} holds no model*.safetensors: is the phase that makes it finished?")
        self._where = {name: file for file in (safe_open(path, "pt") for path in paths) for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        return self._where[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor."""
        return tuple(self._where[name].get_slice(name).get_shape())


def checked_weights(run_dir: Path, phase_log: Sequence[Mapping[str, Any]], phase: str) -> str:
    """sha256 of the weights that a finished phase left in its folder ("student" is one: the pruned base).

    ValueError when phase_log does not hold the phase, or the bytes are not those that it names: whatever is made
    from them would carry a log of another training.
    """
    path = run_dir / phase / ("adapter.safetensors" if phase == "adapter" else "model.safetensors")
    logged = next((entry["checkpoint_sha256"] for entry in phase_log if entry["phase"] == phase), None)
    if logged is None:
        step = "-m scripts.prune_layers" if phase == "student" else f"train.py --phase {phase}"
        raise ValueError(f"phase {phase} is not in phase_log of {run_dir}. Next: python {step} --recipe {run_dir.name}")
    _refuse_other(path, logged, run_dir)
    return logged


def checked_scales(run_dir: Path, phase_log: Sequence[Mapping[str, Any]]) -> Path:
    """The block scales that qat trained with; ValueError when they are not those that phase_log names."""
    path = run_dir / "qat" / "nf4_scales.safetensors"
    _refuse_other(path, next(entry["scales_sha256"] for entry in phase_log if entry["phase"] == "qat"), run_dir)
    return path


def _refuse_other(path: Path, logged: str, run_dir: Path) -> None:
    found = sha256_file(path) if path.exists() else "none, for the file is missing"
    if found != logged:
        raise ValueError(
            f"{path}: phase_log says sha256 {logged}, found {found}: the lineage is broken. "
            f"Move runs/{run_dir.name} away to start anew, or put the file back"
        )


# ---------------------------------------------------------------------------- what fits what


def ties_of(model: nn.Module) -> dict[str, str]:
    return {HEAD: EMBEDDING} if model.config.tie_word_embeddings else {}


def check_names(model: nn.Module, quantization: Mapping[str, Any]) -> None:
    """The stored tensors are those of the model, each with its shape and the codec of its place."""
    ties, expected = ties_of(model), {}
    codecs = codecs_of(model)
    for name, tensor in model.state_dict().items():
        if name not in ties:
            expected[name] = (codecs.get(name, "none"), list(tensor.shape))
    found = {name: (entry["codec"], entry["shape"]) for name, entry in quantization["tensors"].items()}
    if quantization["ties"] != ties:
        raise ContentError("quantization.json", "ties", ties, repr(quantization["ties"])[:80])
    for name in expected.keys() | found.keys():
        if expected.get(name) != found.get(name):
            raise ContentError("quantization.json", f"tensor {name}", expected.get(name), found.get(name))


def codecs_of(model: nn.Module) -> dict[str, str]:
    """{tensor name: "nf4" | "int8"}: linear layers of the blocks, embedding and head; all else stays as it is."""
    tables = {EMBEDDING: "int8"} if HEAD in ties_of(model) else {EMBEDDING: "int8", HEAD: "int8"}
    return {**tables, **{f"{name}.weight": "nf4" for name in linear_names(model)}}


def check_weights(weights: Mapping[str, Tensor], shapes: Mapping[str, tuple], ties: Mapping[str, str]) -> None:
    """Exactly the tensors of the model; a tied one may be there twice when both are equal, or once."""
    missing = sorted(set(shapes) - set(ties) - set(weights))
    if missing or (extra := sorted(set(weights) - set(shapes))):
        raise ContentError(
            "model.safetensors", "tensors", "those of config.json", f"without {missing[:3]}" if missing else extra[:3]
        )
    for name, source in ties.items():
        if name in weights and not torch.equal(weights[name], weights[source]):
            raise ContentError(
                "model.safetensors", f"{name} is tied to {source} by config.json, but their values differ"
            )
    for name, shape in shapes.items():
        if name in weights:
            weight = weights[name]
            if tuple(weight.shape) != shape or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ContentError(
                    "model.safetensors", name, f"floats {shape}", f"{weight.dtype} {tuple(weight.shape)}"
                )


def refuse_teacher(weights: Mapping[str, Tensor], linear: list[str], teacher_dir: str | Path) -> None:
    """ValueError when every linear layer is one of the teacher's, wherever it stood there: nothing was trained.

    A pruned student starts as a copy of some layers, so names say nothing; the hashes of the matrices do.
    """

    def digest(tensor: Tensor) -> str:
        return hashlib.sha256(tensor_bytes(tensor.to(torch.bfloat16))).hexdigest()

    teacher = Checkpoint(teacher_dir)
    shapes = {tuple(weights[name].shape) for name in linear}
    known = {digest(teacher[name]) for name in teacher if teacher.shape(name) in shapes}
    if all(digest(weights[name]) in known for name in linear):
        raise ValueError(
            f"all {len(linear)} linear layers are the teacher's own tensors: a drafter must not be the teacher. "
            "Train it first: python train.py --recipe RECIPE --phase all"
        )
