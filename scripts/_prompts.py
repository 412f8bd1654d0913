"""What the prompt steps share: where files lie, which step follows which, clean draws, manifests, reruns.

    prepare_selection -> selection, development, final, reserved.json
    prepare_data -> distill.data, prepare_addon -> distill.addon, extend_data -> expanded.data,
    make_extra_prompts -> expanded.extra, make_focused -> focused

Each step reads what the steps before it wrote, so that a prompt stands in one file only. A step's key is the sha256 of
its parameters, inputs and code; it is kept in NAME.manifest.json and a rerun with the same key does nothing.
"""

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from drafter.chat import TOKENIZER_FILES, Chat
from drafter.console import progress_bar, run_command
from drafter.corpus import Cleaner, duplicate_key, prompt_id, prompt_row, stream_prompts, write_prompts
from drafter.duplicates import NEAR_NGRAM, NearIndex, Overlap, ngrams, unpack_hashes, user_text
from drafter.provenance import ROOT, read_json, sha256_file, sha256_json, write_json
from drafter.recipe import Recipe, Synthetic, load_recipe
from scripts._corpora import corpora_of, corpus_estimate, corpus_rows, short_id, verified_files
from scripts._texts import fetch_wheels, text_rows
from scripts.families import draw

TRAIN_STEPS = {  # prompt file -> the script that makes it, in the order in which they run
    "distill.data": "prepare_data",
    "distill.addon": "prepare_addon",
    "expanded.data": "extend_data",
    "expanded.extra": "make_extra_prompts",
    "focused": "make_focused",
}
COMMON_CODE = (
    *("drafter/corpus.py", "drafter/duplicates.py", "drafter/wheel_text.py"),
    *("scripts/_corpora.py", "scripts/_prompts.py", "scripts/_texts.py"),
)
DRAW_ROUNDS = 20  # new draws to make up for prompts that the caps dropped

# ---------------------------------------------------------------------------- command line


