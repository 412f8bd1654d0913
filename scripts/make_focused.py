"""Makes prompts/focused.jsonl: transformations of the train prompts of distill.data, shares from data/SCHEMA.md alone.

A transformation either keeps a prompt as the task and adds a demand (a length, a format, a check), or quotes it as the
material of another task (rewrite it, translate it, go on with it, say in one line what it asks for, turn it into JSON).
The category is that of the new prompt. Its family is "focused-NAME/VARIANT", which no reserved prompt has.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drafter.corpus import Cleaner, duplicate_key, prompt_row, stream_prompts
from drafter.provenance import ROOT
from drafter.recipe import CATEGORIES, Recipe
from scripts._prompts import (
    FOCUSED_PROMPT_TOKENS,
    MEMORY_BYTES_PER_ROW,
    Against,
    Reserved,
    Step,
    earlier_files,
    estimate,
    new_cleaner,
    prompts_path,
    report,
    run_script,
    tokenizer_files,
)

TRIES_PER_ROW = 50  # sources tried for one row: the caps or the duplicate key may refuse some
# Sources held in memory, a seeded choice where there are more: at 2 kB a row 0.2 GB.
MAX_SOURCES = 100_000

# ---------------------------------------------------------------------------- transformations


@dataclass(frozen=True)
class Transformation:
    """`templates` are str.format texts with the slots of `slots`, {task}, {other} and {opening} (the task's first
    half); `accepts` are the categories of the source."""

    name: str
    category: str
    templates: tuple[str, ...]
    quotes: bool = False  # the source is material, not the task: its system text does not apply
    accepts: tuple[str, ...] = CATEGORIES


def slots(rng: random.Random) -> dict[str, str]:
    """A value for every slot besides {task} and {other}."""
    return {
        "words": str(rng.randrange(20, 101, 5)),
        "few": str(rng.randrange(2, 6)),
        "avoid": rng.choice(("very", "really", "just", "also", "important", "however", "thing", "good")),
        "tone": rng.choice(("formal", "friendly", "neutral", "enthusiastic", "matter-of-fact", "gentle")),
        "reader": rng.choice(("a child of ten", "a new colleague", "an expert", "a busy manager", "a tourist")),
        "language": rng.choice(("French", "German", "Spanish", "Portuguese", "Italian", "Dutch", "Turkish", "Hindi")),
    }


TRANSFORMATIONS = (
    Transformation(
        "length",
        "constraints",
        (
            "{task}\n\nKeep the answer under {words} words.",
            "Answer in no more than {words} words.\n\n{task}",
            "{task}\n\nUse exactly {few} sentences.",
            "In exactly {few} short sentences: {task}",
        ),
    ),
    Transformation(
        "layout",
        "constraints",
        (
            "{task}\n\nGive the answer as exactly {few} bullet points.",
            "{task}\n\nFormat the answer as a numbered list, one line for each point.",
            "{task}\n\nStart with the answer in capital letters, then explain it in normal text.",
            "{task}\n\nAnswer as a table in Markdown with two columns.",
        ),
    ),
    Transformation(
        "avoid",
        "constraints",
        (
            '{task}\n\nDo not use the word "{avoid}".',
            '{task}\n\nDo not use any lists, and never write "{avoid}".',
            "Write the answer for {reader}.\n\n{task}",
        ),
    ),
    Transformation(
        "formalise",
        "rewrite",
        (
            "Rewrite the following message in a {tone} tone. Return only the new text.\n\n{task}",
            "Make this request sound {tone} without changing what is asked:\n\n{task}",
            "Rewrite this for {reader}:\n\n{task}",
        ),
        quotes=True,
    ),
    Transformation(
        "shorten",
        "rewrite",
        (
            "Shorten this to one sentence and keep what is asked for:\n\n{task}",
            "Rewrite the text below with at most half as many words.\n\n{task}",
            "{task}\n\n---\nThe text above is too long. Write a shorter version of it.",
        ),
        quotes=True,
    ),
    Transformation(
        "gist",
        "summarise",
        (
            "In one sentence, say what this message asks for:\n\n{task}",
            "Summarise the following in at most {words} words:\n\n{task}",
            "Give a title of no more than six words to this text:\n\n{task}",
        ),
        quotes=True,
    ),
    Transformation(
        "gist-of-two",
        "summarise",
        (
            "Summarise these two messages together in {few} sentences.\n\nFirst: {task}\n\nSecond: {other}",
            "What do these two texts have in common? One sentence.\n\n1. {task}\n\n2. {other}",
        ),
        quotes=True,
    ),
    Transformation(
        "to-json",
        "extract",
        (
            'Turn the request below into a JSON object with the keys "topic", "task" and "constraints" (a list of '
            "strings). Return only the JSON.\n\n{task}",
            'Read the message and answer with JSON only: {{"summary": "...", "keywords": ["...", "..."]}}\n\n{task}',
            'Message:\n{task}\n\nWrite a JSON object with the keys "subject" and "wanted".',
        ),
        quotes=True,
    ),
    Transformation(
        "pick-out",
        "extract",
        (
            "List every number and every name in this text, one on each line:\n\n{task}",
            "Which {few} words of the text below matter most? Answer as a comma-separated list.\n\n{task}",
            "Copy the sentence of this message that says what is wanted, word for word.\n\n{task}",
        ),
        quotes=True,
    ),
    Transformation(
        "compare",
        "chat",
        (
            "Which of these two requests is harder, and why?\n\nA: {task}\n\nB: {other}",
            "Compare these two questions in {few} sentences.\n\n1. {task}\n\n2. {other}",
        ),
        quotes=True,
    ),
    Transformation(
        "plan",
        "chat",
        (
            "Someone sent me this. What should I ask them before I begin?\n\n{task}",
            "How would you go about the following? Give the steps only, not the result.\n\n{task}",
            "I have to explain this request to {reader}. What should I say?\n\n{task}",
        ),
        quotes=True,
    ),
    Transformation(
        "continue",
        "chat",
        (
            "Continue this text in the same style for {few} more sentences.\n\n{opening}",
            "Here is the beginning of a message. How might it go on?\n\n{opening}",
            "{opening}\n\nThe text above breaks off. Finish it.",
        ),
        quotes=True,
    ),
    Transformation(
        "show-steps",
        "math",
        (
            '{task}\n\nNumber the steps, and begin the last line with "Answer:".',
            "{task}\n\nThen check the result in a second way.",
            "Estimate the result first, then work it out exactly.\n\n{task}",
        ),
        accepts=("math",),
    ),
    Transformation(
        "explain-code",
        "code",
        (
            "{task}\n\nAfter the code, explain it in {few} sentences.",
            "{task}\n\nAlso write {few} short tests.",
            "{task}\n\nUse type hints and a docstring.",
        ),
        accepts=("code",),
    ),
    Transformation(
        "translate",
        "multilingual",
        (
            "Translate the following message into {language}. Return only the translation.\n\n{task}",
            "{task}\n\nAnswer in {language}.",
        ),
        quotes=True,
    ),
)


def transform(transformation: Transformation, rng: random.Random, source: dict, other: dict) -> tuple[list[dict], str]:
    """-> (messages, family) of a new prompt made from the train rows `source` and, where it compares, `other`."""
    variant = rng.randrange(len(transformation.templates))
    task, second = source["messages"][-1]["content"], other["messages"][-1]["content"]
    opening = " ".join(task.split(" ")[: (task.count(" ") + 2) // 2])
    text = transformation.templates[variant].format(task=task, other=second, opening=opening, **slots(rng))
    system = [] if transformation.quotes else [turn for turn in source["messages"] if turn["role"] == "system"]
    return [*system, {"role": "user", "content": text}], f"focused-{transformation.name}/{variant:02d}"


# ---------------------------------------------------------------------------- shares


def declared_shares(schema: Path = ROOT / "data" / "SCHEMA.md") -> dict[str, float]:
    """{category: weight} of the table in data/SCHEMA.md whose heading is `category | weight in focused`."""
    lines = iter(schema.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith("| category | weight in focused |"):
            break
    next(lines)  # the ruler
    cells = [line.strip("| ").split("|") for line in itertools.takewhile(lambda line: line.startswith("|"), lines)]
    shares = {name.strip(" `"): float(weight) for name, weight, *_ in cells}
    assert set(shares) == set(CATEGORIES), f"{schema} must give each category one weight"
    return shares


def parts(total: int, weights: list[float]) -> list[int]:
    """`total` in whole numbers as near to the weights as can be, the largest remainders rounded up."""
    exact = [total * weight / sum(weights) for weight in weights]
    whole = [int(one) for one in exact]
    for at in sorted(range(len(exact)), key=lambda at: whole[at] - exact[at])[: total - sum(whole)]:
        whole[at] += 1
    return whole


def targets(recipe: Recipe) -> list[str]:
    """The categories of the recipe's own prompts, in the order of CATEGORIES: what focused is spread over."""
    own = {entry.category for entry in recipe.synthetic} | {corpus.category for corpus in recipe.corpora}
    return [category for category in CATEGORIES if category in own]


