"""Tasks over real text (drafter/wheel_text.py): code, summarise, rewrite and extract prompts; each text is used once.

A task is a str.format template, {text} the function or the prose. The family of a row is "real-CATEGORY/TASK".
"""

import random
from collections.abc import Iterator, Mapping, Sequence

from drafter.corpus import Cleaner, prompt_row
from drafter.duplicates import NEAR_NGRAM, NearIndex, ngrams
from drafter.wheel_text import Text

# What of a function a task shows: the whole, `bare` without its docstring, `head` without its body.
FUNCTION_TASKS: tuple[tuple[str, str], ...] = (
    ("text", "Explain in a few sentences what this Python function does.\n\n{text}"),
    ("bare", "Write a docstring for this function.\n\n{text}"),
    ("head", "Complete this Python function. Return only the code.\n\n{text}"),
    ("bare", "What does the following code return? Name each case.\n\n```python\n{text}\n```"),
    ("text", "{text}\n\nWrite two short pytest tests for the function above."),
    ("bare", "Suggest a better name for this function and for its arguments, and say why.\n\n{text}"),
    ("text", "Review this function. Is there an input for which it fails?\n\n```python\n{text}\n```"),
    ("bare", "Add type hints to this function:\n\n{text}"),
    ("text", "Show with a short example how one calls this function.\n\n{text}"),
    ("bare", "Explain this code line by line to someone who learns Python.\n\n{text}"),
    ("bare", "{text}\n\nRewrite this function so that it is easier to read, without changing what it does."),
    ("head", "Here is the signature and the docstring of a function. Write its body.\n\n```python\n{text}\n```"),
)
PROSE_TASKS: dict[str, tuple[str, ...]] = {
    "summarise": (
        "Summarise this passage of a software manual in one sentence:\n\n{text}",
        "{text}\n\nTL;DR",
        "Give the main points of the text below as a short list.\n\n{text}",
        "What is this text about? Answer in at most fifteen words.\n\n{text}",
        "Write a heading for this section of a manual.\n\n{text}",
        "Summarise for someone who has never programmed:\n\n{text}",
        "{text}\n\nWhat is the most important thing to remember from this?",
        "Write a commit message for a change that adds the following documentation.\n\n{text}",
    ),
    "rewrite": (
        "Rewrite this documentation in plain English for a beginner:\n\n{text}",
        "Make the following text shorter without leaving anything out.\n\n{text}",
        "{text}\n\nRewrite the text above as a question and its answer.",
        "Rewrite in the second person, as advice to the reader:\n\n{text}",
        "Correct the grammar of this text where needed and improve its style.\n\n{text}",
        "Rewrite this as a numbered list of statements.\n\n{text}",
        "Rewrite the passage in a formal tone. Return only the new text.\n\n{text}",
        "Say the same in a friendly e-mail to a colleague.\n\n{text}",
    ),
    "extract": (
        "List the names of functions, classes and parameters in this text, one on each line:\n\n{text}",
        'Read the text and answer with JSON only, with the keys "subject", "purpose" and "warnings".\n\n{text}',
        "Copy the sentence that says what this is for, word for word.\n\n{text}",
        "{text}\n\nWhich conditions or exceptions does the text name? List them.",
        'Fill in this JSON from the text: {{"name": "", "does": "", "returns": ""}}\n\n{text}',
        "Pick the five most important words of the text. Separate them with commas.\n\n{text}",
        "Which values, numbers or defaults are given in this passage? If there are none, say so.\n\n{text}",
        "Turn the text into a table with the columns term and meaning.\n\n{text}",
    ),
}
CATEGORIES = ("code", *PROSE_TASKS)


def _ask(category: str, task: int, text: Text) -> str | None:
    """The prompt; None where the task shows a part that this function does not have."""
    if category != "code":
        return PROSE_TASKS[category][task].format(text=text.text)
    part, template = FUNCTION_TASKS[task]
    shown = getattr(text, part)
    return template.format(text=shown) if shown else None


def real_rows(
    sources: Mapping[str, Sequence[Text]], counts: Mapping[str, int], seed: int, cleaner: Cleaner
) -> Iterator[dict]:
    """Train rows of each category of `counts`; `sources` is {origin: its texts}. The tasks of a category take turns.

    A text that is near to one used before is passed over. ValueError where the texts do not suffice.
    """
    used = NearIndex()
    waiting: dict[str, list[tuple[str, Text]]] = {"function": [], "prose": []}
    for origin, texts in sources.items():
        for text in texts:
            waiting[text.kind].append((origin, text))
    for kind, pairs in waiting.items():
        random.Random(f"{seed}/{kind}").shuffle(pairs)
    for category, count in counts.items():
        pairs = waiting["function" if category == "code" else "prose"]
        tasks = len(FUNCTION_TASKS if category == "code" else PROSE_TASKS[category])
        made = 0
        while made < count:
            if not pairs:
                raise ValueError(f"only {made} of {count} {category} prompts from the texts; lower texts.counts")
            origin, text = pairs.pop()
            # A function without a docstring has no head to be completed: it goes to the next task.
            turn = next(task for task in range(made, made + tasks) if _ask(category, task % tasks, text)) % tasks
            grams = ngrams(text.text, NEAR_NGRAM)
            if used.is_near(grams):
                continue
            messages = cleaner([{"role": "user", "content": _ask(category, turn, text)}])
            if messages is None:
                continue
            used.add(grams)
            made += 1
            yield prompt_row(
                messages, source=origin, category=category, family=f"real-{category}/{turn:02d}", split="train"
            )
