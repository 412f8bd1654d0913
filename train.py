"""One training loop for every phase: distill, expanded, focused, polish, qat, adapter.

    python train.py --recipe smollm2-quick --phase distill
    python train.py --recipe smollm2-quick --phase all          # every phase that phase_log does not hold yet
    python train.py --recipe smollm2-quick --phase all --dry-run
    python train.py --recipe smollm2-quick --phase polish --resume   # after a run that was cut off

Each phase starts from the weights of the one before it and has its data mix, loss and schedule in the recipe.
The teacher does not run: its top-K log-probabilities come from the shards (generate_teacher). Losses are summed
over the supervised positions of a whole optimizer step and divided by their number, so that a gradient does not
depend on how the step is cut into micro-batches.

qat      fake-quantizes what the packer will quantize, by the packer's own functions; its scales go to the packer
adapter  trains rank-r side paths beside the frozen packed base (made here with pack_model --base when missing)

A finished phase writes runs/RECIPE/PHASE/ and appends to phase_log in runs/RECIPE/architecture.json: command,
commit, versions, machine, data, steps, tokens, losses, tau before and after, hours, and `parent_sha256`.

Dims: B rows, T tokens, N supervised positions, D hidden, V existing ids.
"""

import argparse
import dataclasses
import json
import math
import shutil
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafter import estimate as gpu_estimate
from drafter.adapter import Adapter
from drafter.chat import copy_tokenizer
from drafter.checkpoint import Checkpoint as WeightsFile
from drafter.checkpoint import checked_weights
from drafter.console import progress_bar, run_command
from drafter.decoding import load_causal_lm, neutral_generation_config
from drafter.losses import LossSums, distillation_loss
from drafter.memory import give_back
from drafter.mixing import collate, micro_batches, plan_steps, row_tokens
from drafter.provenance import code_hash, run_record, sha256_file, sha256_json
from drafter.recipe import PHASES, TRAIN_POOLS, Phase, Recipe, RunDocument, load_recipe, recipe_names
from drafter.scoring import StageResult, evaluate_model
from drafter.teacher_data import TeacherRow, check_settings, read_shards, shard_paths
from drafter.weights import AdapterWeights, MasterWeights, compute_dtype

# ---------------------------------------------------------------------------- data


def read_pool(recipe: Recipe, name: str) -> list[TeacherRow]:
    """Rows of one pool. ValueError when they are missing, made with other settings, or of another split."""
    paths = shard_paths(recipe.cache_dir / "teacher", name)
    if not paths:
        raise ValueError(f"no teacher shards of {name}: python -m scripts.generate_teacher --recipe {recipe.name}")
    check_settings(recipe, paths[0])
    rows = read_shards(paths)
    split = "train" if name in TRAIN_POOLS else name
    foreign = next((row for row in rows if row.split != split), None)
    if foreign is not None:
        raise ValueError(f"{name} holds row {foreign.id} of the {foreign.split} split, expected {split}")
    return rows


def data_manifest(recipe: Recipe, phase: Phase) -> dict[str, str]:
    """{shard: sha256} of everything the phase trains on."""
    folder = recipe.cache_dir / "teacher"
    return {path.name: sha256_file(path) for pool in sorted(phase.mix) for path in shard_paths(folder, pool)}


# ---------------------------------------------------------------------------- where a phase starts


def parent_folder(recipe: Recipe, phase: Phase) -> Path:
    at = PHASES.index(phase.name)
    return recipe.run_dir / (PHASES[at - 1] if at else "student")


@dataclasses.dataclass
class Opened:
    model: torch.nn.Module  # in compute dtype
    weights: MasterWeights | AdapterWeights
    adapter: Adapter | None = None
    base_sha256: str | None = None  # of the packed base that the adapter belongs to


