"""What the GPU steps of a recipe would take, from its declaration alone: sums, each with its arithmetic as a line.

Nothing here was measured on a GPU. The assumptions stand in GPU and in the shares below it; a measured rate replaces
them by simple proportion. Times are those of one GPU and of eight: rows of the teacher are answered independently, and
training would average gradients over eight copies. Both are one process today, so that "8" says what to expect, not
what a flag does.

Legend: W weights, D hidden, I intermediate, H query and G key/value heads, E head width, V ids, N tokens.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafter.losses import HEAD_ROWS
from drafter.provenance import read_json
from drafter.recipe import HubSource, Model, Phase, Recipe

# H100 SXM: dense bf16 products a second, bytes of memory and of reads a second, as its maker states them.
GPU, FLOPS, MEMORY_BYTES, READ_BYTES_PER_S = "H100 80 GB", 989e12, 80e9, 3.35e12
PRODUCTS_SHARE = 0.4  # of FLOPS, in training and prefill at these sizes
READ_SHARE = 0.6  # of READ_BYTES_PER_S, in decoding with a static cache
SHARE_OF_EIGHT = 0.9  # of eight times the rate, where eight exchange gradients
CORPUS_PROMPT_TOKENS = 250  # an assumption; authored prompts were counted (scripts/_prompts.py)


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @property
    def weights(self) -> int:
        """W = L (2 D H E + 2 D G E + 3 D I) + V D, once more without a tied head; norms are left out (0.01 %)."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def cache_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    @property
    def kept_bytes_per_token(self) -> int:
        """What layers keep of a token in bf16 for the backward pass: input, two norms and the sum between them (4 D),
        q, k, v and what attention gives (2 H E + 2 G E), gate, up, their activation and product (4 I)."""
        attention = 2 * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * 2 * (4 * self.hidden + attention + 4 * self.intermediate)


# From the config.json of each repository, for a machine that has not downloaded them.
KNOWN = {
    "Qwen/Qwen3-8B": Shape(36, 4096, 12288, 32, 8, 128, 151936, tied=False),
    "Qwen/Qwen3-1.7B": Shape(28, 2048, 6144, 16, 8, 128, 151936, tied=True),
}


def shape_of(model: Model, folder: Path) -> Shape | None:
    """From `folder`/config.json, or what is known of its repository; None when neither is there."""
    if not (folder / "config.json").exists():
        return KNOWN.get(model.source.repo) if isinstance(model.source, HubSource) else None
    config = read_json(folder / "config.json")
    heads = config["num_attention_heads"]
    return Shape(
        config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"], heads,
        config.get("num_key_value_heads", heads), config.get("head_dim") or config["hidden_size"] // heads,
        config["vocab_size"], bool(config.get("tie_word_embeddings")),
    )  # fmt: skip


@dataclass
class Sums:
    """Named sums and how each came about."""

    values: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, value: float, unit: str, how: str) -> float:
        self.values[name] = value
        self.lines.append(f"{name.replace('_', ' ')}: {how} = {value:,.4g} {unit}")
        return value

    def products(self, name: str, work: int, shape: Shape, tokens: int) -> float:
        """Seconds of `work` FLOPs a weight and id."""
        how = f"{work} x {shape.weights:,} x {tokens:,} ids / ({PRODUCTS_SHARE} x {FLOPS:.3g} a second)"
        return self.add(name, work * shape.weights * tokens / (PRODUCTS_SHARE * FLOPS), "s", how)

    def document(self, memory_bytes: float, hours: float, hours_on_8: float) -> dict[str, Any]:
        self.lines.append(f"memory {memory_bytes / 1e9:.1f} GB of {MEMORY_BYTES / 1e9:.0f}; hours on 1 and 8 GPUs: "
                          f"{hours:.2f}, {hours_on_8:.2f}")  # fmt: skip
        return {
            "name": GPU,
            "measured": False,
            "memory_bytes": round(memory_bytes),
            "fits": memory_bytes <= MEMORY_BYTES,
            "hours": {"1": round(hours, 3), "8": round(hours_on_8, 3)},
            "arithmetic": self.lines,
        }


def print_lines(document: dict[str, Any] | None) -> None:
    """For people: the sums of one step on this kind of GPU, estimated."""
    if document is None:
        print("  no estimate for a GPU: the shape of the model is not known before download_models")
        return
    print(f"  {document['name']}, estimated" + ("" if document["fits"] else ": DOES NOT FIT"))
    for line in document["arithmetic"]:
        print(f"    {line}")


