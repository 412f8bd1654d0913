"""The training loop: gradients do not depend on the cut, QAT computes with the packer's numbers, resume is exact."""

import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file

import train
from drafter.losses import LossSums, distillation_loss
from drafter.mixing import collate
from drafter.provenance import sha256_file
from drafter.quantization import fake_quant_int8, fake_quant_nf4, nf4_dequantize, nf4_quantize
from drafter.recipe import RunDocument, load_recipe
from drafter.teacher_data import TeacherRow
from drafter.weights import MasterWeights
from tests.test_mixing import row


@pytest.fixture
def copy(chain, tmp_path, monkeypatch):
    """The recipe with a copy of the chain's cache and student, and no phase done."""
    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path)
    shutil.copytree(chain.root / "data", tmp_path / "data", symlinks=True)
    shutil.copytree(chain.root / "runs" / "tiny" / "student", tmp_path / "runs" / "tiny" / "student")
    recipe = load_recipe("tiny")
    log = RunDocument.read(chain.root / "runs" / "tiny" / "architecture.json").phase_log
    RunDocument(recipe, log[:1]).write()
    return recipe


def gradients(trainer: train.Trainer, rows: list[TeacherRow], micro_batch_tokens: int) -> list[torch.Tensor]:
    """Of the step's mean loss, in fp32, without the update."""
    settings = trainer.recipe.trainer.model_copy(
        update={"micro_batch_tokens": micro_batch_tokens, "max_grad_norm": 1e9}
    )
    trainer.recipe = trainer.recipe.model_copy(update={"trainer": settings})
    found = []
    trainer.optimizer.step = lambda: found.extend(p.grad.clone() for p in trainer.weights.trainable())
    trainer.step(rows)
    return found


@pytest.mark.parametrize("phase", ["distill", "polish", "qat"])
def test_gradients_do_not_depend_on_the_cut_into_micro_batches(copy, phase, monkeypatch):
    """TRN-1: a mean per micro-batch, averaged again, weighs a token of a short row more. 1, 7, 30 and 100 targets."""
    monkeypatch.setattr(train, "parent_folder", lambda recipe, phase: recipe.run_dir / "student")
    rows = [row(str(n), range(5), [at % 250 for at in range(n)], k=8) for n in (1, 7, 30, 100)]
    together, apart = (gradients(train.Trainer(copy, copy.phase(phase), "cpu"), rows, tokens) for tokens in (10_000, 1))
    scale = max(float(g.abs().max()) for g in together)
    assert scale > 1e-3 and len(together) == len(apart)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * scale)


def test_qat_computes_with_the_very_weights_that_the_packer_stores(chain):
    folder = chain.root / "runs" / "tiny" / "qat"
    masters, scales = load_file(folder / "model.safetensors"), load_file(folder / "nf4_scales.safetensors")
    model = train.load_causal_lm(folder, torch.float32)
    weights = MasterWeights(model, quantize=True)
    weights.scales = scales
    weights.publish()
    for name, value in model.state_dict().items():
        if name in scales:
            packed = nf4_dequantize(nf4_quantize(masters[name], scales[name]), scales[name], value.shape)
            assert torch.equal(value, packed) and torch.equal(value, fake_quant_nf4(masters[name], scales[name]))
        elif "embed_tokens" in name:
            assert torch.equal(value, fake_quant_int8(masters[name]))
            assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert any("embed_tokens" in name for name in weights.tables) and len(scales) == 14


def test_resume_is_exact(copy, monkeypatch):
    """TRN-5: a run cut off at step 2 and resumed ends with the very bytes of one that ran through."""
    monkeypatch.setattr(train, "parent_folder", lambda recipe, phase: recipe.run_dir / "student")
    phase = copy.phase("qat")  # scales are part of the state
    phase = phase.model_copy(update={"tokens": 12_000})
    checkpoint = train.Checkpoint(copy, phase)
    straight = train.Trainer(copy, phase, "cpu")
    assert len(straight.plan) == 4
    straight.run(checkpoint)

    cut = train.Trainer(copy, phase, "cpu")
    whole, cut.plan = cut.plan, cut.plan[:2]
    monkeypatch.setattr(
        train, "learning_rate", lambda phase, step, steps, rate=train.learning_rate: rate(phase, step, 4)
    )
    cut.run(checkpoint)
    cut.plan = whole
    checkpoint.save(cut)
    resumed = train.Trainer(copy, phase, "cpu")
    checkpoint.load(resumed)
    assert resumed.progress.step == 2
    resumed.run(checkpoint)
    for a, b in zip(straight.weights.trainable(), resumed.weights.trainable(), strict=True):
        assert torch.equal(a, b)
    assert straight.progress.tokens == resumed.progress.tokens

    other = train.Checkpoint(copy, phase)
    other.key = "0" * 64
    with pytest.raises(ValueError, match="another recipe, other data or other code"):
        other.load(train.Trainer(copy, phase, "cpu"))


def test_a_broken_lineage_is_refused(copy):
    weights = copy.run_dir / "student" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match=f"found {sha256_file(weights)}.*lineage is broken"):
        train.train(copy, "distill", "cpu")
    with pytest.raises(ValueError, match="phase focused is not in phase_log"):
        train.train(copy, "polish", "cpu")


def test_learning_rate_rises_then_falls_to_its_share(copy):
    phase = copy.phase("polish").model_copy(update={"warmup_steps": 4, "lr": 1.0, "final_lr_share": 0.1})
    rates = [train.learning_rate(phase, step, 10) for step in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_ids_without_a_row_in_the_tokenizer_never_take_part(copy):
    """The table has 272 rows, 261 ids exist: a gradient for the others could only come from a softmax over them."""
    model = train.load_causal_lm(copy.run_dir / "student", torch.float32).train()
    batch = collate([row("x", [1, 2, 3], [4, 5, 6])])
    hidden = model.model(input_ids=batch.ids).last_hidden_state.flatten(0, 1)[batch.supervised]
    head = model.get_output_embeddings().weight[: copy.base.num_ids]
    distillation_loss(hidden, head, batch.targets, copy.phase("distill").loss, LossSums()).backward()
    gradient = model.get_output_embeddings().weight.grad
    assert gradient[: copy.base.num_ids].abs().max() > 0 and gradient[copy.base.num_ids :].abs().max() == 0


def test_a_dry_run_opens_nothing(copy, capsys, monkeypatch):
    monkeypatch.setattr(train, "load_causal_lm", None)
    assert train.main(["--recipe", "tiny", "--phase", "all", "--dry-run"]) == 0
    assert '"phase": "adapter"' in capsys.readouterr().out
    assert dataclasses.is_dataclass(train.Progress)
