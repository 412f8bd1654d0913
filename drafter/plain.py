"""The plain forward pass: the same calls as drafter/native.py in PyTorch, on any device and in any dtype.

It is the oracle of the native kernels, what runs where there is no compiler or no fitting machine, and the pass for a
GPU. Weights are merged (decoded, adapter added in fp32, cast once); q, k, v and gate, up are one product each. Few
tokens on the CPU go through the 4-bit product of bitsandbytes where there is one. The residual stream and the norms are
fp32. On a GPU a step of one token a slot runs over fixed buffers (drafter/graphs.py).

Legend: N tokens, W wanted, B slots of a decode step, D hidden, H query heads, G key/value heads, E head width, V ids.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.decoder import Choice, Decoder, KeyValueCache, Layer, Matrix
from drafter.decoding import top_k_logprobs, top_logits
from drafter.graphs import StaticStep, span_of
from drafter.library_kernels import FEW, nf4_product


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


class _Product:
    """x [N, K] -> [N, R] for some matrices that share their input, one behind the other."""

    def __init__(self, matrices: Sequence[Matrix], dtype: torch.dtype, device: str):
        self.weight = torch.cat([matrix.weight().to(dtype) for matrix in matrices]).to(device)
        biases = [torch.zeros(one.shape[0]) if one.bias is None else one.bias for one in matrices]
        self.bias = None
        if any(matrix.bias is not None for matrix in matrices):
            self.bias = torch.cat(biases).to(device, dtype)
        fast = dtype == torch.bfloat16 and device == "cpu"
        few = [nf4_product(matrix) for matrix in matrices] if fast else [None]
        self.few = None if None in few else few

    def __call__(self, x: Tensor) -> Tensor:
        if self.few is not None and x.shape[0] <= FEW:
            return torch.cat([product(x) for product in self.few], -1)
        return F.linear(x, self.weight, self.bias)


class _Layer:
    """One block's weights as the pass reads them."""

    def __init__(self, layer: Layer, dtype: torch.dtype, device: str):
        self.qkv = _Product((layer.q, layer.k, layer.v), dtype, device)
        self.o = _Product((layer.o,), dtype, device)
        self.gate_up = _Product((layer.gate, layer.up), dtype, device)
        self.down = _Product((layer.down,), dtype, device)
        norms = (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
        self.attention_norm, self.mlp_norm, self.q_norm, self.k_norm = (
            None if norm is None else norm.to(device) for norm in norms
        )


class PlainForward:
    """The pass over one decoder in `dtype` on `device`."""

    name = "plain"

    def __init__(
        self, decoder: Decoder, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", max_tokens: int = 512
    ):
        self.decoder, self.dtype, self.device = decoder, dtype, device
        self.max_tokens = max_tokens
        self.static_steps = device.startswith("cuda")  # a test sets it on the CPU
        self._steps: dict[tuple[int, int, int], StaticStep] = {}  # by rows, span and restricted head
        self._steps_cache: KeyValueCache | None = None
        self.layers = [_Layer(layer, dtype, device) for layer in decoder.layers]
        self.table = decoder.embedding.weight().to(dtype).to(device)
        tied = decoder.head is decoder.embedding
        head = self.table if tied else decoder.head.weight().to(dtype).to(device)
        self.head = head[: decoder.num_ids]  # [V, D]
        self.final_norm, self.cos, self.sin = (one.to(device) for one in (decoder.final_norm, decoder.cos, decoder.sin))
        self._rows: tuple[np.ndarray, Tensor] | None = None  # the last restricted head

    def new_cache(self, slots: int, length: int) -> KeyValueCache:
        return KeyValueCache.new(self.decoder, slots, length, self.dtype, self.device)

    @torch.inference_mode()
    def __call__(
        self,
        cache: KeyValueCache,
        tokens: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        *,
        rows: np.ndarray | None = None,
        own: Sequence[np.ndarray] | None = None,
        hidden: bool = False,
        top_k: int = 0,
    ) -> Choice:
        """See NativeForward."""
        one_each = len(set(slots)) == len(slots)
        if self.static_steps and one_each and len(wanted) == len(tokens):
            states, ids, gaps = self._static_step(cache, tokens, slots, positions, rows)
        else:
            groups = self._groups(slots, positions)
            at = [torch.tensor(list(values), device=self.device) for values in (tokens, slots, positions)]
            states = self._forward(cache, *at, groups)[list(wanted)]  # fp32 [W, D]
            if not len(wanted):
                return Choice([], [])
            ids, gaps = self._choose(states, rows)
        if own:
            ids, gaps = self._choose_among_own(states, ids, gaps, own)
        top = top_k_logprobs(states.to(self.dtype), self.head, top_k) if top_k else None
        return Choice(
            ids.tolist() if top is None else top[0][:, 0].tolist(), gaps.tolist(), states if hidden else None, top
        )

    def _static_step(self, cache, tokens, slots, positions, rows) -> tuple[Tensor, Tensor, Tensor]:
        """States, ids and gaps of a token a slot, in the order of `tokens`, as they are always wanted."""
        if self._steps_cache is not cache:  # its addresses are in the graphs
            self._steps.clear()
            self._steps_cache = cache
        span = span_of(positions, cache.length)
        key = (len(tokens), span, id(rows))

        def run(tokens: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            states = self._forward(cache, tokens, slots, positions, [self._one_each(slots, positions, span)])
            return states, *self._choose(states, rows)

        if key not in self._steps:
            self._steps[key] = StaticStep(run, len(tokens), self.device)
        return self._steps[key](tokens, slots, positions)

    def _choose(self, states: Tensor, rows: np.ndarray | None) -> tuple[Tensor, Tensor]:
        head = self.head
        if rows is not None:
            if self._rows is None or self._rows[0] is not rows:
                self._rows = (rows, head[torch.from_numpy(rows).long().to(self.device)])
            head = self._rows[1]
        best, at = top_logits(states.to(self.dtype), head, 2)
        first = at[:, 0]
        if rows is not None:
            first = torch.from_numpy(rows).to(self.device)[first]
        gap = best[:, 0] - best[:, 1] if best.shape[1] > 1 else torch.full_like(best[:, 0], torch.inf)
        return first, gap

    def _choose_among_own(self, states: Tensor, ids: Tensor, gaps: Tensor, own: Sequence[np.ndarray]):
        """The winners of the common rows against each token's own ids; of equal logits the lower id wins."""
        states, ids, gaps = states.to(self.dtype).float(), ids.clone(), gaps.clone()
        for at, more in enumerate(own):
            if not len(more):
                continue
            rivals = torch.from_numpy(np.sort(more)).long().to(self.device)
            logits = self.head[rivals].float() @ states[at]  # [ids]
            best = self.head[ids[at]].float() @ states[at]
            both = torch.cat((torch.stack((best, best - gaps[at])), logits)).sort(descending=True).values
            first = int(logits.argmax())
            if logits[first] > best or (logits[first] == best and rivals[first] < ids[at]):
                ids[at] = rivals[first]
            gaps[at] = both[0] - both[1]
        return ids, gaps

    # ------------------------------------------------------------------------ the pass

    def _forward(
        self, cache: KeyValueCache, tokens: Tensor, slots: Tensor, positions: Tensor, groups: list[tuple]
    ) -> Tensor:
        """States behind the final norm, fp32 [N, D]; no value of a tensor decides what runs."""
        decoder = self.decoder
        H, G, E = decoder.heads, decoder.kv_heads, decoder.head_dim
        x = self.table[tokens].float()  # [N, D]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]  # [N, 1, E / 2]
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(_rms_norm(x, layer.attention_norm, decoder.eps).to(self.dtype)).float()
            q, k, v = qkv.view(len(tokens), -1, E).split((H, G, G), 1)  # [N, heads, E]
            q, k = _rotated(q, layer.q_norm, decoder.eps, cos, sin), _rotated(k, layer.k_norm, decoder.eps, cos, sin)
            keys, values = cache.keys[index], cache.values[index]  # [slots, G, S, E]
            keys[slots, :, positions], values[slots, :, positions] = k.to(self.dtype), v.to(self.dtype)
            attended = self._attend(q.to(self.dtype), keys, values, groups)  # [N, H * E]
            x = x + layer.o(attended).float()
            gate, up = layer.gate_up(_rms_norm(x, layer.mlp_norm, decoder.eps).to(self.dtype)).chunk(2, -1)
            x = x + layer.down((F.silu(gate.float()) * up.float()).to(self.dtype)).float()
        return _rms_norm(x, self.final_norm, decoder.eps)

    def _one_each(self, slots: Tensor, positions: Tensor, span: int) -> tuple:
        mask = torch.arange(span, device=self.device)[None] <= positions[:, None]
        return slice(None), slots, span, mask[:, None, None]  # [N, 1, 1, span]

    def _groups(self, slots: Sequence[int], positions: Sequence[int]) -> list[tuple]:
        """How the tokens attend: one batch of a token a slot, or a causal run of tokens slot by slot.

        [(tokens, slots, span, mask)]: `tokens` an index or slice of [N], `mask` [.., 1, T, span] of visible keys.
        """
        at = torch.tensor(list(positions), device=self.device)
        if len(set(slots)) == len(slots):
            return [self._one_each(torch.tensor(list(slots), device=self.device), at, max(positions) + 1)]
        groups = []
        for slot in dict.fromkeys(slots):
            tokens = torch.tensor([index for index, one in enumerate(slots) if one == slot], device=self.device)
            own = at[tokens]
            span = positions[int(tokens[-1])] + 1
            mask = (torch.arange(span, device=self.device)[None] <= own[:, None])[None, None]  # [1, 1, T, span]
            groups.append((tokens, slot, span, mask))
        return groups

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, groups: list[tuple]) -> Tensor:
        out = torch.empty_like(q)  # [N, H, E]
        options = {"scale": self.decoder.attention_scale, "enable_gqa": True}
        for tokens, slots, span, mask in groups:
            if isinstance(slots, Tensor):  # one token each: the batch is the slots
                attended = F.scaled_dot_product_attention(
                    q[:, :, None], keys[slots, :, :span], values[slots, :, :span], mask, **options
                )
                out[tokens] = attended[:, :, 0]
            else:
                query = q[tokens].transpose(0, 1)[None]  # [1, H, T, E]
                attended = F.scaled_dot_product_attention(
                    query, keys[slots : slots + 1, :, :span], values[slots : slots + 1, :, :span], mask, **options
                )
                out[tokens] = attended[0].transpose(0, 1)
        return out.flatten(1)


def _rotated(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm of each head (Qwen3), then rotation by halves: x [N, heads, E], cos and sin [N, 1, E / 2]."""
    if weight is not None:
        x = _rms_norm(x, weight, eps)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