def possible(categories: list[str], sources: list[dict]) -> list[str]:
    """Those that some transformation can make from the categories of the sources."""
    have = {row["category"] for row in sources}
    makes = {rule.category for rule in TRANSFORMATIONS if have & set(rule.accepts)}
    return [category for category in categories if category in makes]


def category_rows(category: str, count: int, seed: int, sources: list[dict], cleaner: Cleaner) -> Iterator[dict]:
    """`count` rows of one category: its transformations take turns over the sources in a seeded order."""
    rng = random.Random(f"{seed}/{category}")
    rules = [rule for rule in TRANSFORMATIONS if rule.category == category]
    orders = {}
    for rule in rules:
        accepted = [row for row in sources if row["category"] in rule.accepts]
        rng.shuffle(accepted)
        orders[rule.name] = itertools.cycle(accepted) if accepted else None
    turns = itertools.cycle([rule for rule in rules if orders[rule.name] is not None])
    made = 0
    for _ in range(count * TRIES_PER_ROW):
        if made == count:
            return
        rule = next(turns)
        source, other = next(orders[rule.name]), rng.choice(sources)
        text, family = transform(rule, rng, source, other)
        messages = cleaner(text)
        if messages is not None:
            made += 1
            yield prompt_row(messages, source=source["source"], category=category, family=family, split="train")
    if made < count:
        raise ValueError(f"only {made} of {count} focused {category} prompts pass the caps; lower focused.count")


