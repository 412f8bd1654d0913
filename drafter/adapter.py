"""The rank-r adapter (LoRA): a trainable side path beside a frozen base, y = base(x) + scale * B (A x).

Its targets are all linear layers of the decoder blocks. A [r, D_in] starts random, B [D_out, r] at zero: training
begins exactly at the base, which quantization-aware training left at its minimum. `scale` = alpha / rank is stored as
a value and checked when it is read, because recomputing it by another rule changes the strength without an error.

    adapter = Adapter.create(model, rank=32, alpha=32.0, seed=0)
    adapter.attach(model)                     # freezes the base; adapter.parameters() is what trains
    adapter.save(folder, base_sha256=...)     # adapter.safetensors (fp32) + adapter.json, which names the base
    Adapter.load(folder).merged(name, weight) # fp32 weight + scale * B A; cast once, afterwards

Legend: B batch, T tokens, r rank, D_in and D_out widths of a linear layer.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from drafter.provenance import atomic_write, read_json, write_json

FORMAT = 1
FIELDS = {"format", "rank", "alpha", "scale", "targets", "base_sha256"}


class AdapterError(ValueError):
    """An adapter that cannot be used as it is: says which field or tensor, what was expected and what was found."""


def linear_names(model: nn.Module) -> list[str]:
    """Names of the linear layers of the decoder blocks, in the model's order: what NF4 packs and the adapter adapts."""
    return [name for name, module in model.named_modules() if ".layers." in name and isinstance(module, nn.Linear)]


def check_document(document: Any) -> dict[str, Any]:
    """The fields of adapter.json, checked; AdapterError names the field."""
    if not isinstance(document, Mapping) or set(document) != FIELDS:
        keys = set(document) if isinstance(document, Mapping) else set()
        raise AdapterError(f"adapter.json: missing {sorted(FIELDS - keys)}, unknown {sorted(keys - FIELDS)}")
    rank, alpha, scale, targets = (document[key] for key in ("rank", "alpha", "scale", "targets"))
    if document["format"] != FORMAT:
        raise AdapterError(f"adapter.json: format is {document['format']!r}, this version reads {FORMAT}")
    if type(rank) is not int or rank < 1:
        raise AdapterError(f"adapter.json: rank is {rank!r}, expected a whole number >= 1")
    for key, value in (("alpha", alpha), ("scale", scale)):
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise AdapterError(f"adapter.json: {key} is {value!r}, expected a number > 0")
    if not math.isclose(scale, alpha / rank, rel_tol=1e-9):
        raise AdapterError(f"adapter.json: scale is {scale}, but alpha / rank = {alpha} / {rank} = {alpha / rank}")
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise AdapterError("adapter.json: targets must be a list of layer names")
    if len(set(targets)) != len(targets):
        raise AdapterError("adapter.json: a target is named twice")
    base = document["base_sha256"]
    if base is not None and not (isinstance(base, str) and re.fullmatch(r"[0-9a-f]{64}", base)):
        raise AdapterError(f"adapter.json: base_sha256 is {base!r:.80}, expected 64 hex digits, or null without a base")
    return dict(document)