def open_model(recipe: Recipe, phase: Phase, device: str) -> Opened:
    """The model that a phase trains: its parent's weights, or the frozen packed base with a new adapter."""
    dtype = compute_dtype(getattr(torch, recipe.trainer.dtype), device)
    if phase.name == "adapter":
        from model_io import load_base
        from scripts.pack_model import pack_base_of_run

        base = load_base(pack_base_of_run(recipe), dtype=dtype)
        model = base.model.to(device).train()
        adapter = Adapter.create(model, recipe.adapter.rank, recipe.adapter.alpha, recipe.adapter.seed)
        adapter.attach(model)
        return Opened(model, AdapterWeights(adapter.parameters()), adapter, base.base_sha256)
    folder = parent_folder(recipe, phase)
    model = load_causal_lm(folder, dtype, device, stop_ids=recipe.base.stop_ids).train()
    double_quant = recipe.packing.double_quant
    return Opened(model, MasterWeights(model, quantize=phase.name == "qat", double_quant=double_quant))


# ---------------------------------------------------------------------------- the loop


def learning_rate(phase: Phase, step: int, steps: int) -> float:
    """Rises linearly over warmup_steps, then falls linearly to final_lr_share of `lr` at the last step."""
    if step < phase.warmup_steps:
        return phase.lr * (step + 1) / phase.warmup_steps
    done = (step - phase.warmup_steps) / max(1, steps - 1 - phase.warmup_steps)
    return phase.lr * (1 - (1 - phase.final_lr_share) * min(1.0, done))


