"""Result files (data/results/NAME.json): one shape, so that tables, tests and people can read them all.

    {"name", "command", "commit", "date", "machine", "versions", "rows": [{...}, ...]}

Steps build a document and write it below runs/; `record` copies it to data/results/ and refreshes the README, where a
table stands between `<!-- results:NAME -->` and `<!-- /results:NAME -->`: the README can say nothing but its results.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafter.provenance import ROOT, atomic_write, read_json, run_record, write_json

RESULTS, README = ROOT / "data" / "results", ROOT / "README.md"
FIELDS = ("name", "command", "commit", "date", "machine", "versions", "rows")
MACHINE_FIELDS = ("cpu", "cores", "memory_gb", "gpu", "isa")
NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")

# Rows that speak of a stage have nested numbers; all other files are flat: their scalar columns as they come.
STAGE_COLUMNS = {
    "stage": "stage",
    "layers": "layers",
    "agreement": "agreement",
    "τ@4": "tau.4",
    "τ@8": "tau.8",
    "τ@16": "tau.16",
    "95 % of τ@16": "tau16_interval",
    "accepted at fixed prefixes": "fixed_prefix_accepted16",
    "seen": "seen",
    "new skeletons": "new_skeletons",
    "new families": "new_families",
    "training s": "seconds",
}

# ---------------------------------------------------------------------------- documents


def build(name: str, rows: Sequence[Mapping[str, Any]], argv: Sequence[str] | None = None) -> dict[str, Any]:
    """A checked document of this process. A commit with uncommitted changes is marked `-dirty`."""
    run = run_record(argv)
    commit = run["commit"]
    if commit and run["diff_sha256"]:
        commit += "-dirty"
    document = {
        "name": name,
        "command": run["command"],
        "commit": commit,
        "date": run["date"],
        "machine": run["machine"],
        "versions": run["versions"],
        "rows": [dict(row) for row in rows],
    }
    validate(document)
    return document


def validate(document: Any) -> None:
    """ValueError that lists every fault: missing or unknown fields, no rows, rows of different columns, NaN."""
    if not isinstance(document, Mapping):
        raise ValueError("a result file must be a JSON object")
    faults = [f"missing {name}" for name in FIELDS if name not in document]
    faults += [f"unknown {name}" for name in document if name not in FIELDS]
    if not NAME.fullmatch(str(document.get("name"))):
        faults.append(f"name must be lower-case letters, digits, - and _, not {document.get('name')!r}")
    machine = document.get("machine")
    if not isinstance(machine, Mapping) or set(machine) != set(MACHINE_FIELDS):
        faults.append(f"machine must hold {', '.join(MACHINE_FIELDS)}")
    rows = document.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) and row for row in rows):
        faults.append("rows must be a non-empty list of objects")
    else:
        columns = set(rows[0])
        faults += [f"rows[{at}] has other columns than rows[0]" for at, row in enumerate(rows) if set(row) != columns]
        faults += [f"rows[{at}].{path} is not finite" for at, row in enumerate(rows) for path in _not_finite(row, "")]
    if faults:
        raise ValueError(f"result file {document.get('name')!r}: {'; '.join(faults)}")


def _not_finite(value: Any, path: str) -> list[str]:
    if isinstance(value, float) and not math.isfinite(value):
        return [path]
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return [fault for key, one in inner for fault in _not_finite(one, f"{path}.{key}".lstrip("."))]


def read(path: str | Path) -> dict[str, Any]:
    """A result file, checked; ValueError also when its name is not its file's."""
    document = read_json(path)
    validate(document)
    if document["name"] != Path(path).stem:
        raise ValueError(f"{path} says its name is {document['name']!r}")
    return document


# ---------------------------------------------------------------------------- tables


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None) -> str:
    """Rows as an aligned Markdown table, no line end behind it. `columns` is {heading: path}, a path "tau.16" leading
    into nested objects; without it, stages have theirs and other files show their scalar columns."""
    if columns is None:
        flat = {key: key for key, value in rows[0].items() if not isinstance(value, Mapping | list)}
        columns = STAGE_COLUMNS if {"stage", "tau"} <= set(rows[0]) else flat
    cells = [list(columns)] + [[_cell(_at(row, path)) for path in columns.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(_is_number(_at(row, path)) for row in rows) for path in columns.values()]

    def line(texts: Sequence[str]) -> str:
        parts = zip(texts, widths, numeric, strict=True)
        return "| " + " | ".join(text.rjust(w) if right else text.ljust(w) for text, w, right in parts) + " |"

    ruler = "|" + "|".join(
        "-" * (width + 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)
    )
    return "\n".join([line(cells[0]), ruler + "|", *map(line, cells[1:])])


def _at(row: Mapping[str, Any], path: str) -> Any:
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value == 0:
        return "0"
    if isinstance(value, float):  # 0.771, 4.15, 1,234: three figures that mean something
        return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return " – ".join(map(_cell, value))
    return str(value).replace("|", "\\|")


# ---------------------------------------------------------------------------- README


def replace_block(text: str, name: str, table: str) -> str:
    """`text` with what stands between the markers of `name` replaced; ValueError unless the pair is there once."""
    begin, end = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"needs {begin} and {end} once each, in this order")
    head, rest = text.split(begin)
    return f"{head}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"


def refresh_readme(readme: str | Path = README, results: str | Path = RESULTS, names: Sequence[str] = ()) -> list[str]:
    """Renders the README's marked tables (those of `names`, or all) anew from their files; -> the names rendered.

    Writes only on a change. Raises ValueError for a broken pair of markers, OSError for a table without a file.
    """
    readme = Path(readme)
    before = after = readme.read_text(encoding="utf-8")
    marked = [name for name in re.findall(r"<!-- results:([a-z0-9_-]+) -->", before) if not names or name in names]
    for name in dict.fromkeys(marked):
        after = replace_block(after, name, markdown_table(read(Path(results) / f"{name}.json")["rows"]))
    if after != before:
        with atomic_write(readme) as file:
            file.write(after.encode())
    return marked


def record(document: Mapping[str, Any], *, results: str | Path = RESULTS, readme: str | Path = README) -> Path:
    """Writes the document to data/results/NAME.json and renders its table in the README, if it has one there."""
    validate(document)
    path = Path(results) / f"{document['name']}.json"
    write_json(path, document)
    if Path(readme).exists():
        refresh_readme(readme, results, [document["name"]])
    return path
