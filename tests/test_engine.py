"""Drafts of a small random Qwen3-shaped model in fp32, held against a hand-written argmax loop."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from starlette.testclient import TestClient
from transformers import Qwen3Config, Qwen3ForCausalLM

from drafter.decoding import load_causal_lm
from drafter.engine import DraftEngine, DraftRequest
from server import Settings, create_app

HANG_S = 60
CONTEXT = 64


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(vocabulary: int, seed: int = 0) -> Qwen3ForCausalLM:
    """2 layers, hidden 64, tied. Initialised widely, so that drafts vary instead of repeating one id."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float().eval()


def make_engine(model, num_ids: int, stop_ids=()) -> DraftEngine:
    chat = SimpleNamespace(render=lambda messages: [3, 1, 4], thinking="off")
    return DraftEngine(
        SimpleNamespace(
            model=model, chat=chat, archive_id="f" * 64, context=CONTEXT, num_ids=num_ids, stop_ids=stop_ids,
            info={"recipe": "tiny"}, tensors={}, adapter=None, self_check={"margin": 1.0, "drafts": []},
            copy_policy={"enabled": False}, draft_vocabulary=None,
        )
    )  # fmt: skip


@torch.inference_mode()
def argmax_loop(model, tokens, k: int, num_ids: int, stop_ids=()) -> list[int]:
    """The oracle: one plain forward a token over everything so far, mask of ones, no cache."""
    tokens, start = list(tokens), len(tokens)
    while len(tokens) < start + k and (len(tokens) == start or tokens[-1] not in stop_ids):
        ids = torch.tensor([tokens])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1, :num_ids]
        tokens.append(int(logits.argmax()))
    return tokens[start:]


def prompts(count: int, num_ids: int, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(num_ids) for _ in range(source.randint(1, 40))] for _ in range(count)]


@pytest.fixture(scope="module")
def small():
    return make_model(500)


@pytest.fixture(scope="module")
def full():
    return make_model(151936)


# ---------------------------------------------------------------------------- the invariant


def test_a_draft_is_the_same_alone_and_in_every_batch(small):
    engine = make_engine(small, 490, stop_ids=(7, 8))
    source = random.Random(1)
    requests = [DraftRequest(tokens, source.randint(1, 24)) for tokens in prompts(12, 490)]
    alone = [engine.draft([request])[0] for request in requests]
    for request, draft in zip(requests, alone, strict=True):
        assert draft.tokens == argmax_loop(small, request.tokens, request.k, 490, (7, 8))
        assert draft.finish_reason == ("stop" if draft.tokens[-1] in (7, 8) else "length")
        assert draft.finish_reason == "stop" or len(draft.tokens) == request.k
    for size in (2, 3, 5, 12, 20):
        for _ in range(3):
            chosen = [source.randrange(12) for _ in range(size)]  # any order, with repeats
            drafts = engine.draft([requests[index] for index in chosen])
            assert [draft.tokens for draft in drafts] == [alone[index].tokens for index in chosen]
            assert all(draft.timings["batch_size"] == size for draft in drafts)


def test_drafts_over_http_are_those_of_the_engine(small):
    """Alone, and from many clients at once: whatever shares the batch, every client gets its own draft."""
    engine = make_engine(small, 490, stop_ids=(7, 8))
    chosen = prompts(24, 490, seed=2)
    direct = [engine.draft([DraftRequest(tokens, 16)])[0] for tokens in chosen]
    app = create_app(engine_loader=lambda: engine, settings=Settings(max_batch_size=8, batch_wait_ms=2))
    with TestClient(app) as client, ThreadPoolExecutor(8) as pool:
        end_s = time.monotonic() + HANG_S
        while client.get("/ready").status_code != 200:
            assert time.monotonic() < end_s

        def ask(tokens):
            return client.post("/draft", json={"tokens": tokens}).json()

        for answers in (map(ask, chosen), pool.map(ask, chosen), pool.map(ask, chosen)):
            for answer, draft in zip(answers, direct, strict=True):
                assert (answer["draft"], answer["finish_reason"]) == (draft.tokens, draft.finish_reason)
                assert answer["model"] == "f" * 64
        assert client.post("/draft", json={"tokens": [495]}).status_code == 422  # a row of the table, but no id
        assert ask(chosen[0])["draft"] == direct[0].tokens


def test_rows_that_are_no_ids_never_win(small):
    """A padded table has rows above the tokenizer's ids; an argmax over all of them drafted ids nobody can read."""
    model = make_model(500, seed=3)
    with torch.no_grad():
        model.model.embed_tokens.weight[490:] *= 50  # would win every argmax
    engine = make_engine(model, 490)
    for tokens in prompts(4, 490):
        draft = engine.draft([DraftRequest(tokens, 16)])[0].tokens
        assert max(draft) < 490 and draft == argmax_loop(model, tokens, 16, 490)


