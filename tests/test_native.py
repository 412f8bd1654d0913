"""The own forward pass: native kernels against the plain path, and that against transformers, family by family."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from drafter import native, stepping
from drafter.decoder import KeyValueCache, decoder_of
from drafter.decoding import greedy_decode, top_k_logprobs
from drafter.engine import choose_forward
from drafter.kernel_check import LIMIT, calls_of, check_kernels, random_decoder, states_of
from drafter.native import FLAGS, BuildError, NativeForward
from drafter.plain import PlainForward
from drafter.prefix_cache import BLOCK, PrefixCache

# What compilers build for lesser machines than this one; where it lacks a set of instructions itself, two are the same.
LESSER = {"avx512": ("-mno-avx512bf16",), "avx2": ("-mno-avx512f",), "baseline": ("-march=x86-64",)}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
}
NUM_IDS, CONTEXT = 200, 96


def random_model(family: str, **changes):
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(0)
    shape = {
        "vocab_size": 208, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **changes,
    }  # fmt: skip
    if family != "qwen2":
        shape["head_dim"] = 32
    model = model_class(config_class(**shape, **own)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.5)  # new models have none, and a bias of zero tests nothing
    return model


def prompts(count: int = 7, seed: int = 0) -> list[list[int]]:
    source = np.random.default_rng(seed)
    return [source.integers(0, NUM_IDS, size).tolist() for size in source.integers(1, 60, count)]


def drafted(forward, texts, k=16, slots=4, **options) -> list[list[int]]:
    rows = stepping.decode(forward, forward.new_cache(slots, CONTEXT), texts, k, stop_ids=frozenset(), **options)
    return [row.tokens for row in rows]


# ---------------------------------------------------------------------------- equality


@pytest.mark.parametrize("family", FAMILIES)
def test_in_fp32_drafts_are_those_of_transformers(family):
    model = random_model(family)
    forward = PlainForward(decoder_of(model, num_ids=NUM_IDS), dtype=torch.float32)
    oracle = greedy_decode(model, prompts(), 16, stop_ids=(), num_ids=NUM_IDS)
    assert drafted(forward, prompts()) == [row.tokens for row in oracle]
    assert len({token for row in oracle for token in row.tokens}) > 20  # not one id over and over


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_rotary_types(rope):
    own = {"linear": {"factor": 2.0}, "yarn": {"factor": 2.0, "original_max_position_embeddings": 48}}
    own["llama3"] = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    own["llama3"]["original_max_position_embeddings"] = 48
    model = random_model("llama", rope_parameters={"rope_type": rope, "rope_theta": 10000.0, **own[rope]})
    forward = PlainForward(decoder_of(model, num_ids=NUM_IDS), dtype=torch.float32)
    oracle = greedy_decode(model, prompts(), 16, stop_ids=(), num_ids=NUM_IDS)
    assert drafted(forward, prompts()) == [row.tokens for row in oracle]


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"mlp_bias": True}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}]
)
def test_what_the_pass_does_not_know_is_refused_by_name(change):
    model = random_model("llama", **change)
    with pytest.raises(ValueError, match="--engine transformers") as caught:
        decoder_of(model)
    assert next(iter(change)) in str(caught.value) or "rope_type" in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_native_states_are_close_to_transformers(family):
    """The last hidden states of every token, prefilled at once, fed one by one, and two slots in one call."""
    model = random_model(family, initializer_range=0.15).bfloat16()  # wider ones make more of every rounding
    decoder = decoder_of(model, num_ids=NUM_IDS)
    calls = calls_of(NUM_IDS, (30, 1, 9))
    found = states_of(NativeForward(decoder, threads=2), calls)
    expected = states_of(PlainForward(decoder, dtype=torch.float32), calls)
    assert (found - expected).norm() / expected.norm() < LIMIT
    assert not torch.allclose(expected[0], expected[1], atol=0.1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16, 17, 40, 128])
def test_native_against_plain(packed, norms, biases, tokens):
    decoder = random_decoder(packed=packed, norms=norms, biases=biases, layers=1, positions=160)
    calls = calls_of(decoder.num_ids, (tokens, 1, 5))
    found = states_of(NativeForward(decoder, threads=2), calls)
    expected = states_of(PlainForward(decoder, dtype=torch.float32), calls)
    assert (found - expected).norm() / expected.norm() < LIMIT


@pytest.mark.parametrize("name", LESSER)
def test_the_kernels_of_lesser_machines(name):
    flags = FLAGS + LESSER[name]
    assert check_kernels(flags) < LIMIT
    assert native.library(flags).engine_unit() == 0


def test_a_wrong_kernel_is_found_before_it_is_used(monkeypatch):
    """Without this the check could pass whatever it is given: here the codes of one matrix lie in another order."""
    whole = NativeForward._matrix

    def wrong(self, matrix):
        if matrix.kind == "nf4":
            matrix = type(matrix)(**{**vars(matrix), "codes": (matrix.codes >> 4) | (matrix.codes << 4)})
        return whole(self, matrix)

    monkeypatch.setattr(NativeForward, "_matrix", wrong)
    check_kernels.cache_clear()
    with pytest.raises(BuildError, match="differ from the plain path"):
        check_kernels()
    check_kernels.cache_clear()


# ---------------------------------------------------------------------------- invariance


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_is_the_same_in_any_batch_bit_for_bit(packed):
    """Up to 16 tokens a call the sums of a token run in one order whatever shares the call with it; dense, always."""
    decoder = random_decoder(packed=packed)
    forward = NativeForward(decoder, threads=2)
    texts = [row[: 1 if packed else 12] for row in prompts(16, seed=3)]
    alone = drafted(forward, texts, slots=1)
    for slots in (2, 5, 16):
        assert drafted(forward, texts, slots=slots) == alone
    tokens = list(range(16 if packed else 40))
    together = forward(forward.new_cache(len(tokens), 4), tokens, tokens, [0] * len(tokens), tokens, hidden=True).hidden
    for token in tokens:
        one = forward(forward.new_cache(1, 4), [token], [0], [0], [0], hidden=True).hidden[0]
        assert torch.equal(one, together[token])


def test_threads_change_nothing():
    decoder, texts = random_decoder(positions=CONTEXT), prompts(5)
    one = drafted(NativeForward(decoder, threads=1), texts)
    assert all(drafted(NativeForward(decoder, threads=threads), texts) == one for threads in (2, 3, 5))


def test_rows_of_any_length_share_a_batch_and_end_alone():
    decoder, texts = random_decoder(positions=CONTEXT), prompts(9)
    forward = PlainForward(decoder, dtype=torch.float32)
    limits = [1 + at % 5 for at in range(9)]
    full = drafted(forward, texts, slots=1)
    assert drafted(forward, texts, limits) == [row[:limit] for row, limit in zip(full, limits, strict=True)]
    stop = full[3][2]
    cache = forward.new_cache(4, CONTEXT)
    rows = stepping.decode(forward, cache, texts, 16, stop_ids=frozenset([stop]))
    for row, text in zip(rows, full, strict=True):
        assert row.tokens == (text[: text.index(stop) + 1] if stop in text else text)
        assert row.finish_reason == ("stop" if stop in text else "length")


@pytest.mark.parametrize("packed", [True, False])
def test_a_prompt_longer_than_a_call(packed):
    """A call of a long prompt's beginning wants no token: the head of a dense model then divided by no rows, and the
    process died of it in the first minutes of a teacher's work."""
    decoder = random_decoder(packed=packed, positions=CONTEXT)
    text = prompts(1, seed=11)[0][:1] * 3 + list(range(60))
    whole = drafted(NativeForward(decoder, threads=2, max_tokens=128), [text], 8)
    for size in (1, 7, 32):
        forward = NativeForward(decoder, threads=2, max_tokens=size)
        found = drafted(forward, [text], 8)
        assert found == whole if not packed else found[0][:1] == whole[0][:1]
        assert len(drafted(forward, [text, [1], text[:9]], 8)) == 3


