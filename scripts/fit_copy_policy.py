"""Fits the copy policy of a packed model on selection rows: runs/RECIPE/copy_policy.json, which pack_model takes along.

    python -m scripts.fit_copy_policy --recipe smollm2-quick model
    python -m scripts.pack_model --recipe smollm2-quick             # the same archive with the policy in it
    python -m scripts.evaluate --recipe smollm2-quick on=model      # --copy-policy off: without

For each length of the copied suffix the limit of the model's logit gap is found below which copies were right more
often (drafter/copy_policy.py). The file says `enabled` only when tau at the largest k rises on these rows; the last
line tells tau without and with it. Decide here, report on development rows.
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
from drafter.recipe import load_recipe
from drafter.scoring import Score, score_forward
from model_io import load_model
from scripts.evaluate import split_rows


def cases(rows, choices):
    """(suffix length, gap, copy right?, model right?) of every position where copy and model differ."""
    for row, (ids, gaps) in zip(rows, choices, strict=True):
        index = NgramIndex(row.prompt_ids, POLICY_NGRAM)
        for token, chosen, gap in zip(row.continuation_ids, ids, gaps, strict=True):
            found = index.candidate()
            if found is not None and found[1] != chosen:
                yield found[0], gap, found[1] == token, chosen == token
            index.extend([token])


def tau(rows, scores: list[Score], k: int) -> float:
    rounds = [
        acceptance.rounds_from_runs(one.runs, row.finish_reason, k) for one, row in zip(scores, rows, strict=True)
    ]
    return acceptance.RoundCounts.of(rounds, k).tau()


def fit(recipe, model_dir: Path) -> dict:
    rows, k = split_rows(recipe, "selection"), max(recipe.evaluation.draft_lengths)
    engine = DraftEngine(load_model(model_dir, form="packed"))
    choices: list[tuple[list[int], list[float]]] = []
    with progress_bar(len(rows), "selection", "row") as bar:
        before = score_forward(engine.forward, rows, with_gaps=True, choices=choices, progress=bar.update)
    policy = CopyPolicy.fit(cases(rows, choices))
    after = []
    for row, (ids, gaps) in zip(rows, choices, strict=True):
        index, bits = NgramIndex(row.prompt_ids, POLICY_NGRAM), []
        for token, chosen, gap in zip(row.continuation_ids, ids, gaps, strict=True):
            bits.append(policy.choose(index, chosen, gap)[0] == token)
            index.extend([token])
        after.append(Score(acceptance.run_lengths(np.array(bits))))
    without, with_policy = tau(rows, before, k), tau(rows, after, k)
    document = {"enabled": False}
    if with_policy > without:
        document = {"enabled": True, "limits": list(policy.limits)}
    write_json(path := recipe.run_dir / "copy_policy.json", document)
    limits = [round(limit, 3) for limit in policy.limits]
    return {
        "file": relative(path), **document, "limits": limits, "k": k, "rows": len(rows),
        "tau_without": round(without, 4), "tau_with": round(with_policy, 4),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=ROOT / "model", help="packed archive (default: model)")
    parser.add_argument("--recipe", required=True, help="a recipe of architecture.json, for example smollm2-quick")
    args = parser.parse_args(argv)
    return run_command(lambda: print(json.dumps(fit(load_recipe(args.recipe), args.model))))


if __name__ == "__main__":
    raise SystemExit(main())