@dataclasses.dataclass
class Progress:
    """What a resumed run must know beside the weights; everything else follows from the recipe and the step."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None


class Trainer:
    """One phase: plan, weights, optimizer, and the loop over them."""

    def __init__(self, recipe: Recipe, phase: Phase, device: str):
        self.recipe, self.phase, self.device = recipe, phase, device
        self.pools = {name: read_pool(recipe, name) for name in sorted(phase.mix)}
        self.plan = plan_steps(
            self.pools, phase.mix, tokens=phase.tokens, tokens_per_step=phase.tokens_per_step, seed=phase.seed
        )
        opened = open_model(recipe, phase, device)
        self.model, self.weights = opened.model, opened.weights
        self.adapter, self.base_sha256 = opened.adapter, opened.base_sha256
        self.dtype = str(self.model.dtype).removeprefix("torch.")
        matrices = [p for p in self.weights.trainable() if p.dim() > 1]
        vectors = [p for p in self.weights.trainable() if p.dim() <= 1]  # norms and biases are not decayed
        groups = [{"params": matrices, "weight_decay": recipe.trainer.weight_decay}]
        groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []
        self.optimizer = torch.optim.AdamW(groups, lr=phase.lr, betas=recipe.trainer.betas, fused=True)
        self.progress = Progress()
        if phase.name == "qat":
            self.weights.search_scales()
        self.weights.publish()

    @property
    def head(self) -> torch.Tensor:
        """[V, D]: the rows of ids that exist."""
        return self.model.get_output_embeddings().weight[: self.recipe.base.num_ids]

    def step(self, rows: list[TeacherRow]) -> LossSums:
        """Forward, backward and update over one optimizer step's rows."""
        trainer, number = self.recipe.trainer, self.progress.step
        positions = sum(len(row.continuation_ids) for row in rows)
        sums = LossSums()
        for micro in micro_batches(rows, trainer.micro_batch_tokens):
            batch = collate(micro, self.device)
            hidden = self.model.model(input_ids=batch.ids, use_cache=False).last_hidden_state  # [B, T, D]
            supervised = hidden.flatten(0, 1)[batch.supervised]  # [N, D]
            loss = distillation_loss(supervised, self.head, batch.targets, self.phase.loss, sums)
            (loss / positions).backward()
            self.weights.collect()
            self.progress.tokens += batch.tokens
        torch.nn.utils.clip_grad_norm_(self.weights.trainable(), trainer.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.phase, number, len(self.plan))
        self.optimizer.step()
        # Kept, not freed: 350 MB of fresh gradients a step cost more in page faults than zeroing them.
        self.optimizer.zero_grad(set_to_none=False)
        if self.phase.name == "qat" and (number + 1) % trainer.scale_search_every == 0:
            self.weights.search_scales()
        self.weights.publish()
        self.progress.step += 1
        return sums

    def run(self, checkpoint: "Checkpoint") -> LossSums:
        """All remaining steps; returns the sums of the last tenth (what the log calls the last loss)."""
        planned = sum(row_tokens(row) for step in self.plan for row in step)
        tail, tail_from = LossSums(), len(self.plan) - max(1, len(self.plan) // 10)
        started_s = saved_s = time.perf_counter()
        before_s = self.progress.elapsed_s
        with progress_bar(planned, self.phase.name, "tok", unit_scale=True, initial=self.progress.tokens) as bar:
            while self.progress.step < len(self.plan):
                seen = self.progress.tokens
                sums = self.step(self.plan[self.progress.step])
                loss = sums.total(self.phase.loss)
                if not math.isfinite(loss):
                    raise ValueError(f"{self.phase.name}: the loss is {loss} at step {self.progress.step}; lower lr")
                if self.progress.first_loss is None:
                    self.progress.first_loss = loss
                self.progress.last_loss = loss
                if self.progress.step > tail_from:
                    tail += sums
                now_s = time.perf_counter()
                self.progress.elapsed_s = before_s + now_s - started_s
                bar.update(self.progress.tokens - seen)
                bar.set_postfix_str(f"loss {loss:.3f}, agreement {sums.agreements / sums.positions:.3f}", refresh=False)
                if now_s - saved_s > self.recipe.trainer.checkpoint_every_s and self.progress.step < len(self.plan):
                    checkpoint.save(self)
                    saved_s = time.perf_counter()
        return tail


# ---------------------------------------------------------------------------- checkpoints


class Checkpoint:
    """runs/RECIPE/PHASE.partial/: masters, optimizer moments, scales and progress of a phase that is under way.

    Written to a temporary file and renamed; the key names recipe, phase, data and the code that plans and steps,
    and a resume with another key is refused.
    """

    def __init__(self, recipe: Recipe, phase: Phase):
        self.path = recipe.run_dir / f"{phase.name}.partial" / "state.safetensors"
        settings = {
            "recipe": recipe.document(), "phase": phase.name, "data": data_manifest(recipe, phase),
            "code": code_hash("train.py", "drafter/mixing.py", "drafter/losses.py", "drafter/weights.py"),
        }  # fmt: skip
        self.key = sha256_json(settings)

    def save(self, trainer: Trainer) -> None:
        tensors = {}
        for number, parameter in enumerate(trainer.weights.trainable()):
            state = trainer.optimizer.state[parameter]
            tensors[f"{number}.weight"] = parameter.detach()
            tensors[f"{number}.exp_avg"], tensors[f"{number}.exp_avg_sq"] = state["exp_avg"], state["exp_avg_sq"]
        tensors |= {f"scales.{name}": value for name, value in trainer.weights.scales.items()}
        metadata = {"key": self.key, "progress": json.dumps(dataclasses.asdict(trainer.progress))}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        save_file(tensors, temporary, metadata)
        temporary.rename(self.path)

    def load(self, trainer: Trainer) -> None:
        """Put a trainer where the saved one was. ValueError when there is nothing to resume or it is another run's."""
        if not self.path.exists():
            raise ValueError(f"nothing to resume: {self.path} does not exist. Start the phase without --resume.")
        with safe_open(self.path, framework="pt") as file:
            metadata = file.metadata()
        if metadata["key"] != self.key:
            raise ValueError(
                f"{self.path} was made with another recipe, other data or other code; "
                f"remove {self.path.parent.name}/ to start the phase anew"
            )
        tensors = load_file(self.path, device=trainer.device)
        trainer.progress = Progress(**json.loads(metadata["progress"]))
        for number, parameter in enumerate(trainer.weights.trainable()):
            parameter.data.copy_(tensors[f"{number}.weight"])
            trainer.optimizer.state[parameter] = {
                "step": torch.tensor(float(trainer.progress.step), device=parameter.device),
                "exp_avg": tensors[f"{number}.exp_avg"],
                "exp_avg_sq": tensors[f"{number}.exp_avg_sq"],
            }
        for name in list(trainer.weights.scales):
            trainer.weights.scales[name] = tensors[f"scales.{name}"]
        trainer.weights.publish()

    def remove(self) -> None:
        shutil.rmtree(self.path.parent, ignore_errors=True)


def save_phase(trainer: Trainer) -> Path:
    """runs/RECIPE/PHASE/, whole or not at all: a plain checkpoint, or the adapter.

    qat keeps its fp32 masters and the scales it trained with, so that the packer finds the very codes that the
    last step computed with; the others keep the weights in the dtype of the recipe.
    """
    recipe, phase = trainer.recipe, trainer.phase
    folder = recipe.run_dir / phase.name
    with tempfile.TemporaryDirectory(dir=recipe.run_dir, prefix=f".{phase.name}.") as temporary:
        made = Path(temporary) / phase.name
        made.mkdir()
        if trainer.adapter is not None:
            trainer.adapter.save(made, base_sha256=trainer.base_sha256)
        else:
            trainer.model.generation_config = neutral_generation_config(recipe.base.stop_ids)
            if phase.name == "qat":
                trainer.model.config.dtype = torch.float32
                trainer.model.config.save_pretrained(made)
                tensors = {name: master.detach() for name, master in trainer.weights.masters.items()}
                save_file(tensors, made / "model.safetensors", {"format": "pt"})
                save_file(trainer.weights.scales, made / "nf4_scales.safetensors")
            else:
                trainer.model.to(getattr(torch, recipe.trainer.dtype)).save_pretrained(made)
            copy_tokenizer(recipe.run_dir / "student", made)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    return folder


# ---------------------------------------------------------------------------- one phase


def selection_score(trainer: Trainer, rows: list[TeacherRow], stage: str) -> StageResult:
    recipe = trainer.recipe
    return evaluate_model(
        trainer.model, rows, num_ids=recipe.base.num_ids, stage=stage, ks=recipe.evaluation.draft_lengths,
        batch_tokens=recipe.evaluation.batch_tokens, resamples=recipe.evaluation.bootstrap_resamples,
    )  # fmt: skip


def brief(result: StageResult) -> dict:
    return {"agreement": result.record["agreement"], "tau": result.record["tau"]}


def train_phase(run: RunDocument, phase: Phase, device: str, resume: bool) -> dict:
    """Train one phase to its end and append it to phase_log; returns the log entry."""
    recipe = run.recipe
    parent_sha256 = checked_weights(recipe.run_dir, run.phase_log, parent_folder(recipe, phase).name)
    torch.manual_seed(phase.seed)
    selection = read_pool(recipe, "selection")
    trainer, checkpoint = Trainer(recipe, phase, device), Checkpoint(recipe, phase)
    steps, rows = len(trainer.plan), sum(map(len, trainer.plan))
    print(
        f"{phase.name}: {steps} steps of at least {phase.tokens_per_step:,} tokens, {rows:,} rows from "
        f"{', '.join(f'{name} {weight:g}' for name, weight in phase.mix.items())}; {device}, {trainer.dtype}",
        flush=True,
    )
    previous = run.finished(parent_folder(recipe, phase).name) or {}
    # qat and adapter start from quantized weights, so their first score is not the one the parent ended with.
    known = previous.get("selection_after") if phase.name not in ("qat", "adapter") else None
    before = known or brief(selection_score(trainer, selection, phase.name))
    if resume:
        checkpoint.load(trainer)
    started_at = trainer.progress.tokens
    tail = trainer.run(checkpoint)
    after = brief(selection_score(trainer, selection, phase.name))
    folder = save_phase(trainer)
    weights_file = folder / ("adapter.safetensors" if trainer.adapter is not None else "model.safetensors")
    progress, manifest = trainer.progress, data_manifest(recipe, phase)
    supervised = sum(len(row.continuation_ids) for step in trainer.plan for row in step)
    entry = {
        "phase": phase.name, **run_record(),
        "parent_sha256": parent_sha256, "checkpoint_sha256": sha256_file(weights_file),
        **({"scales_sha256": sha256_file(folder / "nf4_scales.safetensors")} if phase.name == "qat" else {}),
        **({"base_sha256": trainer.base_sha256} if trainer.adapter is not None else {}),
        "data_sha256": sha256_json(manifest), "data": manifest,
        "steps": steps, "rows": rows, "tokens": progress.tokens, "supervised_tokens": supervised,
        "resumed": started_at > 0, "elapsed_s": round(progress.elapsed_s, 1),
        "tokens_per_s": round(progress.tokens / progress.elapsed_s, 1),
        "supervised_tokens_per_s": round(supervised / progress.elapsed_s, 1),
        "first_loss": round(progress.first_loss, 4), "last_loss": round(tail.total(phase.loss), 4),
        "selection_before": before, "selection_after": after,
        "cost": {
            "device": device, "dtype": trainer.dtype,
            "hours": round(progress.elapsed_s / 3600, 4), "tokens": progress.tokens,
        },
    }  # fmt: skip
    run.append(entry)
    checkpoint.remove()
    tau = " / ".join(f"{after['tau'][str(k)]:.2f}" for k in recipe.evaluation.draft_lengths)
    print(
        f"{phase.name}: loss {entry['first_loss']:.3f} -> {entry['last_loss']:.3f}, selection agreement "
        f"{before['agreement']:.3f} -> {after['agreement']:.3f}, tau {tau}, {entry['tokens_per_s']:.0f} tokens/s",
        flush=True,
    )
    return entry


def train(recipe: Recipe, phase_name: str, device: str = "auto", resume: bool = False) -> list[dict]:
    """The phase, or with "all" every phase that phase_log does not hold yet. Returns the new log entries."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    run = RunDocument.open(recipe)
    if phase_name != "all" and run.finished(phase_name):
        raise ValueError(f"phase {phase_name} is finished already; move runs/{recipe.name} away to train anew")
    entries = []
    for phase in recipe.phases:
        if phase_name not in ("all", phase.name) or run.finished(phase.name):
            continue
        partial = recipe.run_dir / f"{phase.name}.partial" / "state.safetensors"
        entries.append(train_phase(run, phase, device, resume and (phase_name != "all" or partial.exists())))
        give_back()  # the next phase needs the memory of this one's model and optimizer
    return entries


# ---------------------------------------------------------------------------- dry run, command line


def estimate(recipe: Recipe, phase: Phase) -> dict:
    """Steps, tokens and memory of a phase, from the declaration and the base's config where it is on disk."""
    report = {"phase": phase.name, "tokens": phase.tokens, "steps_at_most": -(-phase.tokens // phase.tokens_per_step)}
    student = recipe.run_dir / "student"
    if (student / "model.safetensors").exists():
        checkpoint = WeightsFile(student)
        parameters = sum(math.prod(checkpoint.shape(name)) for name in checkpoint)
        trained = parameters if phase.name != "adapter" else 0
        # compute weights and gradients (2 bytes each), fp32 master, gradient and two moments (4 each)
        report["weights_memory_bytes"] = parameters * 2 + trained * (2 + 16)
        # 6 FLOPs a parameter and token; 2 cores reach about 0.6 TFLOP/s in bf16 with everything around the GEMMs
        report["hours_on_2_cores"] = round(6 * parameters * phase.tokens / 0.6e12 / 3600, 2)
    return {**report, "gpu": gpu_estimate.phase(recipe, phase)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, choices=recipe_names(), help="recipe of architecture.json")
    parser.add_argument("--phase", required=True, choices=(*PHASES, "all"), help="one phase, or all that are not done")
    parser.add_argument("--device", default="auto", help="auto (a GPU where there is one), cpu, cuda or cuda:N")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint of a run that was cut off"
    )
    parser.add_argument("--dry-run", action="store_true", help="steps, tokens, memory and hours; nothing is trained")
    arguments = parser.parse_args(argv)
    return run_command(lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe)
    if arguments.dry_run:
        chosen = [phase for phase in recipe.phases if arguments.phase in ("all", phase.name)]
        report = {"dry_run": True, "phases": [estimate(recipe, phase) for phase in chosen]}
        for phase in report["phases"]:
            print(f"{phase['phase']}: {phase['tokens']:,} ids, at most {phase['steps_at_most']} steps")
            gpu_estimate.print_lines(phase["gpu"])
    else:
        entries = train(recipe, arguments.phase, arguments.device, arguments.resume)
        keys = ("phase", "steps", "tokens", "elapsed_s", "last_loss", "selection_after", "checkpoint_sha256")
        report = {"phases": [{key: entry[key] for key in keys} for entry in entries]}
    print(json.dumps({"step": "train", "recipe": recipe.name, **report}))


if __name__ == "__main__":
    raise SystemExit(main())