def test_what_a_row_may_not_be():
    forward = PlainForward(random_decoder())
    cache = forward.new_cache(1, 20)
    for text, k, message in (
        ([], 1, "empty"),
        ([999], 1, "outside"),
        ([1], 0, "at least 1"),
        ([1] * 10, 11, "20 posi"),
    ):
        with pytest.raises(ValueError, match=message):
            stepping.decode(forward, cache, [text], k, stop_ids=frozenset())


def test_a_restricted_head_chooses_among_its_rows_alone():
    decoder = random_decoder()
    rows = np.arange(0, decoder.num_ids, 3, dtype=np.int32)
    for forward in (NativeForward(decoder, threads=2), PlainForward(decoder, dtype=torch.float32)):
        cache, tokens = forward.new_cache(1, 64), list(range(20))
        call = (tokens, [0] * 20, list(range(20)), tokens)
        hidden = forward(cache, *call, hidden=True).hidden
        best = (hidden.cpu() @ decoder.head.weight().T)[:, torch.from_numpy(rows).long()]
        choice = forward(cache, *call, rows=rows)
        top = best.topk(2, -1)
        clear = top.values[:, 0] - top.values[:, 1] > 0.05
        assert clear.sum() > 10
        assert torch.equal(torch.tensor(choice.ids)[clear], torch.from_numpy(rows).long()[top.indices[:, 0]][clear])