def run_script(body: Callable[[Recipe, bool, "Against | None"], dict], doc: str, argv: list[str] | None) -> int:
    """Parses the command line, runs `body(recipe, dry_run, against)`, prints its result as the last line (JSON)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, help="a recipe of architecture.json, for example smollm2-quick")
    parser.add_argument("--dry-run", action="store_true", help="files, rows, tokens, memory, time; no network")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="drop rows that share a word 8-gram with this list"
    )
    args = parser.parse_args(argv)

    def run() -> None:
        against = Against(args.against) if args.against else None
        print(json.dumps(body(load_recipe(args.recipe), args.dry_run, against)))

    return run_command(run)


class Against:
    """--against FILE (text lines or JSON lines): a rule that drops what overlaps the list, and its report."""

    def __init__(self, path: Path) -> None:
        self.file, self.sha256, self.overlap = path.name, sha256_file(path), Overlap(path)
        self.matches: dict[str, int] = {}  # id of a dropped prompt -> line of the list

    def rule(self, messages: list[dict]) -> str | None:
        line = self.overlap.line(user_text(messages))
        if line is None:
            return None
        self.matches[prompt_id(messages)] = line
        return "against"

    def report(self) -> dict:
        """What the list has dropped since the last report."""
        matches, self.matches = self.matches, {}
        rows = [{"id": row_id, "line": line} for row_id, line in matches.items()]
        lines = len(set(matches.values()))
        return {"file": self.file, "sha256": self.sha256, "rows": len(rows), "lines": lines, "matches": rows}


# ---------------------------------------------------------------------------- estimates of --dry-run

# Mean prompt tokens over the 3,388 prompts of smollm2-quick, template and system text included. Authored ones have 45
# (chat, constraints) to 105 (summarise); a focused one is a train prompt inside another text.
PROMPT_TOKENS = 67
FOCUSED_PROMPT_TOKENS = 86
# Measured there on one core: drawing a prompt 0.01 ms, rendering and counting it 0.15 ms, twice that with hashing and
# writing; 3 s to import the libraries and open the tokenizer.
SECONDS_PER_ROW, START_S = 0.0003, 3
CORPUS_SECONDS_PER_ROW = 0.001  # of 1,900 characters: cleaning and n-grams 0.36 ms, rendering and counting 0.58 ms
# Python with transformers takes 0.48 GB; a row 2 kB while its category is drawn. The key and the id of every row, also
# of the earlier files, stay: 0.3 kB.
MEMORY_BYTES, MEMORY_BYTES_PER_ROW, MEMORY_BYTES_PER_KEY = 500_000_000, 2_100, 300
# A line of JSON has 341 bytes (authored), 412 (focused) or 643 (real text) in smollm2-135m. Those of chat corpora are
# longer; 1.5 kB is assumed, not measured.
ROW_BYTES, CORPUS_ROW_BYTES = 400, 1_500


def estimate(rows: int, prompt_tokens: int) -> dict:
    """What `rows` authored prompts of that mean length take."""
    return {
        "rows": rows,
        "prompt_tokens": rows * prompt_tokens,
        "disk_bytes": ROW_BYTES * rows,
        "memory_bytes": MEMORY_BYTES + MEMORY_BYTES_PER_ROW * rows,
        "estimated_s": round(START_S + SECONDS_PER_ROW * rows),
    }


# ---------------------------------------------------------------------------- files


def prompts_path(recipe: Recipe, name: str) -> Path:
    return recipe.cache_dir / "prompts" / f"{name}.jsonl"


def manifest_path(recipe: Recipe, name: str) -> Path:
    return recipe.cache_dir / "prompts" / f"{name}.manifest.json"


def against_path(recipe: Recipe, name: str) -> Path:
    return recipe.cache_dir / "prompts" / f"{name}.against.json"


def reserved_path(recipe: Recipe) -> Path:
    return recipe.cache_dir / "prompts" / "reserved.json"


def tokenizer_files(recipe: Recipe) -> list[Path]:
    """The files that decide how many tokens a prompt has; ValueError with the command where there are none."""
    folder = require(recipe.cache_dir / "models" / "teacher", recipe, "download_models")
    return [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]


def require(path: Path, recipe: Recipe, script: str) -> Path:
    if not path.exists():
        place = f"data/cache/{path.relative_to(recipe.cache_dir.parent)}"
        raise ValueError(f"{place} is missing; make it with: python -m scripts.{script} --recipe {recipe.name}")
    return path


def earlier_files(recipe: Recipe, name: str) -> list[Path]:
    """Prompt files of the train steps before `name`; ValueError with the command where one is missing."""
    earlier = list(TRAIN_STEPS)[: list(TRAIN_STEPS).index(name)]
    return [require(prompts_path(recipe, step), recipe, TRAIN_STEPS[step]) for step in earlier]


# ---------------------------------------------------------------------------- manifests and reruns


class Step:
    """One output: its key, whether what lies on disk has that key, and the writing of rows and manifest."""

    def __init__(
        self, recipe: Recipe, name: str, parameters: dict, inputs: Iterable[Path], against: Against | None = None
    ) -> None:
        self.recipe, self.name, self.against = recipe, name, against
        script = TRAIN_STEPS.get(name, "prepare_selection")
        parameters = {**parameters, "against": against and against.sha256}
        families = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts/families").glob("*.py"))
        code = (*COMMON_CODE, f"scripts/{script}.py", *families)
        base = recipe.cache_dir.parent
        self.manifest = {
            "format": 1,
            "step": script,
            "recipe": recipe.name,
            "parameters": parameters,
            "inputs": {path.relative_to(base).as_posix(): sha256_file(path) for path in inputs},
            "code": {file: sha256_file(ROOT / file) for file in code},
        }
        self.manifest["key"] = sha256_json(self.manifest)

    def current(self) -> dict | None:
        """The manifest on disk if it has this key and the output still has the bytes that it names."""
        path, output = manifest_path(self.recipe, self.name), prompts_path(self.recipe, self.name)
        if not (path.exists() and output.exists()):
            return None
        manifest = read_json(path)
        same = manifest.get("key") == self.manifest["key"] and manifest["output"]["sha256"] == sha256_file(output)
        return manifest if same else None

    def write(self, rows: Iterable[dict], counters: Callable[[], dict]) -> dict:
        """Writes the prompt rows, then the manifest (asking `counters` when the last row is out); -> manifest."""
        categories: Counter[str] = Counter()
        families: Counter[str] = Counter()

        def counted() -> Iterator[dict]:
            with progress_bar(None, self.name, "row", delay=10) as bar:
                for row in rows:
                    categories[row["category"]] += 1
                    families[row["family"]] += 1
                    yield row
                    bar.update()

        output, matches = prompts_path(self.recipe, self.name), against_path(self.recipe, self.name)
        matches.unlink(missing_ok=True)
        # An interrupted run must leave no manifest that speaks of other bytes.
        manifest_path(self.recipe, self.name).unlink(missing_ok=True)
        count = write_prompts(output, counted())
        manifest = {
            **self.manifest,
            "output": {"file": output.name, "sha256": sha256_file(output), "rows": count},
            "counts": {"category": dict(sorted(categories.items())), "family": dict(sorted(families.items()))},
            "counters": counters(),
        }
        if self.against:
            write_json(matches, self.against.report())
        write_json(manifest_path(self.recipe, self.name), manifest)
        return manifest


def report(manifest: dict, up_to_date: bool) -> dict:
    """Says in one line what a step did; -> what goes into the script's JSON line."""
    rows, counts = manifest["output"]["rows"], manifest["counts"]["category"]
    state = "up to date" if up_to_date else "made"
    shares = ", ".join(f"{category} {count}" for category, count in counts.items()) or "nothing"
    print(f"{manifest['output']['file']}: {state}, {rows} rows ({shares})")
    if dropped := manifest["counters"]["dropped"]:
        print("  dropped: " + ", ".join(f"{reason} {count}" for reason, count in dropped.items()))
    return {"file": manifest["output"]["file"], "rows": rows, "up_to_date": up_to_date, "category": counts}


