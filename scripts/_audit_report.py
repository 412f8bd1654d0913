"""What an audit finds: links of the chain, each whole or with its faults by file, expected and actual value."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drafter.provenance import relative, sha256_file


@dataclasses.dataclass(frozen=True)
class Fault:
    link: str
    file: str
    problem: str
    expected: Any = None
    actual: Any = None

    def text(self) -> str:
        values = "" if self.expected is None and self.actual is None else f": expected {self.expected}, {self.actual}"
        return f"{self.link}: {self.file}: {self.problem}{values}"


class Report:
    """Collects what the checks say. `link` names what is checked inside it; everything else belongs to that link."""

    def __init__(self) -> None:
        self.links: list[str] = []
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self.checked: dict[str, int] = {}
        self.figures: dict[str, Any] = {}
        self._hashes: dict[Path, str] = {}

    @contextlib.contextmanager
    def link(self, name: str, file: str | Path = "") -> Iterator[None]:
        """What cannot be read or understood is a fault of its link too; the next one is walked all the same."""
        self.links.append(name)
        self.checked[name] = 0
        try:
            yield
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:  # a document of another shape
            words = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
            self.fault(file, words)

    def fault(self, file: str | Path, problem: str, expected: Any = None, actual: Any = None) -> None:
        name = relative(file) if isinstance(file, Path) else file
        self.faults.append(Fault(self.links[-1], name, problem, expected, actual))

    def check(self, file: str | Path, problem: str, expected: Any, actual: Any) -> bool:
        """Counts one comparison; a difference is a fault."""
        self.checked[self.links[-1]] += 1
        if expected != actual:
            self.fault(file, problem, *map(_short, _differing(expected, actual)))
        return expected == actual

    def file(self, path: Path, expected: str | None, said_by: str) -> bool:
        """Whether a file has the sha256 that `said_by` gives; a missing file is a fault."""
        if not path.is_file():
            self.checked[self.links[-1]] += 1
            self.fault(path, f"the file that {said_by} names is missing", expected, "none")
            return False
        return self.check(path, f"sha256 is not the one in {said_by}", expected, self.sha256(path))

    def note(self, text: str) -> None:
        """What is no fault and should be known; said once."""
        if text not in self.notes:
            self.notes.append(text)

    def sha256(self, path: Path) -> str:
        """Each file is read once in an audit, however many documents name it."""
        if path not in self._hashes:
            self._hashes[path] = sha256_file(path)
        return self._hashes[path]

    def document(self) -> dict[str, Any]:
        faults = [dataclasses.asdict(fault) for fault in self.faults]
        failed = {fault.link for fault in self.faults}
        links = [{"link": name, "ok": name not in failed, "checked": self.checked[name]} for name in self.links]
        return {"ok": not faults, "links": links, "faults": faults, "notes": self.notes, "figures": self.figures}


def _differing(expected: Any, actual: Any) -> tuple[Any, Any]:
    """Of two objects or lists of names what is in one alone; anything else as it is."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        keys = sorted(key for key in {*expected, *actual} if expected.get(key) != actual.get(key))
        return tuple({key: one[key] for key in keys if key in one} for one in (expected, actual))
    if all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in (expected, actual)):
        first, second = ([name for name in one if name not in other] for one, other in
                         ((expected, actual), (actual, expected)))  # fmt: skip
        return (first, second) if first or second else (expected, actual)  # another order, or one twice
    return expected, actual


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:300]} ..."
