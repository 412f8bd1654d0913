"""Makes prompts/distill.data.jsonl: the main prompts of the distill phase.

Corpora with role distill.data are cleaned row by row (drafter/corpus.py); recipes without corpora draw authored
synthetic prompts. Reserved skeletons, families and prompts stay out: run prepare_selection first."""

from drafter.recipe import Recipe
from scripts._prompts import Against, run_script, train_step


def make(recipe: Recipe, dry_run: bool, against: Against | None) -> dict:
    return train_step(recipe, "distill.data", dry_run, against)


def main(argv: list[str] | None = None) -> int:
    return run_script(make, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
