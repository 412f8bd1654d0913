"""Scoring a drafter: the teacher-forced pass against generating by hand, and the script around it."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafter import acceptance, scoring
from drafter.copy_policy import prompt_lookup

VOCAB, NUM_IDS, STOP = 40, 37, 2  # rows 37..39 of the table are padding


@dataclass
class Row:
    prompt_ids: list
    continuation_ids: list
    finish_reason: str
    category: str = "chat"
    family: str = "greeting/01"
    split: str = "development"
    id: str = "row"
    source: str = "test"


def tiny_model(seed: int, noise_of=None) -> LlamaForCausalLM:
    """A random two-layer model in fp32; `noise_of` gives a student that agrees with that teacher fairly often."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.25,
        pad_token_id=STOP,
    )
    model = LlamaForCausalLM(config).eval()
    if noise_of is not None:
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), noise_of.parameters(), strict=True):
                ours.copy_(theirs + 0.03 * torch.randn_like(theirs))
    return model


@torch.no_grad()
def greedy_by_hand(model, prompt, count, stop=STOP):
    """One row, no cache, no batch: the slow oracle. Stops behind the stop id."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1, :NUM_IDS]
        tokens.append(int(logits.argmax()))
        if tokens[-1] == stop:
            break
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def teacher():
    torch.set_num_threads(1)
    return tiny_model(0)


@pytest.fixture(scope="module")
def student(teacher):
    return tiny_model(1, noise_of=teacher)


@pytest.fixture(scope="module")
def rows(teacher):
    """24 prompts of different lengths with the teacher's own answers, some ended and some cut."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(24):
        prompt = rng.integers(3, NUM_IDS, size=int(rng.integers(2, 20))).tolist()
        answer = greedy_by_hand(teacher, prompt, int(rng.integers(6, 40)))
        reason = "stop" if answer[-1] == STOP else "length"
        if index % 3 == 0 and reason == "length":  # an ended text: the stop id stands where the teacher was cut
            answer, reason = [*answer, STOP], "stop"
        family = ("greeting/01", "greeting/02", "letters/01")[index % 3]
        made.append(Row(prompt, answer, reason, ("chat", "math")[index % 2], family, id=f"row{index}"))
    return made


# ---------------------------------------------------------------------------- the forward pass


def test_bits_equal_one_position_at_a_time(student, rows):
    """The batched, padded, chunked pass against a forward per position of each row on its own."""
    scores = scoring.score_model(student, rows, num_ids=NUM_IDS, batch_tokens=100, head_rows=7, with_gaps=True)
    for row, score in zip(rows, scores, strict=True):
        bits, gaps = [], []
        for at, target in enumerate(row.continuation_ids):
            with torch.no_grad():
                ids = torch.tensor([[*row.prompt_ids, *row.continuation_ids[:at]]])
                logits = student(input_ids=ids, use_cache=False).logits[0, -1, :NUM_IDS]
            bits.append(int(logits.argmax()) == target)
            two = logits.topk(2).values
            gaps.append(float(two[0] - two[1]))
        assert score.runs.tolist() == acceptance.run_lengths(bits).tolist()
        np.testing.assert_allclose(score.gaps, gaps, atol=1e-4)


def test_the_teacher_agrees_with_itself(teacher, rows):
    """Its own student: every bit is right (but for stop ids that the test put there), tau near k + 1."""
    own = [row for row in rows if row.finish_reason == "length"]
    result = scoring.evaluate_model(teacher, own, num_ids=NUM_IDS, ks=(2, 4))
    assert result.agreement == 1.0
    assert result.tau == {2: 3.0, 4: 5.0}


def test_padding_rows_of_the_table_never_win(teacher, rows):
    """A table may have more rows than ids exist (Qwen3: 151,936 against 151,669). One whose logit is always the
    largest must not change a bit."""
    rigged = tiny_model(0)
    with torch.no_grad():
        rigged.lm_head = torch.nn.Linear(32, VOCAB, bias=True)
        rigged.lm_head.weight.copy_(teacher.lm_head.weight)
        rigged.lm_head.bias.zero_()
        rigged.lm_head.bias[NUM_IDS:] = 1e4
    ours = scoring.score_model(rigged, rows, num_ids=NUM_IDS)
    plain = scoring.score_model(teacher, rows, num_ids=NUM_IDS)
    assert [s.runs.tolist() for s in ours] == [s.runs.tolist() for s in plain]
    broken = scoring.score_model(rigged, rows, num_ids=VOCAB)  # the test bites
    assert all(s.runs.max() == 0 for s in broken)


