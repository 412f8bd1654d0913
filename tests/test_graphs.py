"""Steps over fixed buffers, as a GPU replays them, against the same pass without. Graphs themselves need a GPU."""

import numpy as np
import pytest
import torch

from drafter.graphs import SPAN, StaticStep, span_of
from drafter.kernel_check import random_decoder
from drafter.plain import PlainForward
from drafter.stepping import decode


def drafts(static: bool, vocabulary: np.ndarray | None = None) -> list[list[int]]:
    decoder = random_decoder(positions=400)
    forward = PlainForward(decoder, dtype=torch.float32)
    forward.static_steps = static
    cache = forward.new_cache(3, 400)
    source = np.random.default_rng(3)
    prompts = [source.integers(0, decoder.num_ids, length).tolist() for length in (250, 3, 17, 255, 40)]
    settings = {"stop_ids": frozenset(), "vocabulary": vocabulary}
    rows = decode(forward, cache, prompts, [20, 4, 9, 12, 7], **settings)
    assert bool(forward._steps) == static
    return [row.tokens for row in rows]


@pytest.mark.parametrize("vocabulary", [None, np.arange(0, 203, 3, dtype=np.int32)])
def test_steps_over_fixed_buffers_draft_alike(vocabulary):
    """Rows leave and enter, and two of them pass from one span of positions to the next."""
    assert drafts(True, vocabulary) == drafts(False, vocabulary)


def test_a_new_cache_forgets_the_old_addresses():
    forward = PlainForward(random_decoder(), dtype=torch.float32)
    forward.static_steps = True
    for _ in range(2):
        cache = forward.new_cache(2, 64)
        forward(cache, [5, 6], [0, 1], [0, 0], [0, 1])
        assert forward._steps_cache is cache and len(forward._steps) == 1


def test_inputs_keep_their_address():
    seen = []
    step = StaticStep(
        lambda *inputs: (seen.append([one.data_ptr() for one in inputs]), inputs[0] + inputs[2])[1:], 2, "cpu"
    )
    assert step([1, 2], [0, 1], [7, 8])[0].tolist() == [8, 10] and step([3, 4], [1, 0], [1, 1])[0].tolist() == [4, 5]
    assert seen[0] == seen[1]


def test_spans():
    assert span_of([0], 1000) == SPAN == span_of([SPAN - 1, 3], 1000)
    assert span_of([SPAN], 1000) == 2 * SPAN and span_of([SPAN], SPAN + 7) == SPAN + 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: CUDA graphs are not run")
def test_graphs_on_a_gpu():
    decoder = random_decoder(positions=400)
    found = []
    for static in (True, False):
        forward = PlainForward(decoder, dtype=torch.float32, device="cuda")
        forward.static_steps = static
        rows = decode(forward, forward.new_cache(2, 400), [[1, 2, 3], [4, 5]], [30, 30], stop_ids=frozenset())
        found.append([row.tokens for row in rows])
    assert found[0] == found[1]