# ---------------------------------------------------------------------------- clean draws


def new_cleaner(recipe: Recipe, against: Against | None) -> Cleaner:
    """A cleaner with the recipe's caps; tokens are counted by the teacher's own tokenizer and template."""
    folder = recipe.cache_dir / "models" / "teacher"
    stop_ids = frozenset(recipe.teacher.stop_ids)
    chat = Chat.load(folder, thinking=recipe.chat.thinking, stop_ids=stop_ids, num_ids=recipe.teacher.num_ids)
    cleaner = Cleaner(
        history=recipe.history,
        max_chars=recipe.caps.max_chars,
        max_tokens=recipe.caps.max_prompt_tokens,
        count_tokens=lambda messages: len(chat.render(messages)),
    )
    cleaner.rules += [against.rule] if against else []
    return cleaner


def equal_parts(total: int, parts: int) -> list[int]:
    """`total` in `parts` whole numbers that differ by one at most: 22 in 7 -> 4 3 3 3 3 3 3."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def draw_rows(
    cleaner: Cleaner,
    category: str,
    count: int,
    seed: int,
    split: str,
    *,
    allow: Callable[[object, int], bool],
    exclude_ids: set[str],
) -> list[dict]:
    """`count` clean synthetic prompt rows of a category; adds their ids to `exclude_ids`.

    A prompt over the token cap is counted and replaced by a further draw, so that the categories stay equal.
    """
    rows: list[dict] = []
    for attempt in range(DRAW_ROUNDS):
        if len(rows) == count:
            break
        for row in draw(category, count - len(rows), seed + 100_003 * attempt, allow=allow, exclude_ids=exclude_ids):
            exclude_ids.add(row["id"])
            messages = cleaner(row["messages"])
            if messages is not None:
                labels = {key: row[key] for key in ("source", "category", "family")}
                rows.append(prompt_row(messages, **labels, split=split))
    if len(rows) < count:
        raise ValueError(
            f"only {len(rows)} of {count} {category} prompts pass the rules and the caps ({cleaner.max_chars} "
            f"characters, {cleaner.max_tokens} tokens); ask for fewer. Dropped: {dict(cleaner.counters.dropped)}"
        )
    return rows


# ---------------------------------------------------------------------------- reserved prompts


class Reserved:
    """reserved.json: what `prepare_selection` has set aside before any train prompt is drawn."""

    def __init__(self, recipe: Recipe) -> None:
        self.path = require(reserved_path(recipe), recipe, "prepare_selection")
        document = read_json(self.path)
        if document["splits"] != recipe.splits.model_dump(mode="json"):
            raise ValueError(
                f"{self.path.name} was made for other splits than the recipe now declares; make it anew with: "
                f"python -m scripts.prepare_selection --recipe {recipe.name}"
            )
        if document["corpora"] != corpora_key(recipe):
            raise ValueError(
                f"{self.path.name} was made from other corpora than the recipe now declares; make it anew with: "
                f"python -m scripts.prepare_selection --recipe {recipe.name}"
            )
        self.skeletons = frozenset(document["skeletons"])
        self.families = frozenset(document["families"])
        self.ids = {row_id for ids in document["ids"].values() for row_id in ids}
        self.duplicate_keys = {bytes.fromhex(key) for key in document["duplicate_keys"]}
        self.near = NearIndex()
        for grams in itertools.chain.from_iterable(document["ngrams"].values()):
            self.near.add(unpack_hashes(grams))
        self.near_duplicates = unpack_hashes(document["near_duplicates"])

    def allows(self, family: object, skeleton: int) -> bool:
        """Whether a train step may draw from this skeleton."""
        return family.name not in self.families and skeleton_name(family, skeleton) not in self.skeletons

    def hold_back(self, cleaner: Cleaner) -> None:
        """Makes the cleaner of a train step drop what is, or is near to, a reserved prompt; and near-duplicates."""
        cleaner.seen |= self.duplicate_keys
        cleaner.rules += [near_rule(self.near), self._near_duplicate]

    def _near_duplicate(self, messages: list[dict]) -> str | None:
        repeated = self.near_duplicates and short_id(prompt_id(messages)) in self.near_duplicates
        return "near_duplicate" if repeated else None


def near_rule(index: NearIndex) -> Callable[[list[dict]], str | None]:
    """The rule of a Cleaner that drops what is near to a row of the index."""
    return lambda messages: "near_held_out" if index.is_near(ngrams(user_text(messages), NEAR_NGRAM)) else None


def corpora_key(recipe: Recipe) -> str:
    """One hash over what the recipe says of its corpora: the survey of near-duplicates speaks of these alone."""
    return sha256_json([corpus.model_dump(mode="json") for corpus in recipe.corpora])


def skeleton_name(family: object, skeleton: int) -> str:
    return f"{family.name}/{skeleton:02d}"


# ---------------------------------------------------------------------------- a train step


def _train_rows(recipe, corpora, texts, synthetic, reserved, cleaner, exclude_ids) -> Iterator[dict]:
    for corpus in corpora:
        yield from corpus_rows(recipe, corpus, cleaner)
    if texts:
        yield from text_rows(recipe, cleaner)
    for entry in synthetic:
        rows = draw_rows(
            cleaner, entry.category, entry.count, entry.seed, "train", allow=reserved.allows, exclude_ids=exclude_ids
        )
        assert all(row["family"] not in reserved.skeletons for row in rows), "a reserved skeleton was drawn"
        yield from rows


def _expected(recipe: Recipe, name: str, synthetic: tuple[Synthetic, ...]) -> dict:
    """--dry-run: what the step would make. `rows` and its neighbours are the authored prompts; corpora stand apart."""
    corpora = [corpus_estimate(recipe, corpus, CORPUS_SECONDS_PER_ROW) for corpus in corpora_of(recipe, name)]
    rows, categories = sum(entry.count for entry in synthetic), len({entry.category for entry in synthetic})
    parts = [f"{rows} synthetic prompts in {categories} categories"]
    if recipe.texts and name == "expanded.data":
        texts = sum(recipe.texts.counts.values())
        parts.append(f"{texts} over texts of {len(recipe.texts.wheels)} wheels")
        rows += texts
    for corpus in corpora:
        count = "an unknown number of" if corpus["rows_at_most"] is None else f"at most {corpus['rows_at_most']}"
        parts.append(f"{corpus['repo']}: {corpus['files']} file(s), {count} rows")
    print(f"{name}.jsonl: {'; '.join(parts)}")
    summary = {"step": TRAIN_STEPS[name], "recipe": recipe.name, "dry_run": True, "files": [f"{name}.jsonl"]}
    return {**summary, **with_corpora(estimate(rows, PROMPT_TOKENS), corpora), "corpora": corpora}


def with_corpora(plan: dict, corpora: list[dict]) -> dict:
    """`plan` of the authored rows with those of the corpora added to disk, memory and time; says the arithmetic.

    rows_at_most, and what follows from it, is null where a corpus has neither `max_rows` nor a file to look into.
    """
    counts = [corpus["rows_at_most"] for corpus in corpora]
    if None in counts:
        return {**plan, "rows_at_most": None, "disk_bytes": None, "estimated_s": None}
    rows, more = plan["rows"] + sum(counts), sum(counts)
    added = {
        "rows_at_most": rows,
        "disk_bytes": plan["disk_bytes"] + CORPUS_ROW_BYTES * more,
        "memory_bytes": plan["memory_bytes"] + MEMORY_BYTES_PER_KEY * more,
        "estimated_s": round(plan["estimated_s"] + CORPUS_SECONDS_PER_ROW * more),
    }
    own = plan["rows"]
    print(
        f"  {rows} rows. Disk {own} * {ROW_BYTES} + {more} * {CORPUS_ROW_BYTES} = {added['disk_bytes']} bytes. Memory "
        f"{MEMORY_BYTES} + {own} * {MEMORY_BYTES_PER_ROW} + {more} * {MEMORY_BYTES_PER_KEY} = {added['memory_bytes']} "
        f"bytes. Time {START_S} + {own} * {SECONDS_PER_ROW} + {more} * {CORPUS_SECONDS_PER_ROW} = "
        f"{added['estimated_s']} s"
    )
    return {**plan, **added}


def train_step(recipe: Recipe, name: str, dry_run: bool, against: Against | None) -> dict:
    """Makes prompts/NAME.jsonl from the corpora of role NAME and the recipe's synthetic entries of its script."""
    script = TRAIN_STEPS[name]
    synthetic = tuple(entry for entry in recipe.synthetic if entry.step == script)
    if dry_run:
        return _expected(recipe, name, synthetic)

    reserved, earlier = Reserved(recipe), earlier_files(recipe, name)
    corpora, texts = corpora_of(recipe, name), recipe.texts if name == "expanded.data" else None
    if not (corpora or texts or synthetic):
        print(f"{name}.jsonl: the recipe {recipe.name} declares nothing for this step; the file is empty")
    parameters = {
        "corpora": [corpus.model_dump(mode="json") for corpus in corpora],
        "texts": texts and texts.model_dump(mode="json"),
        "synthetic": [entry.model_dump(mode="json") for entry in synthetic],
        "caps": recipe.caps.model_dump(mode="json"),
        "history": recipe.history,
        "thinking": recipe.chat.thinking,
    }
    inputs = [reserved.path, *earlier, *tokenizer_files(recipe), *verified_files(recipe, corpora)]
    inputs += fetch_wheels(recipe) if texts else []
    step = Step(recipe, name, parameters, inputs, against)
    if manifest := step.current():
        return {"step": script, "recipe": recipe.name, **report(manifest, True)}

    cleaner = new_cleaner(recipe, against)
    reserved.hold_back(cleaner)
    exclude_ids = set(reserved.ids)
    for path in earlier:
        for row in stream_prompts(path):
            exclude_ids.add(row["id"])
            cleaner.seen.add(duplicate_key(row["messages"]))
    rows = _train_rows(recipe, corpora, texts, synthetic, reserved, cleaner, exclude_ids)
    manifest = step.write(rows, cleaner.counters.as_dict)
    return {"step": script, "recipe": recipe.name, **report(manifest, False)}