def test_ids_equal_to_the_pad_id_are_ordinary_tokens(student, rows):
    """Kind of TOK-5: masks made by comparing ids with the pad id hide genuine stop ids. Here pad = stop = 2, and
    prompts full of it score alike alone and beside a longer row."""
    odd = replace(rows[0], prompt_ids=[STOP, 9, STOP, STOP, 11, STOP])
    [alone] = scoring.score_model(student, [odd], num_ids=NUM_IDS)
    together = scoring.score_model(student, [*rows[:5], odd], num_ids=NUM_IDS)
    assert together[-1].runs.tolist() == alone.runs.tolist()


def test_the_model_keeps_its_mode_and_its_gradients(student, rows):
    student.train()
    scoring.evaluate_model(student, rows[:2], num_ids=NUM_IDS, ks=(2,))
    assert student.training
    student(input_ids=torch.tensor([[3, 4]])).logits.sum().backward()
    student.zero_grad()
    student.eval()


def test_empty_rows_are_named(student, rows):
    with pytest.raises(ValueError, match=r"row 1 \(row1\) has an empty"):
        scoring.score_model(student, [rows[0], replace(rows[1], continuation_ids=[])], num_ids=NUM_IDS)
    with pytest.raises(ValueError, match="'x': no rows"):
        scoring.summarise("x", [], [])


# ---------------------------------------------------------------------------- parity: bits against real drafts


@pytest.mark.parametrize("k", [1, 4, 16])
def test_tau_by_bits_equals_tau_by_replay(student, rows, k):
    """The claim that everything rests on, in fp32 where equality is exact: no near tie is allowed to explain."""
    scores = scoring.score_model(student, rows, num_ids=NUM_IDS, with_gaps=True)
    parity = scoring.replay_parity(
        rows, scores, k, lambda prefixes: [greedy_by_hand(student, prefix, k) for prefix in prefixes]
    )
    assert parity["equal"] == len(rows)
    assert parity["tau_bits"] == parity["tau_replay"]
    assert 1 < parity["tau_bits"] < k + 1  # neither trivial end


def test_parity_finds_another_model(student, teacher, rows):
    """Drafts of a model that was not scored must be called different, not explained away."""
    scores = scoring.score_model(student, rows, num_ids=NUM_IDS, with_gaps=True)
    parity = scoring.replay_parity(
        rows, scores, 4, lambda prefixes: [greedy_by_hand(teacher, prefix, 4) for prefix in prefixes]
    )
    assert parity["different"] > 0
    assert parity["equal"] + parity["near_tie"] + parity["different"] == len(rows)


def test_prompt_lookup_by_runs_equals_replay(rows):
    """Not autoregressive, so its runs are not consecutive bits; one pass with k = 16 must serve every k."""
    repetitive = [replace(row, prompt_ids=[*row.continuation_ids, *row.prompt_ids]) for row in rows]
    scores = scoring.score_prompt_lookup(repetitive, 16)
    for k in (2, 4, 16):
        parity = scoring.replay_parity(
            repetitive, scores, k, lambda prefixes, k=k: [prompt_lookup(prefix, k) for prefix in prefixes]
        )
        assert parity["equal"] == len(rows)
    assert parity["tau_bits"] > 2


# ---------------------------------------------------------------------------- the record


def test_record_of_a_stage(student, rows):
    result = scoring.evaluate_model(
        student, rows, num_ids=NUM_IDS, stage="distill", train_families={"greeting/01", "weather/03"}, seconds=12.34
    )
    record = result.record
    assert (record["stage"], record["layers"], record["seconds"], record["rows"]) == ("distill", 2, 12.3, 24)
    assert set(record["tau"]) == {"4", "8", "16"} and set(record["by_category"]) == {"chat", "math"}
    low, high = record["tau16_interval"]
    assert low <= record["tau"]["16"] <= high
    assert all(1 <= tau <= int(k) + 1 for k, tau in record["tau"].items())
    assert len(record["cumulative16"]) == 16
    groups = {name: [] for name in scoring.NOVELTY}
    for row in rows:
        groups[scoring.novelty(row.family, {"greeting/01"})].append(row)
    assert [len(group) for group in groups.values()] == [8, 8, 8]
    for name, group in groups.items():
        alone = scoring.evaluate_model(student, group, num_ids=NUM_IDS)
        assert record[name] == pytest.approx(alone.tau[16], abs=1e-4)
