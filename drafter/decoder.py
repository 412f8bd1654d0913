"""A decoder of the Qwen3 / Qwen2 / Llama family as the engines see it: matrices, norms and numbers.

    decoder = decoder_of(loaded.model, loaded.tensors, loaded.adapter)     # packed: codes and scales, adapter beside
    decoder = decoder_of(model)                                            # dense: a transformers model's own weights

The family: RMSNorm, rotary embeddings by halves, grouped-query attention with or without a norm of q and k and biases,
SwiGLU, a head that is tied to the embedding or not. Whatever a config asks for beyond that is refused by name, because
an engine that ignores a setting drafts nonsense without an error.

Legend: R rows and K columns of a matrix, r rank, D hidden, E head width, S positions.
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drafter import quantization as q
from drafter.adapter import Adapter

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # tables that do not change with the length of the text


@dataclass(frozen=True)
class Matrix:
    """One weight [R, K] as it is stored, and the adapter's side path beside it: y = W x + b + scale * B (A x)."""

    kind: str  # nf4 | int8 | dense
    shape: tuple[int, int]
    codes: Tensor  # nf4: uint8 [R * K / 2]; int8: int8 [R, K]; dense: [R, K] in its own dtype
    scales: Tensor | None = None  # bf16, [R * K / 64] or [R]
    bias: Tensor | None = None  # [R]
    lora_a: Tensor | None = None  # bf16 [r, K]
    lora_b: Tensor | None = None  # bf16 [R, r]
    lora_scale: float = 0.0

    @property
    def size_bytes(self) -> int:
        tensors = (self.codes, self.scales, self.bias, self.lora_a, self.lora_b)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def weight(self) -> Tensor:
        """fp32 [R, K], the adapter merged in fp32 where there is one."""
        if self.kind == "nf4":
            weight = q.nf4_dequantize(self.codes, self.scales, self.shape)
        elif self.kind == "int8":
            weight = q.int8_dequantize(self.codes, self.scales)
        else:
            weight = self.codes.float()
        if self.lora_a is None:
            return weight
        return weight + self.lora_scale * (self.lora_b.float() @ self.lora_a.float())


@dataclass(frozen=True)
class Layer:
    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    attention_norm: Tensor  # fp32 [D]
    mlp_norm: Tensor
    q_norm: Tensor | None  # fp32 [E]
    k_norm: Tensor | None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.q, self.k, self.v, self.o, self.gate, self.up, self.down)


