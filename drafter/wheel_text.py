"""Real text that every machine with pip can have: functions, docstrings and READMEs out of wheels of the package index.

Texts are kept as their authors wrote them: a function with its indentation taken off, a docstring as Python shows it,
a paragraph of the README that is prose. What is too short to ask about or too long for a prompt is left out.
"""

import ast
import email
import inspect
import re
import textwrap
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FUNCTION_CHARS, PROSE_CHARS = range(120, 1101), range(150, 1201)
_SKIPPED = re.compile(r"(^|/)(tests?|_vendor|vendor|examples?)/|(^|/)test_")


@dataclass(frozen=True)
class Text:
    """`kind` is function or prose; `bare` is a function without its docstring, `head` its signature and docstring."""

    kind: str
    text: str
    bare: str = ""
    head: str = ""


def read_wheel(path: Path) -> list[Text]:
    """The usable texts of a wheel, each once, in the order of its files. ValueError for a damaged wheel."""
    found: dict[str, Text] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".dist-info/METADATA"):
                    texts = _readme(archive.read(name).decode("utf-8"))
                elif name.endswith(".py") and not _SKIPPED.search(name):
                    texts = _module(archive.read(name).decode("utf-8"))
                else:
                    continue
                for text in texts:
                    found.setdefault(text.text, text)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"the wheel {path.name} is damaged ({error})") from None
    return list(found.values())


# ---------------------------------------------------------------------------- Python files


def _module(source: str) -> Iterator[Text]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a template, or a file of another Python
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _function(node, lines)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            yield from _prose(ast.get_docstring(node) or "")


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Iterator[Text]:
    """The function if it does something beside its docstring."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    text = textwrap.dedent("\n".join(lines[first : node.end_lineno]))
    documented = ast.get_docstring(node) is not None
    body = node.body[documented:]
    if len(text) not in FUNCTION_CHARS or not body or isinstance(body[0], ast.Pass | ast.Raise):
        return
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):  # "..." of an overload
        return
    if not documented or node.body[0].lineno == node.lineno:
        yield Text("function", text, bare=text)
        return
    end = node.body[0].end_lineno
    head = textwrap.dedent("\n".join(lines[first:end]))
    bare = textwrap.dedent("\n".join([*lines[first : node.body[0].lineno - 1], *lines[end : node.end_lineno]]))
    yield Text("function", text, bare=bare, head=head)


# ---------------------------------------------------------------------------- prose


def _readme(metadata: str) -> Iterator[Text]:
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(email.message_from_string(metadata).get_payload())):
        yield from _prose(paragraph)


def _prose(text: str) -> Iterator[Text]:
    """The text without trailing examples, if it is prose: sentences, mostly letters; no table, no links, no code."""
    text = re.split(r"\n\s*(?:>>>|\.\. |```|~~~)", text)[0].strip()
    letters = sum(one.isalpha() or one == " " for one in text)
    if len(text) not in PROSE_CHARS or letters < 0.8 * len(text) or ". " not in text.replace(".\n", ". "):
        return
    if re.match(r"[#*|<\[!+=-]", text) or "](" in text or "://" in text:
        return
    yield Text("prose", text)