def test_a_draft_vocabulary_and_the_rows_own_ids():
    """What shares the batch has other ids of its own, and they must not compete here: each row as if alone."""
    decoder = random_decoder(positions=CONTEXT)
    vocabulary, texts = np.arange(0, decoder.num_ids, 4, dtype=np.int32), prompts(8, seed=4)
    for forward in (NativeForward(decoder, threads=2), PlainForward(decoder, dtype=torch.float32)):
        free, found = (drafted(forward, texts, vocabulary=one) for one in (None, vocabulary))
        assert found == drafted(forward, texts, slots=1, vocabulary=vocabulary) != free
        for text, row in zip(texts, found, strict=True):
            assert set(row) <= {*vocabulary.tolist(), *text}
        assert any(set(row) - set(vocabulary.tolist()) for row in found)
        # with every missing id in its prompt a row is as free as without a list
        rest = [np.setdiff1d(np.arange(decoder.num_ids), vocabulary).tolist()[:70]]
        small = np.setdiff1d(np.arange(decoder.num_ids, dtype=np.int32), np.array(rest[0], np.int32))
        assert drafted(forward, rest, vocabulary=small) == drafted(forward, rest)


def test_top_k_lists_of_the_kernels():
    decoder = random_decoder(packed=False)
    forward = NativeForward(decoder, threads=2)
    tokens = list(range(30))
    call = (tokens, [0] * 30, list(range(30)), tokens)
    choice = forward(forward.new_cache(1, 64), *call, hidden=True, top_k=20)
    # what the head is multiplied with: bf16 where the machine has the unit for it
    hidden = choice.hidden.bfloat16().float() if forward.lib.engine_unit() else choice.hidden
    ids, logprobs, tails = top_k_logprobs(hidden, decoder.head.weight()[: decoder.num_ids], 20)
    found_ids, found, found_tails = choice.top_k
    assert choice.ids == found_ids[:, 0].tolist()
    assert np.abs(found.astype(float) - logprobs).max() < 0.02 and np.abs(found_tails - tails).max() < 0.02
    assert (np.diff(found.astype(float)) <= 0).all() and (found_ids == ids).mean() > 0.9
    whole = np.exp(found.astype(float)).sum(1) + np.exp(found_tails)
    assert np.abs(whole - 1).max() < 2e-3  # 20 numbers in fp16


# ---------------------------------------------------------------------------- without a compiler


def test_without_a_compiler_the_plain_path_runs_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(native, "_compiler", lambda: (_ for _ in ()).throw(BuildError("no C compiler is installed")))
    native.library.cache_clear()
    check_kernels.cache_clear()
    decoder = random_decoder()
    assert choose_forward(decoder, "auto").name == "plain"
    error = capsys.readouterr().err
    assert "no C compiler is installed" in error and error.count("\n") == 1
    with pytest.raises(ValueError, match="--kernel plain"):
        choose_forward(decoder, "native")
    native.library.cache_clear()
    check_kernels.cache_clear()


def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", sys.executable)  # a program that knows none of the flags
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    with pytest.raises(BuildError, match="failed"):
        native.library()
    native.library.cache_clear()
    assert list((tmp_path / "drafter").iterdir()) == []  # nothing half-built is left


def test_a_model_that_the_kernels_do_not_take_runs_plain(capsys):
    decoder = random_decoder(hidden=96, rank=0)
    with pytest.raises(ValueError, match="no multiple of 64"):
        NativeForward(decoder, threads=1)
    assert choose_forward(decoder, "auto").name == "plain" and "no multiple of 64" in capsys.readouterr().err
    assert choose_forward(random_decoder(), "auto", torch.float32).name == "plain"  # exact: no word about it
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------------------- prefix cache


