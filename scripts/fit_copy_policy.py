"""Fits the copy policy of a packed model: runs/RECIPE/copy_policy.json, which pack_model takes along.

    python -m scripts.fit_copy_policy --recipe smollm2-quick model
    python -m scripts.pack_model --recipe smollm2-quick             # the same archive with the policy in it
    python -m scripts.evaluate --recipe smollm2-quick --split selection --copy-policy both model

For each length of the copied suffix, on training rows: the limit of the model's logit gap below which copies were right
more often, or none where they are right more often than the model is on the whole: then they are drafted without it
(drafter/copy_policy.py). The file says `enabled` only when tau at the largest k rises on selection rows, of which the
fit has seen none; the last line tells tau without and with it. Decide here, report on development rows.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from drafter import acceptance
from drafter.console import progress_bar, run_command
from drafter.copy_policy import POLICY_NGRAM, CopyPolicy, NgramIndex
from drafter.engine import DraftEngine
from drafter.provenance import ROOT, relative, write_json
from drafter.recipe import TRAIN_POOLS, load_recipe
from drafter.scoring import Score, score_choices, score_forward
from drafter.teacher_data import read_shards, shard_paths
from model_io import load_model
from scripts.evaluate import split_rows, thin_out

TRAIN_ROWS = 600  # spread over all pools


def cases(rows, choices):
    """(suffix length, gap, copy right?, model right?) of every position that has a copy."""
    for row, (ids, gaps) in zip(rows, choices, strict=True):
        index = NgramIndex(row.prompt_ids, POLICY_NGRAM)
        for token, chosen, gap in zip(row.continuation_ids, ids, gaps, strict=True):
            if (found := index.candidate()) is not None:
                yield found[0], gap, found[1] == token, chosen == token
            index.extend([token])


def tau(rows, scores: list[Score], k: int) -> float:
    rounds = [
        acceptance.rounds_from_runs(one.runs, row.finish_reason, k) for one, row in zip(scores, rows, strict=True)
    ]
    return acceptance.RoundCounts.of(rounds, k).tau()


def fit(recipe, model_dir: Path) -> dict:
    """The report; writes the file. ValueError without the teacher's answers."""
    folder, k = recipe.cache_dir / "teacher", max(recipe.evaluation.draft_lengths)
    selection = split_rows(recipe, "selection")  # complains where there are no answers
    train = thin_out(read_shards([path for name in TRAIN_POOLS for path in shard_paths(folder, name)]), TRAIN_ROWS)
    engine = DraftEngine(load_model(model_dir, form="packed"))

    def choose(rows, what: str) -> list[tuple[list[int], list[float]]]:
        choices: list[tuple[list[int], list[float]]] = []
        with progress_bar(len(rows), what, "row") as bar:
            score_forward(
                engine.forward, rows, draft_vocabulary=engine.draft_vocabulary, choices=choices, progress=bar.update
            )
        return choices

    fitted = choose(train, "training rows")
    right = [np.array(ids) == row.continuation_ids for row, (ids, _) in zip(train, fitted, strict=True)]
    agreement = float(np.concatenate(right).mean())
    policy = CopyPolicy.fit(cases(train, fitted), agreement)
    judged = list(zip(selection, choose(selection, "selection"), strict=True))
    without = tau(selection, [score_choices(row, *choice) for row, choice in judged], k)
    scores = [score_choices(row, *choice, policy) for row, choice in judged]
    with_policy = tau(selection, scores, k)
    document = policy.document() if with_policy > without else {"enabled": False}
    write_json(path := recipe.run_dir / "copy_policy.json", document)
    limits = [None if limit is None else round(limit, 3) for limit in policy.document()["limits"]]
    return {
        "file": relative(path),
        "enabled": document["enabled"],
        "limits": limits,
        "k": k,
        "fitted_rows": len(train),
        "agreement": round(agreement, 4),
        "rows": len(selection),
        "tau_without": round(without, 4),
        "tau_with": round(with_policy, 4),
        "copied_share": round(sum(one.copied for one in scores) / sum(len(one.runs) for one in scores), 4),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=ROOT / "model", help="packed archive (default: model)")
    parser.add_argument("--recipe", required=True, help="a recipe of architecture.json, for example smollm2-quick")
    args = parser.parse_args(argv)
    return run_command(lambda: print(json.dumps(fit(load_recipe(args.recipe), args.model))))


if __name__ == "__main__":
    raise SystemExit(main())