class Adapter:
    """A and B of every target by name, with rank, alpha and scale. Plain tensors until `attach`.

    `base_sha256` names the packed base that it was trained beside (`load_base(...).base_sha256`); None: none yet.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        rank: int,
        alpha: float,
        scale: float,
        targets: Iterable[str],
        base_sha256: str | None = None,
    ):
        self.targets = tuple(targets)
        self.rank, self.alpha, self.scale = rank, float(alpha), float(scale)
        self.base_sha256 = base_sha256
        check_document(self.document())
        expected = {f"{name}.{part}" for name in self.targets for part in ("lora_A", "lora_B")}
        if expected != set(tensors):
            missing, extra = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
            raise AdapterError(f"adapter tensors: missing {missing[:3]}, unknown {extra[:3]}")
        for name in self.targets:
            a, b = tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]
            # every layer is checked, not the first alone: one layer of another rank would be scaled wrongly in silence
            if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
                raise AdapterError(
                    f"{name}: lora_A is {list(a.shape)}, lora_B {list(b.shape)}; expected [{rank}, in], [out, {rank}]"
                )
            for part, tensor in (("lora_A", a), ("lora_B", b)):
                if not bool(torch.isfinite(tensor).all()):
                    raise AdapterError(f"{name}.{part} holds a value that is not finite")
        self.tensors = {
            f"{name}.{part}": nn.Parameter(tensors[f"{name}.{part}"].detach().clone())
            for name in self.targets
            for part in ("lora_A", "lora_B")
        }

    # ------------------------------------------------------------------------ make, save, load

    @classmethod
    def create(cls, model: nn.Module, rank: int, alpha: float, seed: int = 0) -> "Adapter":
        """A ~ U(-1/sqrt(D_in), 1/sqrt(D_in)), B = 0, both fp32: A x then has about the size of x / sqrt(3).

        Drawn on the CPU in the order of the targets, so that a seed means the same adapter on every device.
        """
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name in (targets := linear_names(model)):
            layer = model.get_submodule(name)
            bound = layer.in_features**-0.5
            tensors[f"{name}.lora_A"] = (torch.rand(rank, layer.in_features, generator=generator) * 2 - 1) * bound
            tensors[f"{name}.lora_B"] = torch.zeros(layer.out_features, rank)
        return cls(tensors, rank, alpha, alpha / rank, targets)

    def document(self) -> dict[str, Any]:
        """The content of adapter.json."""
        fields = {"rank": self.rank, "alpha": self.alpha, "scale": self.scale, "targets": list(self.targets)}
        return {"format": FORMAT, **fields, "base_sha256": self.base_sha256}

    def parameters(self) -> list[nn.Parameter]:
        return list(self.tensors.values())

    def state_dict(self) -> dict[str, Tensor]:
        """NAME.lora_A [r, D_in] and NAME.lora_B [D_out, r], detached (not copied)."""
        return {name: tensor.detach() for name, tensor in self.tensors.items()}

    def save(self, folder: str | Path, base_sha256: str | None = None) -> None:
        """adapter.safetensors, in the dtype trained in (fp32), then adapter.json; each written whole or not at all.

        `base_sha256` of the base that it was trained beside; without it the adapter keeps the one that it has.
        """
        if base_sha256 is not None:
            self.base_sha256 = base_sha256
        document = check_document(self.document())
        tensors = {name: tensor.contiguous().cpu() for name, tensor in self.state_dict().items()}
        with atomic_write(Path(folder) / "adapter.safetensors") as file:
            file.write(save(tensors, {"adapter": json.dumps(document, sort_keys=True)}))
        write_json(Path(folder) / "adapter.json", document)

    @classmethod
    def load(cls, folder: str | Path) -> "Adapter":
        """AdapterError when alpha or scale is missing or disagrees, or one layer has another rank.

        The document is stored in adapter.safetensors too, whose hash phase_log keeps: an adapter.json that was edited
        afterwards is refused.
        """
        document = check_document(read_json(Path(folder) / "adapter.json"))
        with safe_open(Path(folder) / "adapter.safetensors", "pt") as file:
            if json.loads((file.metadata() or {}).get("adapter", "null")) != document:
                raise AdapterError(f"{folder}: adapter.json is not the one that adapter.safetensors was written with")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        del document["format"]
        return cls(tensors, **document)

    # ------------------------------------------------------------------------ use: beside the base, or merged into it

    def attach(self, model: nn.Module) -> None:
        """Freezes every weight of `model`, then adds the side path to each target.

        A and B become parameters of the target modules (`NAME.lora_A`), so that `.to(device)`, the gradient hooks of
        a distributed run and `model.parameters()` see them; `self.parameters()` are the same objects.
        AdapterError on a shape that differs, or when a target has an adapter already.
        """
        model.requires_grad_(False)
        for name in self.targets:
            layer = model.get_submodule(name)
            a, b = self.tensors[f"{name}.lora_A"], self.tensors[f"{name}.lora_B"]
            if (b.shape[0], a.shape[1]) != (layer.out_features, layer.in_features):
                raise AdapterError(
                    f"{name}: the adapter is for [{b.shape[0]}, {a.shape[1]}], "
                    f"the layer is [{layer.out_features}, {layer.in_features}]"
                )
            if hasattr(layer, "lora_A"):
                raise AdapterError(f"{name} already has an adapter")
            a.data, b.data = (tensor.data.to(next(_tensors(layer)).device) for tensor in (a, b))
            a.requires_grad_(True)
            b.requires_grad_(True)
            layer.register_parameter("lora_A", a)
            layer.register_parameter("lora_B", b)
            layer.register_forward_hook(self._side_path)

    def _side_path(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # fp32 A and B, computed in the activations' dtype: x [B, T, D_in] -> [B, T, r] -> [B, T, D_out]
        x = inputs[0]
        return output + self.scale * F.linear(F.linear(x, layer.lora_A.to(x.dtype)), layer.lora_B.to(x.dtype))

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """fp32 weight [D_out, D_in] of the target `name` -> weight + scale * B A, in fp32. The caller casts, once."""
        if weight.dtype != torch.float32:
            # An update of 1e-3 beside weights of about 1 is below half a bf16 step (2^-9): most of it would be lost.
            raise AdapterError(f"{name}: merging is done in float32, the weight is {weight.dtype}")
        a, b = (self.tensors[f"{name}.{part}"].detach().float().to(weight.device) for part in ("lora_A", "lora_B"))
        if weight.shape != (b.shape[0], a.shape[1]):
            raise AdapterError(f"{name}: weight is {list(weight.shape)}, the adapter {[b.shape[0], a.shape[1]]}")
        return torch.addmm(weight, b, a, alpha=self.scale)


def mark_merged(config: Any) -> None:
    """Leaves the mark in a transformers config object; saving the model saves it, packing refuses it."""
    config.adapter_merged = True


def check_unmerged(config: Mapping[str, Any]) -> None:
    """AdapterError when the weights of this config.json already hold an adapter."""
    if config.get("adapter_merged"):
        raise AdapterError(
            "an adapter has been merged into these weights already; packing one again would apply it twice. "
            "Start from the base (runs/RECIPE/base) and the adapter."
        )


def _tensors(module: nn.Module):
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