def read_sources(path: Path, seed: int) -> list[dict]:
    """The rows of distill.data, or a seeded choice of MAX_SOURCES of them, in the order of the file."""
    total = sum(1 for _ in stream_prompts(path))
    chosen = set(random.Random(f"{seed}/sources").sample(range(total), min(total, MAX_SOURCES)))
    return [row for number, row in enumerate(stream_prompts(path)) if number in chosen]


def make(recipe: Recipe, dry_run: bool, against: Against | None) -> dict:
    count, categories = recipe.focused.count, targets(recipe)
    summary = {"step": "make_focused", "recipe": recipe.name}
    if dry_run:
        print(f"focused.jsonl: {count} prompts in {len(categories)} categories, from distill.data.jsonl")
        print(f"  at most {MAX_SOURCES} sources of distill.data at {MEMORY_BYTES_PER_ROW} bytes stay in memory")
        return {**summary, "dry_run": True, "files": ["focused.jsonl"], **estimate(count, FOCUSED_PROMPT_TOKENS)}

    reserved, earlier, shares = Reserved(recipe), earlier_files(recipe, "focused"), declared_shares()
    parameters = {
        "focused": recipe.focused.model_dump(mode="json"),
        "weights": [shares[category] for category in categories],
        "categories": categories,
        "caps": recipe.caps.model_dump(mode="json"),
        "thinking": recipe.chat.thinking,
    }
    inputs = [reserved.path, *earlier, *tokenizer_files(recipe)]
    step = Step(recipe, "focused", parameters, inputs, against)
    if manifest := step.current():
        return {**summary, **report(manifest, True)}

    cleaner = new_cleaner(recipe, against)
    reserved.hold_back(cleaner)
    for path in earlier:
        cleaner.seen |= {duplicate_key(row["messages"]) for row in stream_prompts(path)}
    sources = read_sources(prompts_path(recipe, "distill.data"), recipe.focused.seed)
    made = possible(categories, sources)
    if not made:
        raise ValueError(f"distill.data.jsonl holds no prompt to transform into {', '.join(categories)}")
    if skipped := [category for category in categories if category not in made]:
        print(f"no prompt of distill.data can become: {', '.join(skipped)}; the others share their part")
    rows = itertools.chain.from_iterable(
        category_rows(category, part, recipe.focused.seed, sources, cleaner)
        for category, part in zip(made, parts(count, [shares[category] for category in made]), strict=True)
    )
    manifest = step.write(rows, cleaner.counters.as_dict)
    return {**summary, **report(manifest, False)}


def main(argv: list[str] | None = None) -> int:
    return run_script(make, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
