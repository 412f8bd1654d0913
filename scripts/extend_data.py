"""Makes prompts/expanded.data.jsonl: the corpora of the expanded phase, cleaned row by row.

A recipe that names no corpus with role expanded.data gets an empty file."""

from drafter.recipe import Recipe
from scripts._prompts import Against, run_script, train_step


def make(recipe: Recipe, dry_run: bool, against: Against | None) -> dict:
    return train_step(recipe, "expanded.data", dry_run, against)


def main(argv: list[str] | None = None) -> int:
    return run_script(make, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
