"""fp32 master weights beside a model that computes in its own dtype: one scheme for bf16 training and for QAT.

The model holds what a forward pass computes with; the optimizer steps the fp32 masters. `publish` writes the
masters into the model: cast, or fake-quantized and cast, by the packer's own definitions. `collect` adds the
model's gradients to the masters'. With fake-quantization that is the straight-through estimator (Bengio,
Leonard and Courville, 2013): the gradient at the quantized weight is taken for the gradient at the master.

A tied table is one parameter, so both of its uses see the same quantized rows.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from drafter.adapter import linear_names
from drafter.provenance import machine
from drafter.quantization import double_quantized, fake_quant_int8, fake_quant_nf4, nf4_scales

BF16_PRODUCTS = {"avx512_bf16", "amx_bf16", "bf16"}  # of provenance.machine()["isa"]


def compute_dtype(dtype: torch.dtype, device: str = "cpu") -> torch.dtype:
    """What training and scoring compute in: `dtype`, or float32 for bf16 on a CPU that has no products of bf16.

    PyTorch widens operands one by one there: 18 GFLOP/s where float32 has 72 (AVX2, 1,024 x 576 x 1,536, 2 cores).
    """
    if dtype == torch.bfloat16 and device == "cpu" and not BF16_PRODUCTS.intersection(machine()["isa"]):
        return torch.float32
    return dtype


class MasterWeights:
    """Masters of every parameter of `model`; with `quantize`, linear layers publish as NF4 and tables as INT8.

    The block scales of the NF4 layers are state: searched by `search_scales`, used as they are until the next
    search, and handed to the packer unchanged. With `double_quant` they are what an archive's bytes decode to.
    INT8 row scales follow from the rows themselves.
    """

    def __init__(self, model: nn.Module, quantize: bool = False, double_quant: bool = False):
        self.model, self.quantize, self.double_quant = model, quantize, double_quant
        self.parameters = dict(model.named_parameters())  # a tied table once
        self.masters = {
            name: nn.Parameter(parameter.detach().float().clone()) for name, parameter in self.parameters.items()
        }
        self.linear = {f"{name}.weight" for name in linear_names(model)}
        tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        self.tables = {name for name, parameter in self.parameters.items() if id(parameter) in tables}
        self.scales: dict[str, Tensor] = {}

    def trainable(self) -> list[nn.Parameter]:
        return list(self.masters.values())

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy fp32 values in (a checkpoint of higher precision than the model, or a resumed run)."""
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[name])

    @torch.no_grad()
    def search_scales(self) -> None:
        for name in self.linear:
            scales = nf4_scales(self.masters[name], name=name)
            self.scales[name] = double_quantized(scales) if self.double_quant else scales

    @torch.no_grad()
    def publish(self) -> None:
        """Masters -> model."""
        for name, parameter in self.parameters.items():
            value: Tensor = self.masters[name]
            if self.quantize and name in self.linear:
                value = fake_quant_nf4(value, self.scales[name], name)
            elif self.quantize and name in self.tables:
                value = fake_quant_int8(value, name=name)
            parameter.copy_(value)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the model's gradients to the masters' and clear them, so that micro-batches add up in fp32."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            master = self.masters[name]
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None


class AdapterWeights:
    """The same face for the adapter phase: fp32 A and B train beside a frozen base, nothing to publish."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.list = list(parameters)
        self.scales: dict[str, Tensor] = {}

    def trainable(self) -> list[nn.Parameter]:
        return self.list

    def search_scales(self) -> None:
        """Scales of a frozen base do not move."""

    def publish(self) -> None:
        """A and B are used where they are."""

    def collect(self) -> None:
        """Their gradients are fp32 already."""