def declared_rows(recipe: Recipe) -> tuple[int, int]:
    """(authored, of corpora at most): every prompt that the teacher answers, selection and development included."""
    reserved = recipe.splits.selection + recipe.splits.development
    corpora = sum(corpus.max_rows or 0 for corpus in recipe.corpora)
    authored = sum(entry.count for entry in recipe.synthetic) + recipe.focused.count
    authored += sum(recipe.texts.counts.values()) if recipe.texts else 0
    from_corpora = round(reserved * recipe.splits.corpus_share)
    return authored + reserved - from_corpora, corpora + from_corpora


def teacher(recipe: Recipe, rows: int, prompt_tokens: int) -> dict[str, Any] | None:
    """Memory and hours of answering `rows` prompts, each answer as long as it may be; None for an unknown shape.

    Hours are those of a loop bound by the GPU (--decoder vllm). The plain loop launches some 500 kernels a step from
    Python, which takes longer than the step itself.
    """
    shape = shape_of(recipe.teacher, recipe.cache_dir / "models" / "teacher")
    if shape is None:
        return None
    sums, batch, most = Sums(), recipe.generation.batch_size, recipe.generation.max_new_tokens
    longest = recipe.caps.max_prompt_tokens + most
    weights = sums.add("weights", 2 * shape.weights, "B", f"2 B x {shape.weights:,}")
    per_token = shape.cache_bytes_per_token
    cache = sums.add("cache", batch * longest * per_token, "B", f"{batch} rows x {longest} positions x {per_token} B")
    answers = sums.add("answer_tokens_at_most", rows * most, "ids", f"{rows:,} rows x {most}")
    prefill = sums.products("prefill", 2, shape, prompt_tokens)
    mean = prompt_tokens / max(1, rows) + most / 2
    read = sums.add("read_a_step", weights + batch * mean * per_token, "B",
                    f"weights + {batch} rows x {mean:.0f} positions x {per_token} B")  # fmt: skip
    step = max(read / (READ_SHARE * READ_BYTES_PER_S), 2 * shape.weights * batch / (PRODUCTS_SHARE * FLOPS))
    sums.add(
        "step", step, "s", f"the longer of reading at {READ_SHARE} x {READ_BYTES_PER_S:.3g} B/s and of the products"
    )
    decode = sums.add("decode", answers / batch * step, "s", f"{answers:,} / {batch} steps")
    hours = (prefill + decode) / 3600
    return sums.document(weights + cache, hours, hours / 8)


def phase(recipe: Recipe, phase: Phase) -> dict[str, Any] | None:
    """Memory and hours of one training phase; None for an unknown shape."""
    folder = recipe.run_dir / "student"
    if not (folder / "config.json").exists():
        folder = recipe.cache_dir / "models" / "base"
    shape = shape_of(recipe.base, folder)
    if shape is None:
        return None
    sums, micro = Sums(), recipe.trainer.micro_batch_tokens
    # bf16 weights and gradients; masters, their gradients and two moments in fp32. An adapter's own are left out (1 %).
    bytes_a_weight = 2 if phase.name == "adapter" else 2 + 2 + 4 * 4
    held = sums.add(
        "weights_and_optimizer", bytes_a_weight * shape.weights, "B", f"{bytes_a_weight} B x {shape.weights:,}"
    )
    kept = sums.add("activations", micro * shape.kept_bytes_per_token, "B",
                    f"{micro} ids x {shape.kept_bytes_per_token:,} B, nothing computed twice")  # fmt: skip
    # logits, their gradient, and the log-probabilities between them
    logits = sums.add(
        "logits", 3 * 4 * HEAD_ROWS * shape.vocabulary, "B", f"3 x 4 B x {HEAD_ROWS} x {shape.vocabulary}"
    )
    work = 4 if phase.name == "adapter" else 6  # a frozen weight has no gradient of its own
    hours = sums.products("training", work, shape, phase.tokens) / 3600
    return sums.document(held + kept + logits, hours, hours / (8 * SHARE_OF_EIGHT))


def forward(recipe: Recipe, model: Model, folder: Path, tokens: int) -> dict[str, Any] | None:
    """Memory and hours of scoring `tokens` in one pass (calibrate, evaluate); None for an unknown shape."""
    shape = shape_of(model, folder)
    if shape is None:
        return None
    sums, batch = Sums(), recipe.evaluation.batch_tokens
    weights = sums.add("weights", 2 * shape.weights, "B", f"2 B x {shape.weights:,}")
    width = max(shape.intermediate, shape.hidden)
    blocks = sums.add("activations", 2 * 4 * batch * width, "B", f"2 B x 4 x {batch} ids x {width}")
    logits = sums.add(
        "logits", 2 * 4 * HEAD_ROWS * shape.vocabulary, "B", f"2 x 4 B x {HEAD_ROWS} x {shape.vocabulary}"
    )
    hours = sums.products("scoring", 2, shape, tokens) / 3600
    return sums.document(weights + blocks + logits, hours, hours / 8)
