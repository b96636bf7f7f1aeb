"""How large the package is: files, lines of code, import cycles. ``python tools/size.py [FOLDER ...]``.

A line of code holds a token that is neither a docstring nor a comment. An import cycle is a strongly connected component of the
modules of one folder, by any import: also those inside functions and under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(path: Path) -> int:
    """How many lines of the file hold code."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    with tokenize.open(path) as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type not in _NO_CODE]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - documented)


def imported(path: Path, package: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """Those of ``modules`` that the file imports."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found = (f"{base}.{alias.name}" for alias in node.names)
            yield from {name if name in modules else base for name in found} & modules.keys()


def cycles(folder: Path) -> list[list[str]]:
    """Modules that import each other, as sorted groups; a package and its own modules are no cycle."""
    files = {".".join(p.relative_to(folder.parent).with_suffix("").parts): p for p in folder.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in files.items()}
    graph = networkx.DiGraph()
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        graph.add_edges_from((name, other) for other in imported(path, package, modules) if other != name)
    groups = (sorted(group) for group in networkx.strongly_connected_components(graph))
    return sorted(g for g in groups if sum(modules[name].name != "__init__.py" for name in g) > 1)


def main(folders: list[str]) -> None:
    """Print a line for each folder, and its import cycles."""
    for folder in folders or ["bitwright", "tests"]:
        sizes = [lines_of_code(path) for path in Path(folder).rglob("*.py")]
        small = sum(size <= 10 for size in sizes)
        print(f"{folder}: {len(sizes)} files, {sum(sizes)} lines of code, {small} files of at most 10")
        for group in cycles(Path(folder).resolve()):
            print(f"  import cycle: {', '.join(group)}")


if __name__ == "__main__":
    main(sys.argv[1:])