@dataclass(frozen=True)
class Decoder:
    layers: tuple[Layer, ...]
    embedding: Matrix
    head: Matrix  # the embedding itself where they are tied
    final_norm: Tensor  # fp32 [D]
    cos: Tensor  # fp32 [S, E / 2], attention scaling of the rotary type included
    sin: Tensor
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    attention_scale: float
    num_ids: int  # ids that exist; rows of the table above them never take part
    rank: int  # of the adapter; 0: none

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Each once, a tied head with its embedding."""
        tables = (self.embedding,) if self.head is self.embedding else (self.embedding, self.head)
        return (*(matrix for layer in self.layers for matrix in layer.matrices), *tables)

    @property
    def positions(self) -> int:
        return self.cos.shape[0]

    @property
    def cache_bytes_per_token(self) -> int:
        return len(self.layers) * 2 * self.kv_heads * self.head_dim * 2  # keys and values in bf16


def _refuse_unknown(config: Any) -> None:
    """ValueError for a setting that this forward pass does not know."""
    faults = []
    if config.hidden_act != "silu":
        faults.append(f"hidden_act {config.hidden_act!r}, expected silu")
    if getattr(config, "mlp_bias", False):
        faults.append("mlp_bias")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        faults.append("layers with a sliding window")
    if config.rope_parameters["rope_type"] not in ROPE_TYPES:
        faults.append(f"rope_type {config.rope_parameters['rope_type']!r}, expected {', '.join(ROPE_TYPES)}")
    if faults:
        raise ValueError(f"the own engine cannot run this model: {'; '.join(faults)}. Use --engine transformers")


def decoder_of(
    model: nn.Module,
    tensors: Mapping[str, Tensor] | None = None,
    adapter: Adapter | None = None,
    *,
    num_ids: int | None = None,
    positions: int | None = None,
) -> Decoder:
    """The weights of a transformers model of the family, or of the archive `tensors` that belong to it.

    `tensors` hold NAME.codes and NAME.scales, or NAME; what is not in them is taken from the model. `positions`: length
    of the rotary tables (default: all that the config allows). ValueError for a model that is not of the family.
    """
    config, packed = model.config, tensors or {}
    _refuse_unknown(config)
    state = dict(model.state_dict()) if not packed else {}
    added = {name: tensor.detach().bfloat16() for name, tensor in adapter.tensors.items()} if adapter else {}

    def tensor(name: str) -> Tensor | None:
        return packed.get(name) if packed else state.get(name)

    def matrix(name: str) -> Matrix:
        bias = tensor(f"{name}.bias")
        codes = packed.get(f"{name}.weight.codes")
        if codes is None:
            weight = tensor(f"{name}.weight")
            found = Matrix("dense", tuple(weight.shape), weight)
        elif codes.dtype == torch.int8:
            found = Matrix("int8", tuple(codes.shape), codes, packed[f"{name}.weight.scales"])
        else:
            module = model.get_submodule(name)
            shape = (module.out_features, module.in_features)
            found = Matrix("nf4", shape, codes, packed[f"{name}.weight.scales"])
        if f"{name}.lora_A" in added:
            low = {"lora_a": added[f"{name}.lora_A"], "lora_b": added[f"{name}.lora_B"], "lora_scale": adapter.scale}
            found = replace(found, **low)
        return found if bias is None else replace(found, bias=bias.float())

    def norm(name: str) -> Tensor | None:
        weight = tensor(f"{name}.weight")
        return None if weight is None else weight.float().contiguous()

    def layer(index: int) -> Layer:
        at = f"model.layers.{index}"
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        return Layer(
            *(matrix(f"{attention}.{part}_proj") for part in "qkvo"),
            *(matrix(f"{mlp}.{part}_proj") for part in ("gate", "up", "down")),
            norm(f"{at}.input_layernorm"),
            norm(f"{at}.post_attention_layernorm"),
            norm(f"{attention}.q_norm"),
            norm(f"{attention}.k_norm"),
        )

    embedding = matrix("model.embed_tokens")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary = model.model.rotary_emb
    length = positions or config.max_position_embeddings
    angles = torch.arange(length)[:, None].float() * rotary.inv_freq.float().cpu()[None]  # [S, E / 2]
    return Decoder(
        layers=tuple(layer(index) for index in range(config.num_hidden_layers)),
        embedding=embedding,
        head=embedding if config.tie_word_embeddings else matrix("lm_head"),
        final_norm=norm("model.norm"),
        cos=(angles.cos() * rotary.attention_scaling).contiguous(),
        sin=(angles.sin() * rotary.attention_scaling).contiguous(),
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        attention_scale=head_dim**-0.5,
        num_ids=num_ids or embedding.shape[0],
        rank=adapter.rank if adapter else 0,
    )


# ---------------------------------------------------------------------------- what a pass reads and gives


@dataclass
class KeyValueCache:
    """Keys and values of each slot from position 0: bf16 [layers, slots, G, S, E], written in place."""

    keys: Tensor
    values: Tensor

    @classmethod
    def new(cls, decoder: Decoder, slots: int, length: int, dtype=torch.bfloat16, device="cpu") -> "KeyValueCache":
        """Zeros. On the CPU pages are taken only as positions are written: 16 slots of 4,096 positions at the shape of
        Qwen3-1.7B are 7.5 GB, which torch.zeros would write at once, and numpy.zeros takes in pages of 2 MB, more than
        a head's 4,096 positions (1 MB)."""
        shape = (len(decoder.layers), slots, decoder.kv_heads, length, decoder.head_dim)

        def zeros() -> Tensor:
            if device != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)

        return cls(zeros(), zeros())

    @property
    def slots(self) -> int:
        return self.keys.shape[1]

    @property
    def length(self) -> int:
        return self.keys.shape[3]


@dataclass
class Choice:
    """What a pass says about its wanted tokens."""

    ids: list[int]  # [W], the best of the ids that competed
    gaps: list[float]  # [W], its logit less the second best's
    hidden: Tensor | None = None  # fp32 [W, D] behind the final norm, where it was asked for
    # Where top-K lists were asked for: int32 [W, K] with the chosen id first, float16 [W, K] log-probabilities sorted
    # down, float32 [W] log of the remaining mass.
    top_k: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
