"""Makes prompts/distill.addon.jsonl: authored synthetic prompts beside distill.data.

Drawn from the same families with another seed; no prompt of an earlier step is drawn again."""

from drafter.recipe import Recipe
from scripts._prompts import Against, run_script, train_step


def make(recipe: Recipe, dry_run: bool, against: Against | None) -> dict:
    return train_step(recipe, "distill.addon", dry_run, against)


def main(argv: list[str] | None = None) -> int:
    return run_script(make, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