def prefix_cache(decoder, blocks: int, dtype=torch.bfloat16) -> PrefixCache:
    one = PrefixCache(1 << 20, len(decoder.layers), decoder.kv_heads, decoder.head_dim, dtype).block_bytes
    return PrefixCache(blocks * one, len(decoder.layers), decoder.kv_heads, decoder.head_dim, dtype)


@pytest.mark.parametrize("blocks", [0, 1, 3, 7, 100])
def test_warm_is_cold(blocks):
    """A session that grows, branches and comes back, with room for everything, for little, and for nothing."""
    decoder = random_decoder(positions=CONTEXT)
    forward = NativeForward(decoder, threads=1)
    cache, known = forward.new_cache(3, CONTEXT), prefix_cache(decoder, blocks)
    source, texts = np.random.default_rng(5), [prompts(1, seed=9)[0]]
    for _ in range(40):
        before = texts[source.integers(len(texts))]
        kept = before[: source.integers(1, len(before) + 1)]
        texts.append((kept + source.integers(0, decoder.num_ids, source.integers(1, 20)).tolist())[:70])
    hits = 0
    for at in range(0, len(texts), 3):
        some = texts[at : at + 3]
        rows = stepping.decode(forward, cache, some, 8, stop_ids=frozenset(), prefix_cache=known)
        assert [row.tokens for row in rows] == drafted(forward, some, 8)
        assert all(row.cached_tokens < len(text) for row, text in zip(rows, some, strict=True))
        assert len(known) + len(known.free) == known.capacity == blocks
        hits += sum(row.cached_tokens for row in rows)
    assert hits > 300 or blocks < 100


def test_what_was_drafted_and_accepted_is_not_computed_again():
    decoder = random_decoder(positions=CONTEXT)
    forward, known = PlainForward(decoder, dtype=torch.float32), prefix_cache(decoder, 50, torch.float32)
    cache, text = forward.new_cache(1, CONTEXT), prompts(1, seed=2)[0][:40] + [1] * 20
    options = {"stop_ids": frozenset(), "prefix_cache": known}
    first = stepping.decode(forward, cache, [text], 16, **options)[0]
    whole = (len(text) + 15) // BLOCK * BLOCK
    again = stepping.decode(forward, cache, [text + first.tokens[:10] + [7]], 16, **options)[0]
    assert first.cached_tokens == 0 and again.cached_tokens == min(whole, len(text) + 10)
    assert stepping.decode(forward, cache, [text[:33]], 4, **options)[0].cached_tokens == 32  # never the last token
    assert stepping.decode(forward, cache, [[2, *text]], 4, **options)[0].cached_tokens == 0


def test_the_least_recently_used_leaf_makes_room():
    decoder = random_decoder(positions=CONTEXT)
    known = prefix_cache(decoder, 4)
    keys = torch.zeros(len(decoder.layers), decoder.kv_heads, CONTEXT, decoder.head_dim, dtype=torch.bfloat16)

    def text(*blocks: int) -> list[int]:
        return [block for block in blocks for _ in range(BLOCK)]

    known.store(text(1, 2), keys, keys)
    known.store(text(1, 3), keys, keys)
    known.restore(text(1, 2, 9), keys, keys)
    known.store(text(4, 5), keys, keys)  # 4 takes the last free block, 5 that of 3
    assert known.restore(text(1, 2, 9), keys, keys) == 2 * BLOCK
    assert known.restore(text(1, 3, 9), keys, keys) == BLOCK
    assert known.restore(text(4, 5, 9), keys, keys) == 2 * BLOCK
    known.store(text(6, 7, 8, 6, 7), keys, keys)  # more than there is room for: its beginning is kept
    assert known.restore(text(6, 7, 8, 6, 7), keys, keys) == 4 * BLOCK
    assert len(known) == 4


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_cache_takes_memory_as_it_is_filled():
    """A server of the 1.7B shape held 9 GB after its first batch: of 16 slots of 4,096 positions, 528 were in use, but
    zeros had been written for all, and then, with numpy's zeros, huge pages were taken for all."""
    decoder = random_decoder()
    before = resident_bytes()
    cache = KeyValueCache.new(decoder, slots=16, length=200_000)  # 1.6 GB
    assert cache.keys.nbytes + cache.values.nbytes > 1_500_000_000
    cache.keys[:, :, :, :100], cache.values[:, :, :, :100] = 1, 1
    assert resident_bytes() - before < 50_000_000
    assert not cache.keys[:, :, :, 100:200].any() and cache.keys.dtype == torch.bfloat16
