"""The corpora of a recipe as prompt rows: streamed file by file, clustered once, estimated for --dry-run.

`survey` reads all of them in one pass, before anything is reserved or drawn. It finds the clusters of rows that are
near to each other (drafter/duplicates.py). The first row of a cluster stands for it: selection, development and final
take whole clusters, by that row, and the train steps drop every other row of every cluster.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from drafter.console import progress_bar
from drafter.corpus import Cleaner, clean_messages, conversation_of, prompt_id, prompt_row, read_parquet
from drafter.duplicates import NEAR_NGRAM, Signatures, ngrams, user_text
from drafter.recipe import CATEGORIES, Corpus, Recipe
from scripts.download_data import corpus_path, fault_of, wanted_files

# Measured on one core: 0.07 ms a row of GSM8K (235 characters) with reading, 0.36 ms a row of 1,900 characters without.
# In memory: 174 bytes for signature and clusters, 9 for id and category, 100 for the exact key.
SURVEY_SECONDS_PER_ROW, SURVEY_BYTES_PER_ROW = 0.0004, 290


def short_id(row_id: str) -> int:
    """The first 64 bits of a prompt id: what lists of a million ids are kept as."""
    return int(row_id[:16], 16)


# ---------------------------------------------------------------------------- rows


def corpora_of(recipe: Recipe, role: str) -> list[Corpus]:
    return [corpus for corpus in recipe.corpora if corpus.role == role]


def verified_files(recipe: Recipe, corpora: list[Corpus]) -> list[Path]:
    """Local paths of the corpora's files, each with the sha256 that is pinned or locked; ValueError otherwise."""
    for corpus in corpora:
        if corpus.category not in CATEGORIES:
            raise ValueError(f"corpora: {corpus.repo} needs `category`, one of {', '.join(CATEGORIES)}")
    files = wanted_files(recipe, corpora)
    for file in files:
        if fault := fault_of(file):
            raise ValueError(f"{file.label}: {fault}; run: python -m scripts.download_data --recipe {recipe.name}")
    return [file.path for file in files]


def _conversations(recipe: Recipe, corpus: Corpus) -> Iterator[tuple[str, object]]:
    """(family, raw conversation) of every record: the family is CORPUS/SUBSET."""
    for name in corpus.files:
        subset = Path(name).parts[-2] if len(Path(name).parts) > 1 else "data"
        family = f"{corpus.repo.rpartition('/')[2]}/{subset}"
        for record in read_parquet(corpus_path(recipe, corpus, name), list(corpus.columns.values())):
            yield family, conversation_of(record, corpus.columns)


def corpus_rows(recipe: Recipe, corpus: Corpus, cleaner: Cleaner) -> Iterator[dict]:
    """Train rows of one corpus, at most `max_rows`, streamed file by file."""
    made = 0
    for family, conversation in _conversations(recipe, corpus):
        messages = cleaner(conversation)
        if messages is None:
            continue
        yield prompt_row(messages, source=corpus.repo, category=corpus.category, family=family, split="train")
        made += 1
        if made == corpus.max_rows:
            return


# ---------------------------------------------------------------------------- near-duplicates


@dataclass(frozen=True)
class Survey:
    """What one pass over all corpora tells; rows are named by `short_id`."""

    counters: dict
    heads: dict[str, list[int]]  # category -> the first row of each cluster, in the order of the files
    near_duplicates: list[int]  # all rows that are not the first of their cluster


def survey(recipe: Recipe) -> Survey:
    """Cleans, exactly de-duplicates and clusters all rows of all corpora, in at most 300 bytes a row.

    Tokens are not counted here: a row that is over the cap is dropped by the step that would use it.
    """
    cleaner = Cleaner(
        history=recipe.history, max_chars=recipe.caps.max_chars, max_tokens=0, count_tokens=lambda messages: 0
    )
    signatures, ids, categories = Signatures(), array("Q"), bytearray()
    with progress_bar(None, "near-duplicates", "row", delay=10) as bar:
        for corpus in recipe.corpora:
            for _, conversation in _conversations(recipe, corpus):
                bar.update()
                messages = cleaner(conversation)
                if messages is not None:
                    signatures.add(ngrams(user_text(messages), NEAR_NGRAM))
                    ids.append(short_id(prompt_id(messages)))
                    categories.append(CATEGORIES.index(corpus.category))
    own = signatures.clusters() == np.arange(len(signatures))
    heads: dict[str, list[int]] = {}
    for row in np.flatnonzero(own):
        heads.setdefault(CATEGORIES[categories[row]], []).append(ids[row])
    return Survey(cleaner.counters.as_dict(), heads, [ids[row] for row in np.flatnonzero(~own)])


def rows_by_id(recipe: Recipe, wanted: set[int]) -> dict[int, dict]:
    """The prompt rows (split "train") of the named ones, in a second pass over the corpora: {short id: row}."""
    found: dict[int, dict] = {}
    for corpus in recipe.corpora:
        for family, conversation in _conversations(recipe, corpus):
            try:
                messages, _ = clean_messages(conversation, history=recipe.history, max_chars=recipe.caps.max_chars)
            except ValueError:
                continue
            row = prompt_row(messages, source=corpus.repo, category=corpus.category, family=family, split="train")
            if (name := short_id(row["id"])) in wanted:
                found.setdefault(name, row)
    return found


# ---------------------------------------------------------------------------- --dry-run


def footer_rows(recipe: Recipe, corpus: Corpus) -> int | None:
    """Rows by the footers of the corpus' files; None where a file is not there yet."""
    paths = [corpus_path(recipe, corpus, name) for name in corpus.files]
    return sum(pq.read_metadata(path).num_rows for path in paths) if all(map(Path.exists, paths)) else None


def survey_estimate(recipe: Recipe, plan: dict) -> dict:
    """`plan` with what the survey adds to it; its rows are unknown while a file is missing."""
    counts = [footer_rows(recipe, corpus) for corpus in recipe.corpora]
    rows = None if None in counts else sum(counts)
    each = f"{SURVEY_BYTES_PER_ROW} bytes of memory and {1000 * SURVEY_SECONDS_PER_ROW:g} ms a row"
    if rows is None:
        print(f"  near-duplicates: {each}; rows are known when the files are there (a million: 0.3 GB, 7 minutes)")
        return {**plan, "survey_rows": None, "estimated_s": None}
    memory_bytes, seconds = SURVEY_BYTES_PER_ROW * rows, round(SURVEY_SECONDS_PER_ROW * rows)
    if recipe.corpora:
        print(f"  near-duplicates: {rows} rows at {each} = {memory_bytes} bytes, {seconds} s")
    added = {"memory_bytes": plan["memory_bytes"] + memory_bytes, "estimated_s": plan["estimated_s"] + seconds}
    return {**plan, "survey_rows": rows, **added}


def corpus_estimate(recipe: Recipe, corpus: Corpus, seconds_per_row: float) -> dict:
    """Rows and tokens at most: from the footers of the files that are there, else from `max_rows`, else null.

    A corpus row is capped at caps.max_prompt_tokens; how long they really are is not known before they are read.
    """
    rows = footer_rows(recipe, corpus)
    known = [count for count in (rows, corpus.max_rows) if count is not None]
    at_most = min(known, default=None)
    return {
        "repo": corpus.repo,
        "files": len(corpus.files),
        "present": rows is not None,
        "rows_at_most": at_most,
        "prompt_tokens_at_most": None if at_most is None else at_most * recipe.caps.max_prompt_tokens,
        "estimated_s": None if at_most is None else round(seconds_per_row * at_most),
    }
