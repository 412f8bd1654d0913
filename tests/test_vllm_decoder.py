"""`generate_teacher --decoder vllm` against a stub of vLLM's interface: ids in, ids out, the plain loop's shards."""

import dataclasses
import sys
import types

import numpy as np
import pytest
import torch

from drafter import vllm_decoder
from drafter.decoding import load_causal_lm
from drafter.recipe import load_recipe
from drafter.teacher_data import read_metadata, read_shards, shard_paths
from scripts import download_models, generate_teacher, prepare_selection


@dataclasses.dataclass
class Logprob:
    logprob: float
    rank: int
    decoded_token: str | None = None


class SamplingParams:
    """vLLM's own refuses settings that it does not know; so does this."""

    def __init__(
        self, *, temperature, n, min_tokens, max_tokens, logprobs, stop_token_ids, ignore_eos, allowed_token_ids,
        detokenize,
    ):  # fmt: skip
        vars(self).update({name: value for name, value in locals().items() if name != "self"})


class LLM:
    """One row after another, one full forward pass a token: nothing shared with the loops it is compared to."""

    calls: list = []
    settings: dict = {}

    def __init__(self, **settings):
        LLM.calls, LLM.settings = [], settings
        self.model = load_causal_lm(settings["model"], getattr(torch, settings["dtype"]))

    def generate(self, prompts, params, use_tqdm):
        LLM.calls.append((prompts, params))
        assert params.logprobs <= self.settings["max_logprobs"] and len(prompts[0]) == 1
        return [self.answer(prompt["prompt_token_ids"], params) for prompt in prompts]

    @torch.inference_mode()
    def answer(self, ids, params):
        tokens, logprobs = [], []
        assert len(ids) + params.max_tokens <= self.settings["max_model_len"]
        while len(tokens) < params.max_tokens and not (tokens and tokens[-1] in params.stop_token_ids):
            logits = self.model(input_ids=torch.tensor([ids + tokens])).logits[0, -1].float()
            if params.allowed_token_ids is not None:
                logits[len(params.allowed_token_ids) :] = -torch.inf
            values, best = logits.log_softmax(-1).topk(params.logprobs)
            tokens.append(int(logits.argmax()))
            logprobs.append({int(i): Logprob(float(v), n) for n, (i, v) in enumerate(zip(best, values, strict=True))})
        reason = "stop" if tokens[-1] in params.stop_token_ids else "length"
        output = types.SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)
        return types.SimpleNamespace(prompt_token_ids=ids, outputs=[output])


@pytest.fixture
def stub(monkeypatch):
    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    module.TokensPrompt = lambda prompt_token_ids: {"prompt_token_ids": prompt_token_ids}
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The tiny recipe with its teacher and 21 selection prompts."""
    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path)
    recipe = load_recipe("tiny")
    download_models.fetch_models(recipe)
    prepare_selection.main(["--recipe", "tiny"])
    (recipe.cache_dir / "prompts" / "development.jsonl").unlink()
    return recipe


def shards(recipe):
    return shard_paths(recipe.cache_dir / "teacher", "selection")


def test_the_shards_are_those_of_the_plain_loop(recipe, stub, tmp_path):
    assert generate_teacher.generate(recipe, "cpu", "transformers")["made"] == 21
    expected = {row.id: row for row in read_shards(shards(recipe))}
    with pytest.raises(ValueError, match="decoder: 'transformers' there, 'vllm' now"):
        generate_teacher.generate(recipe, "cpu", "vllm")
    (recipe.cache_dir / "teacher").rename(tmp_path / "plain")
    report = generate_teacher.generate(recipe, "cpu", "vllm")
    assert report["decoder"] == "vllm" and report["made"] == 21 and report["generated_tokens"] > 0
    assert read_metadata(shards(recipe)[0])["decoder"] == "vllm"
    found = {row.id: row for row in read_shards(shards(recipe))}
    assert found.keys() == expected.keys()
    for key, row in found.items():
        other = expected[key]
        assert (row.prompt_ids, row.continuation_ids) == (other.prompt_ids, other.continuation_ids)
        assert (row.finish_reason, row.split) == (other.finish_reason, other.split)
        assert (row.topk_ids == other.topk_ids).all()
        np.testing.assert_allclose(row.topk_logprobs, other.topk_logprobs, atol=4e-3)  # two steps of a float16 near 2
        np.testing.assert_allclose(row.tail_logprob, other.tail_logprob, atol=1e-3)


def test_a_run_that_was_cut_off_goes_on(recipe, stub, monkeypatch):
    """Each call's rows are on disk before the next call begins."""
    monkeypatch.setattr(vllm_decoder, "BATCHES_PER_CALL", 1)
    recipe = recipe.model_copy(update={"generation": recipe.generation.model_copy(update={"batch_size": 8})})
    whole = LLM.generate

    def cut(self, prompts, params, use_tqdm):
        if len(LLM.calls) == 1:
            raise OSError("the machine went away")
        return whole(self, prompts, params, use_tqdm)

    monkeypatch.setattr(LLM, "generate", cut)
    with pytest.raises(OSError):
        generate_teacher.generate(recipe, "cpu", "vllm")
    assert len(read_shards(shards(recipe))) == 8
    monkeypatch.setattr(LLM, "generate", whole)
    assert generate_teacher.generate(recipe, "cpu", "vllm")["made"] == 13
    assert len(LLM.calls) == 2 and len(read_shards(shards(recipe))) == 21


