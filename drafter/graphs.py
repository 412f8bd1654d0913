"""A decode step over fixed buffers: on a GPU captured once as a CUDA graph and replayed, elsewhere run as it is.

A step of a small model is some hundred kernels of a few microseconds each, and launching one from Python takes longer
than that. A graph launches them all at once, but knows only the addresses that it was captured with: so inputs are
copied into buffers of their own, and there is one graph for each number of rows and each span of visible positions.

Not run on a GPU yet. Buffers, spans and arithmetic run on the CPU in the tests.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SPAN = 256  # positions that a step sees are rounded up to multiples of this: a graph for each would be too many


def span_of(positions: Sequence[int], longest: int) -> int:
    """How many positions a step looks at whose tokens stand at `positions`, in a cache of `longest`."""
    return min(longest, -(-(max(positions) + 1) // SPAN) * SPAN)


class StaticStep:
    """`run(tokens, slots, positions)`, int64 [B] each at the same addresses each time, to tensors of fixed shapes."""

    def __init__(self, run: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]], rows: int, device: str):
        self.run = run
        self.inputs = torch.zeros(3, rows, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def __call__(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, ...]:
        """The outputs are overwritten by the next call."""
        self.inputs.copy_(torch.tensor([list(tokens), list(slots), list(positions)]))
        if self.inputs.device.type != "cuda":
            return self.run(*self.inputs)
        if self.graph is None:
            self._capture()
        self.graph.replay()
        return self.outputs

    def _capture(self) -> None:
        """Twice outside the graph first: libraries choose kernels and take memory at first use. The inputs are those of
        the call that waits, so that keys and values are written where it will write them again."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.run(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.run(*self.inputs)
