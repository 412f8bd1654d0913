"""One archive, every way to draft with it: packed or merged, alone or together, cold or with a cache that overflows."""

import random
import threading

import pytest
import torch

from drafter.engine import DraftEngine, DraftRequest, TransformersEngine
from drafter.prefix_cache import BLOCK
from model_io import load_model

HANG_S = 120


def requests(engine, count: int, seed: int) -> list[DraftRequest]:
    """Mixed lengths and k; a third begins as an earlier one does, to a random length, as requests of a session do."""
    source, made = random.Random(seed), []
    for _ in range(count):
        tokens = [source.randrange(engine.num_ids) for _ in range(source.randint(1, 90))]
        if made and source.random() < 0.4:
            earlier = source.choice(made).tokens
            tokens = [*earlier[: source.randint(1, len(earlier))], *tokens[: source.randint(1, 20)]]
        made.append(DraftRequest(tokens[: engine.context - 16], source.randint(1, 16)))
    return made


def in_batches(engine, wanted: list[DraftRequest], seed: int) -> list[tuple]:
    source, found, at = random.Random(seed), [], 0
    while at < len(wanted):
        size = source.randint(1, 9)
        found += [(draft.tokens, draft.finish_reason) for draft in engine.draft(wanted[at : at + size])]
        at += size
    return found


@pytest.fixture(scope="module")
def folder(packed):
    return packed[0] / "model"


def test_packed_is_merged_is_transformers(folder):
    """In fp32, the adapter beside NF4 and INT8 against one merged matrix in the library's own forward pass."""
    packed_form = DraftEngine(load_model(folder, "packed", torch.float32), kernel="plain")
    oracle = TransformersEngine(load_model(folder, "merged", torch.float32))
    wanted = requests(packed_form, 60, seed=1)
    found = in_batches(packed_form, wanted, seed=2)
    assert found == in_batches(oracle, wanted, seed=3)
    assert len({token for tokens, _ in found for token in tokens}) > 20


@pytest.mark.parametrize("blocks", [1, 2, 5, 400])
def test_200_mixed_requests_are_each_one_alone(folder, blocks):
    """A cache of few blocks is full in the middle of every batch, and rows of a batch share beginnings."""
    loaded = load_model(folder, "packed", torch.float32)
    alone = DraftEngine(loaded, kernel="plain", prefix_cache_bytes=0)
    wanted = requests(alone, 200, seed=blocks)
    expected = [(draft.tokens, draft.finish_reason) for one in wanted for draft in alone.draft([one])]
    block_bytes = alone.forward.decoder.cache_bytes_per_token * BLOCK * 2  # fp32
    engine = DraftEngine(loaded, kernel="plain", prefix_cache_bytes=blocks * block_bytes)
    assert engine.prefix_cache.capacity == blocks
    assert in_batches(engine, wanted, seed=7) == expected
    assert len(engine.prefix_cache) <= blocks


def test_native_drafts_are_the_same_in_any_company(chain):
    """The kernels sum a token's products in one order whatever shares its call (NF4 with the bf16 unit: up to 16 tokens
    in one order and more in another, so that prefills here are cut to that)."""
    loaded = load_model(chain.model_dir, "packed")
    engine = DraftEngine(loaded, kernel="native")
    other = DraftEngine(loaded, kernel="native", prefix_cache_bytes=0)
    for one in (engine, other):
        one.forward.max_tokens = 16
    wanted = requests(engine, 120, seed=11)
    expected = [(draft.tokens, draft.finish_reason) for one in wanted for draft in other.draft([one])]
    assert in_batches(engine, wanted, seed=12) == expected


def test_engines_of_several_threads_do_not_disturb_each_other(chain):
    """A server drafts in a thread of its own while another loads; each engine belongs to the thread that uses it."""
    expected, found = {}, {}

    def work(seed: int, into: dict) -> None:
        engine = DraftEngine(load_model(chain.model_dir, "packed"), kernel="native", threads=2)
        engine.forward.max_tokens = 16
        into[seed] = in_batches(engine, requests(engine, 30, seed), seed)

    for seed in (1, 2, 3):
        work(seed, expected)
    threads = [threading.Thread(target=work, args=(seed, found), daemon=True) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert found == expected


def test_an_end_id_ends_its_own_row_alone(folder):
    """Every id that some row drafts is taken for the end once: that row is cut behind it, the others are as before."""
    engine = DraftEngine(load_model(folder, "packed", torch.float32), kernel="plain")
    wanted = [DraftRequest(one.tokens, 12) for one in requests(engine, 8, seed=21)]
    engine.stop_ids = frozenset()
    free = [draft.tokens for draft in engine.draft(wanted)]
    for stop in {tokens[at] for tokens in free for at in (0, 5, 11)}:
        engine.stop_ids = frozenset([stop])
        for tokens, draft in zip(free, engine.draft(wanted), strict=True):
            end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
            assert draft.tokens == tokens[:end]
            assert draft.finish_reason == ("stop" if stop in tokens else "length")