def test_what_vllm_is_asked_for(recipe, stub):
    """Greedy, our stop ids alone, existing ids alone, no more log-probabilities than its limit is set to."""
    generate_teacher.generate(recipe, "cpu", "vllm")
    settings, (_, params) = LLM.settings, LLM.calls[0]
    assert settings["max_logprobs"] == params.logprobs == recipe.generation.top_k
    assert settings["generation_config"] == "vllm" and settings["logprobs_mode"] == "processed_logprobs"
    assert settings["trust_remote_code"] is False and settings["max_num_seqs"] == recipe.generation.batch_size
    assert params.temperature == 0 and params.n == 1 and params.ignore_eos and not params.detokenize
    assert (params.min_tokens, params.max_tokens) == (0, recipe.generation.max_new_tokens)
    assert params.stop_token_ids == sorted(recipe.teacher.stop_ids)
    assert params.allowed_token_ids == list(range(recipe.teacher.num_ids))  # the table has 272 rows, 261 ids exist


def test_the_chosen_id_comes_first_even_when_a_tie_put_it_last():
    """vLLM then returns K + 1 entries, the chosen one among them."""
    found = {7: Logprob(-0.7, 1), 3: Logprob(-1.2, 2), 9: Logprob(-0.7, 3)}
    ids, logprobs, tail = vllm_decoder.top_k_of(9, found, 2)
    assert ids == [9, 7] and logprobs == [-0.7, -0.7]
    assert tail == pytest.approx(np.log(1 - 2 * np.exp(-0.7)))
    assert vllm_decoder.top_k_of(1, {1: Logprob(0.0, 1)}, 1)[2] == pytest.approx(np.log(1e-7))
    with pytest.raises(ValueError, match="returned 3"):
        vllm_decoder.top_k_of(9, found, 4)


@pytest.mark.parametrize("fault", ["prompt", "reason", "beyond stop", "short", "no logprobs"])
def test_an_answer_that_is_not_as_asked_for_is_refused(fault, stub):
    tokens, reason, prompt = [5, 6], "length", [1, 2]
    if fault == "prompt":
        prompt = [1, 3]
    elif fault == "reason":
        reason = "abort"
    elif fault == "beyond stop":
        tokens = [2, 5]
    elif fault == "short":
        tokens = [5]
    logprobs = [{token: Logprob(-0.1, 1)} for token in tokens]
    output = types.SimpleNamespace(
        token_ids=tokens, finish_reason=reason, logprobs=None if fault == "no logprobs" else logprobs
    )
    answer = types.SimpleNamespace(prompt_token_ids=prompt, outputs=[output])
    engine = types.SimpleNamespace(generate=lambda prompts, settings, use_tqdm: [answer])
    rows = []
    with pytest.raises(ValueError, match="vLLM"):
        vllm_decoder.decode(
            engine, [[1, 2]], 2, num_ids=9, table_rows=9, batch_size=1, stop_ids=[2], top_k=1, on_finish=rows.append
        )
    assert not rows


def test_without_vllm_the_message_says_what_runs(recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match="--decoder transformers runs"):
        generate_teacher.generate(recipe, "cpu", "vllm")
