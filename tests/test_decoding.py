"""The batched loop against a loop written by hand; batch composition, stop ids, limits, top-K (GEN-3, GEN-4)."""

import json
import random

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from drafter.decoding import greedy_decode, load_causal_lm, top_k_logprobs, top_logits

IDS, ROWS = 200, 224  # ids that exist, rows of the table


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=ROWS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    network = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():  # rows without an id would win every argmax if they took part
        network.lm_head.weight[IDS:] = 3.0
    return network


def prompts(count, seed=0):
    source = random.Random(seed)
    return [[source.randrange(IDS) for _ in range(source.randrange(1, 40))] for _ in range(count)]


@torch.inference_mode()
def by_hand(model, prompt, limit, stops=()):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + limit:
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1, :IDS].argmax()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("batch_size", [1, 3, 8, 64])
def test_equals_the_loop_by_hand_at_every_batch_size(model, batch_size):
    asked = prompts(17)
    limits = [1 + at % 12 for at in range(17)]
    stops = {by_hand(model, asked[3], 12)[2]}  # an id that really comes, so that rows end early
    rows = greedy_decode(model, asked, limits, stop_ids=stops, num_ids=IDS, batch_size=batch_size)
    for row, prompt, limit in zip(rows, asked, limits, strict=True):
        assert row.tokens == by_hand(model, prompt, limit, stops)
        assert row.finish_reason == ("stop" if row.tokens[-1] in stops else "length")
    assert {"stop", "length"} == {row.finish_reason for row in rows}


def test_a_row_that_ended_is_frozen_whatever_shares_its_batch(model):
    """GEN-4: tokens were appended to a finished row until the slowest one ended."""
    free = [(prompt, by_hand(model, prompt, 16)) for prompt in prompts(8, seed=5)]
    a, free_a, b, free_b = next((*x, *y) for x in free for y in free if x[1][2] not in y[1])
    stop = free_a[2]
    alone = greedy_decode(model, [a], 16, stop_ids=[stop], num_ids=IDS)[0].tokens
    assert len(alone) < 16 and alone[-1] == stop
    for at in range(20):
        order = [a, b] if at % 2 else [b, a]
        rows = greedy_decode(model, order, 16, stop_ids=[stop], num_ids=IDS)
        by_prompt = dict(zip(map(tuple, order), (row.tokens for row in rows), strict=True))
        assert by_prompt[tuple(a)] == alone and by_prompt[tuple(b)] == free_b


def test_a_vendors_generation_file_has_no_say(model, tmp_path, capfd):
    """GEN-3: temperature, penalties and a total length of 20 from a shipped file acted on greedy decoding."""
    model.save_pretrained(tmp_path)
    vendor = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.3,
        "max_length": 20,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(vendor))
    capfd.readouterr()
    loaded = load_causal_lm(tmp_path, torch.float32)
    prompt = prompts(1, seed=9)[0] * 30
    prompt = prompt[:30]
    row = greedy_decode(loaded, [prompt], 16, stop_ids=[], num_ids=IDS)[0]
    assert row.tokens == by_hand(model, prompt, 16) and len(row.tokens) == 16
    loaded.save_pretrained(tmp_path / "again")
    kept = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert not {"temperature", "top_p", "top_k", "repetition_penalty", "max_length"} & set(kept)
    assert capfd.readouterr().err == ""


def test_top_k_equals_a_full_log_softmax(model):
    rows = greedy_decode(model, prompts(5), 6, stop_ids=[], num_ids=IDS, top_k=8)
    for row, prompt in zip(rows, prompts(5), strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + row.tokens[:-1]])).logits[0, len(prompt) - 1 :, :IDS]
        logprobs = logits.double().log_softmax(-1)
        values, _ = logprobs.topk(8)
        assert row.topk_ids[:, 0].tolist() == row.tokens and row.topk_ids.max() < IDS
        np.testing.assert_allclose(row.topk_logprobs, values, atol=2e-2)
        np.testing.assert_allclose(row.topk_logprobs, logprobs.gather(1, torch.tensor(row.topk_ids).long()), atol=2e-2)
        tail = 1 - values.exp().sum(-1)
        np.testing.assert_allclose(np.exp(row.tail_logprob), tail, atol=1e-5)
        assert row.topk_ids.dtype == np.int32 and row.topk_logprobs.dtype == np.float16


def test_ties_of_a_bf16_product_are_decided_in_fp32():
    """Logits near 20 are rounded to steps of 0.125 in bf16; two ids shared the first place and the kernel chose."""
    torch.manual_seed(1)
    hidden, head = torch.randn(64, 48).bfloat16(), torch.randn(500, 48).bfloat16()
    exact = (hidden.double() @ head.double().T).argmax(-1)
    assert (top_logits(hidden, head, 1)[1][:, 0] == exact).all()
    ids, logprobs, tail = top_k_logprobs(hidden, head, 16)
    assert (torch.tensor(ids[:, 0]) == exact).all() and (np.diff(logprobs.astype(np.float32), axis=1) <= 0).all()
    np.testing.assert_allclose(np.exp(logprobs.astype(np.float64)).sum(1) + np.exp(tail), 1, atol=5e-3)


def test_rows_are_reported_as_they_end_and_tokens_counted(model):
    finished, counted = [], []
    rows = greedy_decode(
        model, prompts(9), 5, stop_ids=[], num_ids=IDS, batch_size=4, on_finish=finished.append, progress=counted.append
    )
    assert sorted(row.index for row in finished) == list(range(9)) and sum(counted) == 45
    assert rows == []  # handed over, not kept


@pytest.mark.parametrize(
    ("prompt", "limit", "match"),
    [([], 4, "is empty"), ([IDS], 4, "outside"), ([-1], 4, "outside"), ([1], 0, "at least 1")],
)
def test_bad_input_is_refused_before_the_model_runs(model, prompt, limit, match):
    with pytest.raises(ValueError, match=match):
        greedy_decode(model, [[1], prompt], [4, limit], stop_ids=[], num_ids=IDS)
