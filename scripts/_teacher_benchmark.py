"""What `scripts.benchmark teacher` times: the same prompts answered by three decoders, each token counted once.

`generate` is transformers' own batched generation: prompts padded on the left, a batch ends with its slowest row, no
top-K lists. `transformers` is drafter/decoding.py (a row that ends leaves its place to the next), `own` the native
forward pass; both also write the lists that training needs, as generate_teacher does.

Legend: B rows of a batch.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from drafter.chat import Chat
from drafter.corpus import read_prompts
from drafter.recipe import Recipe
from scripts.generate_teacher import open_decoder

WARM_UP = 8  # prompts

# (prompts) -> tokens of their answers, the stop id included
Answer = Callable[[Sequence[list[int]]], int]


def generate_answers(recipe: Recipe) -> Answer:
    from transformers import AutoModelForCausalLM

    from scripts._draft_benchmark import give_whole_rows

    folder, stop_ids = recipe.cache_dir / "models" / "teacher", sorted(recipe.teacher.stop_ids)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, recipe.generation.dtype)).eval()
    give_whole_rows(model)

    def one_batch(prompts: Sequence[list[int]]) -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[stop_ids[0]] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=recipe.generation.max_new_tokens,
                eos_token_id=stop_ids, pad_token_id=stop_ids[0],
            )  # fmt: skip
        total = 0
        for answer in out[:, longest:].tolist():
            ends = [at for at, token in enumerate(answer) if token in stop_ids]
            total += ends[0] + 1 if ends else len(answer)
        return total

    size = recipe.generation.batch_size
    return lambda prompts: sum(one_batch(prompts[at : at + size]) for at in range(0, len(prompts), size))


def loop_answers(recipe: Recipe, decoder: str, prompts: Sequence[list[int]]) -> Answer:
    decode = open_decoder(recipe, decoder, "cpu", list(prompts))

    def answer(prompts: Sequence[list[int]]) -> int:
        rows = decode(prompts, top_k=recipe.generation.top_k)
        return sum(len(row.tokens) for row in rows)

    return answer


def measure(recipe: Recipe, count: int, progress: Callable[[int], None]) -> list[dict[str, Any]]:
    """Rows of teacher.json: the first `count` prompts of distill.data by each decoder, one after the other.

    ValueError when the recipe's prompts are missing.
    """
    folder = recipe.cache_dir / "models" / "teacher"
    pool = recipe.cache_dir / "prompts" / "distill.data.jsonl"
    if not pool.exists() or not (folder / "source.json").exists():
        raise ValueError(f"no prompts or no teacher below {recipe.cache_dir}: bash scripts/quickstart.sh makes them")
    known = {"stop_ids": recipe.teacher.stop_ids, "num_ids": recipe.teacher.num_ids}
    chat = Chat.load(folder, thinking=recipe.chat.thinking, **known)
    prompts = [chat.render(row["messages"]) for row in read_prompts(pool)[:count]]
    rows = []
    for name in ("generate", "transformers", "own"):
        answer = generate_answers(recipe) if name == "generate" else loop_answers(recipe, name, prompts)
        answer(prompts[:WARM_UP])
        started_s = time.perf_counter()
        tokens = answer(prompts)
        seconds = time.perf_counter() - started_s
        rows.append(
            {
                "decoder": name,
                "batch": recipe.generation.batch_size,
                "top_k": 0 if name == "generate" else recipe.generation.top_k,
                "prompts": len(prompts),
                "prompt_tokens": sum(map(len, prompts)),
                "generated_tokens": tokens,
                "seconds": round(seconds, 2),
                "tokens_per_s": round(tokens / seconds, 1),
            }
        )
        progress(1)
    return rows