def test_requests_that_cannot_be_drafted_are_refused(small):
    engine = make_engine(small, 490)
    for tokens, k in (([], 4), ([1, 490], 4), ([1, -1], 4), ([1] * 49, 16), ([1], 0)):
        with pytest.raises(ValueError, match="prompt 1"):
            engine.draft([DraftRequest([1], 1), DraftRequest(tokens, k)])
    assert len(engine.draft([DraftRequest([1] * 48, 16)])[0].tokens) == 16
    assert engine.draft([]) == []


def test_timings_and_warm_up(small):
    engine = make_engine(small, 490)
    engine.warm_up(3)
    timings = engine.draft([DraftRequest([1, 2], 4)])[0].timings
    assert set(timings) == {"prefill_ms", "draft_ms", "cached_tokens", "batch_size"}
    assert timings["prefill_ms"] > 0 and timings["draft_ms"] > 0
    assert engine.info["stop_ids"] == [] and engine.info["dtype"] == "float32" and engine.info["recipe"] == "tiny"


# ---------------------------------------------------------------------------- cases


def swap_ids(model, left: int, right: int) -> None:
    """Give two ids each other's row of the tied table: the model then says `right` where it said `left`."""
    weight = model.model.embed_tokens.weight
    with torch.no_grad():
        weight[[left, right]] = weight[[right, left]].clone()


@pytest.mark.parametrize("end", [151645, 151643])
def test_tok_3_either_end_id_ends_a_draft(full, end):
    """The tokenizer named one end id and the model file the other; drafts ran past the end of the answer."""
    stops = {151645, 151643}
    tokens = next(t for t in prompts(20, 151000) if len(set(argmax_loop(full, t, 3, 151643))) == 3)
    third = argmax_loop(full, tokens, 3, 151643)[2]
    swap_ids(full, third, end)
    try:
        draft = make_engine(full, 151669, stops).draft([DraftRequest(tokens, 16)])[0]
        assert len(draft.tokens) == 3 and draft.tokens[-1] == end and draft.finish_reason == "stop"
        assert len(make_engine(full, 151669).draft([DraftRequest(tokens, 16)])[0].tokens) == 16
    finally:
        swap_ids(full, third, end)


def test_tok_5_pad_and_end_ids_in_the_prompt_are_tokens_like_others(full):
    """Masks were made by comparing ids with the pad id, so that real tokens of a prompt became invisible."""
    tokens, other = [151643, 9707, 151643, 11], prompts(1, 151000, seed=4)[0][:30]
    expected = argmax_loop(full, tokens, 16, 151669)
    engine = make_engine(full, 151669)
    assert engine.draft([DraftRequest(tokens, 16)])[0].tokens == expected
    assert engine.draft([DraftRequest(other, 16), DraftRequest(tokens, 16)])[1].tokens == expected
    assert expected != argmax_loop(full, [9707, 11], 16, 151669)  # the test can see a hidden token


def test_gen_3_no_setting_of_a_vendor_reaches_a_draft(tmp_path, small, capfd):
    """Sampling values, a repetition penalty and a total length of 20 in the vendor's file acted on greedy drafts."""
    small.save_pretrained(tmp_path / "vendor")
    vendor = {
        "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.3, "max_length": 20
    }  # fmt: skip
    (tmp_path / "vendor" / "generation_config.json").write_text(json.dumps(vendor))
    model = load_causal_lm(tmp_path / "vendor", torch.float32)
    tokens = (prompts(1, 490, seed=5)[0] * 30)[:30]
    expected = argmax_loop(small, tokens, 16, 490)
    capfd.readouterr()
    assert make_engine(model, 490).draft([DraftRequest(tokens, 16)])[0].tokens == expected
    assert capfd.readouterr().err == ""
    model.save_pretrained(tmp_path / "again")
    again = load_causal_lm(tmp_path / "again", torch.float32)
    assert make_engine(again, 490).draft([DraftRequest(tokens, 16)])[0].tokens == expected


def test_gen_4_a_finished_row_is_frozen(small):
    """Tokens were appended to a row that had ended until the slowest row of its batch ended."""
    for ending, going in zip(prompts(20, 490, seed=6), prompts(20, 490, seed=7), strict=True):
        stop = argmax_loop(small, ending, 2, 490)[1]
        if stop not in argmax_loop(small, going, 16, 490) and stop != argmax_loop(small, ending, 1, 490)[0]:
            break
    engine = make_engine(small, 490, stop_ids=(stop,))
    ends, goes = DraftRequest(ending, 16), DraftRequest(going, 16)
    alone = engine.draft([ends])[0].tokens
    assert len(alone) == 2 and alone[-1] == stop
    for _ in range(10):
        first, second = engine.draft([ends, goes])
        assert first.tokens == alone and len(second.tokens) == 16 and stop not in second.tokens
        second, first = engine.draft([goes, ends])
        assert first.tokens == alone and len(second.tokens) == 16 and stop not in second.tokens
