"""Keys and values of earlier requests, reused for the longest common prefix of a new one's own tokens.

A tree of blocks of 16 tokens: a block is found by its parent and its very tokens (a dict hashes them, then compares),
so a hit is exact, never a matter of hashes alone. Inside the first block that is not whole, the longest common
beginning is taken too. A rejected draft costs nothing: the next request's tokens differ there, and the walk ends.

The least recently used leaf makes room when the byte limit is reached. A walk touches parents after their children, so
that the oldest block of all is a leaf.

Legend: L layers, G key/value heads, E head width; a block holds [L, 2, G, 16, E] bf16.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK = 16


@dataclass(eq=False)
class _Node:
    parent: "_Node | None"
    tokens: tuple[int, ...]
    row: int  # of the pool
    children: dict[tuple[int, ...], "_Node"] = field(default_factory=dict)


class PrefixCache:
    """At most `limit_bytes` of keys and values, for caches [L, slots, G, S, E] of one model."""

    def __init__(self, limit_bytes: int, layers: int, kv_heads: int, head_dim: int, dtype=torch.bfloat16, device="cpu"):
        shape = (layers, 2, kv_heads, BLOCK, head_dim)
        self.block_bytes = torch.Size(shape).numel() * dtype.itemsize
        self.capacity = limit_bytes // self.block_bytes
        # pages are taken only as blocks are filled
        self.pool = torch.empty(self.capacity, *shape, dtype=dtype, device=device)
        self.free = list(range(self.capacity - 1, -1, -1))
        self.root = _Node(None, (), -1)
        self.used: OrderedDict[_Node, None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self.used)

    @property
    def size_bytes(self) -> int:
        return len(self) * self.block_bytes

    def restore(self, tokens: Sequence[int], keys: Tensor, values: Tensor) -> int:
        """Fill keys and values [L, G, S, E] of a slot with what is known of `tokens` -> how many positions were filled.

        At most all but the last token: that one must be computed, for its logits are what a draft starts with.
        """
        node, rows, most = self.root, [], len(tokens) - 1
        while len(rows) * BLOCK + BLOCK <= most:
            at = len(rows) * BLOCK
            found = node.children.get(tuple(tokens[at : at + BLOCK]))
            if found is None:
                break
            node = found
            rows.append(node.row)
        filled, rest = len(rows) * BLOCK, tuple(tokens[len(rows) * BLOCK : most][:BLOCK])
        best, common = None, 0
        for block, child in node.children.items():
            same = next((i for i, (a, b) in enumerate(zip(rest, block, strict=False)) if a != b), min(len(rest), BLOCK))
            if same > common:
                best, common = child, same
        if rows:
            blocks = self.pool[torch.tensor(rows)]  # [n, L, 2, G, 16, E]
            flat = blocks.permute(2, 1, 3, 0, 4, 5).flatten(3, 4)  # [2, L, G, n * 16, E]
            keys[:, :, :filled], values[:, :, :filled] = flat[0], flat[1]
        if best is not None:
            part = self.pool[best.row]  # [L, 2, G, 16, E]
            keys[:, :, filled : filled + common] = part[:, 0, :, :common]
            values[:, :, filled : filled + common] = part[:, 1, :, :common]
        self._touch(best or node)
        return filled + common

    def store(self, tokens: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Keep the whole blocks of a slot whose keys and values of `tokens` are all filled in."""
        node = self.root
        for at in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
            block = tuple(tokens[at : at + BLOCK])
            child = node.children.get(block)
            if child is None:
                self._touch(node)  # the walk so far is now newest, so that making room takes none of it
                row = self._make_room(node)
                if row is None:
                    return
                child = node.children[block] = _Node(node, block, row)
                self.used[child] = None
                self.pool[row, :, 0] = keys[:, :, at : at + BLOCK]
                self.pool[row, :, 1] = values[:, :, at : at + BLOCK]
            node = child
        self._touch(node)

    def _touch(self, node: _Node) -> None:
        while node.parent is not None:
            self.used.move_to_end(node)
            node = node.parent

    def _make_room(self, keep: _Node) -> int | None:
        """A free row of the pool; None when everything that is left belongs to the walk that ends in `keep`."""
        if self.free:
            return self.free.pop()
        if not self.used:
            return None
        oldest = next(iter(self.used))
        if oldest is keep:
            return None
        assert not oldest.children, "a parent is never older than its children"
        del self.used[oldest], oldest.parent.children[oldest.tokens]
        return oldest.row
