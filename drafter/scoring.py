"""Score a drafter on stored answers of the teacher: one teacher-forced forward a row, no generation.

    scores = score_model(model, rows, num_ids=recipe.teacher.num_ids)      # one Score a row
    result = summarise("distill", rows, scores)                            # tau, curves, intervals, by category
    result.tau[16], result.record                                          # a number; the JSON row of a table

`rows` are teacher rows (drafter.teacher_data.TeacherRow): prompt_ids, continuation_ids, finish_reason, category,
family. What the bits mean is decided in drafter.acceptance, nowhere else.

Dims: B rows of a batch, T tokens, N continuation tokens of a row, D hidden, V existing ids, S supervised positions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drafter import acceptance
from drafter.acceptance import RoundCounts
from drafter.copy_policy import POLICY_NGRAM, CopyPolicy, NgramIndex
from drafter.decoding import top_logits
from drafter.draft_vocabulary import own_ids
from drafter.mixing import micro_batches, pad_rows

# For the estimates of --dry-run: 2 FLOPs a weight and token. Measured on two busy cores with the student of
# smollm2-quick (85 M weights, rows of 110 tokens, bf16): 460 tokens/s. An idle machine is two to four times as fast.
FORWARD_FLOPS_PER_S = 8e10

DRAFT_LENGTHS = (4, 8, 16)
NOVELTY = ("seen", "new_skeletons", "new_families")


@dataclass(frozen=True)
class Score:
    """One row scored. runs [N]: see drafter.acceptance. gaps [N]: top-2 logit gap of the drafter, where asked for.
    `copied`: how many of the N tokens a copy policy drafts without the model."""

    runs: np.ndarray
    gaps: np.ndarray | None = None
    copied: int = 0


# ---------------------------------------------------------------------------- the forward pass


def score_model(
    model: Any,
    rows: Sequence[Any],
    *,
    num_ids: int,
    batch_tokens: int = 4096,
    head_rows: int = 512,
    with_gaps: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Score]:
    """Is the argmax over existing ids the teacher's token, at each continuation position? One Score a row, in order.

    `model` is a transformers causal LM with `.model` (the body) and an output head; it is left in the mode (train
    or eval) it came in. `batch_tokens` bounds the padded tokens of a forward, `head_rows` the positions whose
    logits exist at one time: at V = 151,936 in bf16, 512 rows are 156 MB where a whole batch would be 1.2 GB.
    `progress` gets the number of rows of each batch. Raises ValueError for a row without prompt or continuation.
    """
    for index, row in enumerate(rows):
        if len(row.prompt_ids) == 0 or len(row.continuation_ids) == 0:
            raise ValueError(f"row {index} ({getattr(row, 'id', '?')}) has an empty prompt or continuation")
    scored: dict[int, Score] = {}  # by identity: batches are sorted by length
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():  # not inference mode: a module may keep a tensor from here for its next training step
            for batch in micro_batches(rows, batch_tokens):
                for row, score in zip(batch, _forward(model, batch, num_ids, head_rows, with_gaps), strict=True):
                    scored[id(row)] = score
                if progress is not None:
                    progress(len(batch))
    finally:
        model.train(was_training)
    return [scored[id(row)] for row in rows]


def _forward(model: Any, rows: Sequence[Any], num_ids: int, head_rows: int, with_gaps: bool) -> list[Score]:
    """The scores of one batch, in order."""
    device = next(model.parameters()).device
    ids, supervised, predicted = (torch.from_numpy(part).to(device) for part in pad_rows(rows))  # [B, T], [S], [S]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[supervised]  # [S, D]
    head = model.get_output_embeddings().weight[:num_ids]  # [V, D]
    right, gaps = [], []
    for chunk, target in zip(hidden.split(head_rows), predicted.split(head_rows), strict=True):
        values, best = top_logits(chunk, head, 2)  # ties are decided as the drafting loop decides them
        right.append(best[:, 0] == target)
        gaps.append(values[:, 0] - values[:, 1])
    sizes = [len(row.continuation_ids) for row in rows]
    bits = [part.numpy() for part in torch.cat(right).cpu().split(sizes)]
    between = [part.numpy() for part in torch.cat(gaps).cpu().split(sizes)] if with_gaps else [None] * len(rows)
    return [Score(acceptance.run_lengths(one), gap) for one, gap in zip(bits, between, strict=True)]


def score_forward(
    forward: Any,
    rows: Sequence[Any],
    *,
    draft_vocabulary: np.ndarray | None = None,
    copy_policy: CopyPolicy | None = None,
    with_gaps: bool = False,
    choices: list[tuple[list[int], list[float]]] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Score]:
    """The same bits from an engine's own forward pass (drafter.native, drafter.plain), row by row: what is served.

    With a draft vocabulary or a copy policy the bits are those of the ids chosen with it. Up to the first wrong one a
    draft's text is the stored text, and both depend on the text alone, so choosing on that is choosing as the engine
    does. `choices` collects what the model chose, with gaps.

    Raises ValueError for a row without prompt or continuation, or longer than the engine's positions.
    """
    longest = max((len(row.prompt_ids) + len(row.continuation_ids) for row in rows), default=1)
    if longest > forward.decoder.positions:
        raise ValueError(f"a row has {longest} tokens, more than the engine's {forward.decoder.positions} positions")
    cache, scores = forward.new_cache(1, longest), []
    for index, row in enumerate(rows):
        if len(row.prompt_ids) == 0 or len(row.continuation_ids) == 0:
            raise ValueError(f"row {index} ({getattr(row, 'id', '?')}) has an empty prompt or continuation")
        text = [*row.prompt_ids, *row.continuation_ids][:-1]  # the last token predicts nothing that is stored
        first, ids, gaps = len(row.prompt_ids) - 1, [], []
        own = None if draft_vocabulary is None else _own_ids(row, draft_vocabulary)
        for at in range(0, len(text), forward.max_tokens):
            piece = text[at : at + forward.max_tokens]
            wanted = list(range(max(0, first - at), len(piece)))
            competing = own and own[len(ids) : len(ids) + len(wanted)]
            places = ([0] * len(piece), list(range(at, at + len(piece))))
            choice = forward(cache, piece, *places, wanted, rows=draft_vocabulary, own=competing)
            ids += choice.ids
            gaps += choice.gaps
        if choices is not None:
            choices.append((list(ids), gaps))
        score = score_choices(row, ids, gaps, copy_policy)
        scores.append(score if with_gaps else dataclasses.replace(score, gaps=None))
        if progress is not None:
            progress(1)
    return scores


def score_choices(row: Any, ids: Sequence[int], gaps: Sequence[float], copy_policy: CopyPolicy | None = None) -> Score:
    """The score of what a model chose behind each beginning of the stored text, or of what the policy makes of it."""
    chosen, copied = list(ids), 0
    if copy_policy is not None:
        index = NgramIndex(row.prompt_ids, POLICY_NGRAM)
        for at, token in enumerate(row.continuation_ids):
            copied += copy_policy.sure(index) is not None
            chosen[at], _ = copy_policy.choose(index, chosen[at], gaps[at])
            index.extend([token])
    bits = np.array(chosen) == np.array(row.continuation_ids)
    return Score(acceptance.run_lengths(bits), np.array(gaps, np.float32), copied)


def _own_ids(row: Any, vocabulary: np.ndarray) -> list[np.ndarray]:
    """For each continuation token the ids of the text before it that are not in the vocabulary: int32 arrays [N]."""
    own, known, found = own_ids(row.prompt_ids, vocabulary), set(vocabulary.tolist()), []
    for token in row.continuation_ids:
        found.append(own)
        if token not in known and token not in own:
            own = np.append(own, np.int32(token))
    return found


def score_prompt_lookup(rows: Sequence[Any], max_k: int) -> list[Score]:
    """Prompt lookup drafted at every position. A draft for a smaller k is a beginning of it: one pass for all k."""
    scores = []
    for row in rows:
        index, runs = NgramIndex(row.prompt_ids), []
        for at, token in enumerate(row.continuation_ids):
            runs.append(acceptance.leading_matches(index.draft(max_k), row.continuation_ids[at : at + max_k]))
            index.extend([token])
        scores.append(Score(np.array(runs, dtype=np.int64)))
    return scores


# ---------------------------------------------------------------------------- numbers of a stage


@dataclass(frozen=True)
class StageResult:
    """Everything known of one stage. `record` is its row in a result file; `counts` allow paired comparisons."""

    stage: str
    agreement: float | None
    tau: dict[int, float | None]
    counts: dict[int, RoundCounts]
    record: dict[str, Any]


def novelty(family: str, train_families: frozenset[str] | set[str]) -> str:
    """ "FAMILY/SKELETON" against those of the training rows: `seen` the whole name occurs there, `new_skeletons`
    only FAMILY does, `new_families` neither."""
    if family in train_families:
        return "seen"
    known = {name.split("/", 1)[0] for name in train_families}
    return "new_skeletons" if family.split("/", 1)[0] in known else "new_families"


def summarise(
    stage: str,
    rows: Sequence[Any],
    scores: Sequence[Score],
    *,
    ks: Sequence[int] = DRAFT_LENGTHS,
    train_families: frozenset[str] | set[str] = frozenset(),
    resamples: int = 1000,
    layers: int | None = None,
    seconds: float | None = None,
) -> StageResult:
    """Pooled numbers, curves and intervals of one stage.

    The record holds tau for each k, and in full for the largest, here called 16: `tau16_interval`,
    `fixed_prefix_accepted16`, `by_category` {category: tau16}, the three novelty groups {group: tau16} (null where a
    group has no round), the curves by position, `copied_share` of the tokens (by a copy policy, without the model).
    `seconds` is the training time of the stage's phase. Raises ValueError without rows.
    """
    if not rows:
        raise ValueError(f"stage {stage!r}: no rows to score")
    runs, reasons = [score.runs for score in scores], [row.finish_reason for row in rows]
    counts = {k: RoundCounts.from_runs(runs, reasons, k) for k in ks}
    top = max(ks)
    right, positions = acceptance.agreement_counts(runs)
    fixed = acceptance.fixed_prefix_counts(runs, top)

    def tau_where(names: list[str], name: str) -> float | None:
        return _rounded(counts[top].tau(np.array(names) == name))

    categories = [row.category for row in rows]
    groups = [novelty(row.family, train_families) for row in rows]
    record = {
        "stage": stage,
        "agreement": _rounded(acceptance.ratio(right, positions)),
        "tau": {str(k): _rounded(counts[k].tau()) for k in ks},
        f"tau{top}_interval": _rounded(
            acceptance.interval(counts[top].emitted, counts[top].rounds, resamples=resamples)
        ),
        f"fixed_prefix_accepted{top}": _rounded(acceptance.ratio(*fixed)),
        "by_category": {name: tau_where(categories, name) for name in sorted(set(categories))},
        **{name: tau_where(groups, name) for name in NOVELTY},
        "copied_share": _rounded(acceptance.ratio(np.array([score.copied for score in scores]), positions)),
        "layers": layers,
        "seconds": seconds if seconds is None else round(seconds, 1),
        f"cumulative{top}": _rounded(counts[top].cumulative()),
        f"conditional{top}": _rounded(counts[top].conditional()),
        "rows": len(rows),
        "tokens": int(positions.sum()),
        f"rounds{top}": int(counts[top].rounds.sum()),
    }
    tau = {k: counts[k].tau() for k in ks}
    return StageResult(stage, acceptance.ratio(right, positions), tau, counts, record)


def evaluate_model(
    model: Any,
    rows: Sequence[Any],
    *,
    num_ids: int,
    stage: str = "model",
    ks: Sequence[int] = DRAFT_LENGTHS,
    batch_tokens: int = 4096,
    progress: Callable[[int], None] | None = None,
    **summary: Any,
) -> StageResult:
    """`score_model`, then `summarise` (which takes the remaining keywords): for the trainer."""
    scores = score_model(model, rows, num_ids=num_ids, batch_tokens=batch_tokens, progress=progress)
    layers = getattr(model.config, "num_hidden_layers", None)
    return summarise(stage, rows, scores, ks=ks, **{"layers": layers, **summary})


def evaluate_prompt_lookup(rows: Sequence[Any], *, ks: Sequence[int] = DRAFT_LENGTHS, **summary: Any) -> StageResult:
    """Prompt lookup on the same rows; its agreement is the share of positions whose first copied id is right."""
    scores = score_prompt_lookup(rows, max(ks))
    return summarise("prompt_lookup", rows, scores, ks=ks, **{"layers": 0, "seconds": 0.0, **summary})


# ---------------------------------------------------------------------------- parity with real drafts


def replay_parity(
    rows: Sequence[Any], scores: Sequence[Score], k: int, draft_batch: Callable[[list[list[int]]], list[list[int]]]
) -> dict[str, Any]:
    """Replay rows with real drafts and hold the rounds against those of the bits.

    A row is `equal` when all its rounds are; a `near_tie` when the first round that differs is equal by the near-tie
    rule, with the drafter's own top-2 gaps (Score.gaps; without them only equality counts); else `different`. Up to
    the first token judged differently both sides saw the same prefix, so nothing else may explain it.
    """
    replayed = acceptance.replay_rows(
        [(row.prompt_ids, row.continuation_ids, row.finish_reason) for row in rows], k, draft_batch
    )
    verdicts = {"equal": 0, "near_tie": 0, "different": 0}
    by_bits = [
        acceptance.rounds_from_runs(score.runs, row.finish_reason, k) for row, score in zip(rows, scores, strict=True)
    ]
    for ours, real, score in zip(by_bits, replayed, scores, strict=True):
        pairs = [(a, b) for a, b in zip(ours, real, strict=False) if a.accepted != b.accepted]
        if not pairs:
            assert len(ours) == len(real), "equal rounds cover equal text"
            verdicts["equal"] += 1
            continue
        # Each side's verdicts on the target's tokens from the round's start on: right, right, ..., wrong.
        verdict_lists = [[True] * one.accepted + [False] for one in pairs[0]]
        gaps = None if score.gaps is None else score.gaps[pairs[0][0].start :]
        tie = acceptance.near_tie_equal(*verdict_lists, gaps)
        verdicts["near_tie" if tie else "different"] += 1
    return {
        "k": k,
        "rows": len(rows),
        **verdicts,
        "tau_bits": _rounded(RoundCounts.of(by_bits, k).tau()),
        "tau_replay": _rounded(RoundCounts.of(replayed, k).tau()),
    }


def _rounded(value: Any, digits: int = 4) -> Any:
    """Numbers of a report, also in lists; None stays None."""
    if isinstance(value, list):
        return [_rounded(one, digits) for one in value]
    return value if value is None else round(value, digits)
