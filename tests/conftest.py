"""What several test files share: one thread (they run beside each other), and the whole chain on `tiny`, made once."""

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from archives import PEAKS, REPORTED, Bench, pack, random_adapter, random_model, small_archive
from stub_hub import StubHub, running_hub

from drafter.console import quiet_libraries
from drafter.recipe import Recipe, load_recipe
from model_io import pack_adapter
from scripts.random_model import make_tokenizer

# scripts/test.sh may run in an environment that VENV names; what serve.sh finds in a test must not depend on it.
os.environ.pop("VENV", None)

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tests on two cores gain nothing from two threads each, and fp32 sums stay in one order."""
    quiet_libraries()
    torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter):
    """What tests counted."""
    for line in REPORTED:
        terminalreporter.write_line(line)
    if PEAKS:
        terminalreporter.write_line(f"memory: at most {max(PEAKS) >> 20} MiB above what was held, in any of them")


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


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[StubHub]:
    """A hub on loopback that HF_ENDPOINT names, no token, an empty cache, and little patience."""
    from huggingface_hub import close_session, constants

    from drafter import fetch

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf_home/token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf_home/hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    patience = fetch.Patience(first_wait_s=0.001, read_s=20.0, progress_bytes=50_000)
    monkeypatch.setattr(fetch, "PATIENCE", patience)
    close_session()  # its client may have been made with another environment
    with running_hub() as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.url)
        yield stub
    close_session()


# ---------------------------------------------------------------------------- small archives


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def packed(tmp_path_factory, tokenizer_dir):
    """(folder with base/ and model/, the model, the adapter); read only, tests copy it."""
    folder = tmp_path_factory.mktemp("packed")
    model = random_model("qwen3")
    pack(model, folder / "base", tokenizer_dir)
    adapter = random_adapter(model, folder / "base")
    pack_adapter(folder / "model", base_dir=folder / "base", adapter=adapter)
    return folder, model, adapter


@pytest.fixture
def archive(packed, tmp_path):
    shutil.copytree(packed[0] / "model", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """Folder with base/ and model/, of which each byte can be tried; read only."""
    folder = tmp_path_factory.mktemp("small")
    small_archive(folder)
    return folder


@pytest.fixture
def bench(small) -> Iterator[Bench]:
    """A copy of the small archive, to be damaged."""
    # on a file system in memory where there is one: to write a file anew takes as long on a disk as to verify it
    memory = Path("/dev/shm")
    folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
    with folder as name:
        yield Bench(small / "model", Path(name))
