"""What several test files share: one thread (they run beside each other), and the whole chain on `tiny`, made once."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from drafter.console import quiet_libraries
from drafter.recipe import Recipe, load_recipe

# scripts/test.sh may run in an environment that VENV names; what serve.sh finds in a test must not depend on it.
os.environ.pop("VENV", None)

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tests on two cores gain nothing from two threads each, and fp32 sums stay in one order."""
    quiet_libraries()
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen3_tokenizer() -> Path:
    """The real Qwen3 tokenizer, where it lies beside the project."""
    folder = SHARED / "qwen3_tokenizer"
    if not folder.exists():
        pytest.skip("no ../shared/qwen3_tokenizer on this machine")
    return folder


@dataclasses.dataclass(frozen=True)
class Chain:
    recipe: Recipe
    root: Path
    report: dict

    @property
    def model_dir(self) -> Path:
        return self.root / "model"


@pytest.fixture(scope="session")
def chain(tmp_path_factory) -> Chain:
    """Every step of the `tiny` recipe, from models to a served draft, below a temporary root."""
    from scripts import quickstart

    root = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafter.recipe.ROOT", root)
        patch.setenv("MODEL_DIR", str(root / "model"))
        recipe = load_recipe("tiny")
        report = quickstart.quickstart(recipe, record=False)
        yield Chain(recipe, root, report)
