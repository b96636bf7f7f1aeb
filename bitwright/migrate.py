"""Port a script from AIMET: rewrite its imports, and list names without a counterpart and differences in behaviour."""

from __future__ import annotations

import ast
import importlib
import io
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from bitwright.aimet_common.names import differences, reason
from bitwright.errors import ConfigError

PACKAGES = ("aimet_torch", "aimet_onnx", "aimet_common")

#: "package name" of what a script reads or calls -> what is different about it here
DIFFERENCES: dict[str, str] = {f"{row.package} {name}": note for row in differences() for name, note in row.at.items()}
_ONNX_EXPORT = "the opset is 21 whatever is asked for, and weights are stored as integers"
_NAMES = frozenset(known.rpartition(" ")[2] for known in DIFFERENCES)
#: keyword of a call -> what is different about it here
KEYWORDS: dict[str, str] = {
    "export_to_torchscript": "TorchScript is not written: an error",
    "use_embedded_encodings": "<prefix>_qdq.onnx has the encodings embedded, always",
    "onnx_export_args": "the opset is 21; dynamic_axes makes the first axis of every input vary",
    "propagate_encodings": "without effect",
    "checkpoints_config": "not needed and not read",
    "enable_r3": "not here: an error",
    "prequantize_constants": "weights are always stored as integers",
}


@dataclass(frozen=True)
class Finding:
    """A name in a script that has no counterpart or behaves differently.

    Attributes:
        line: line number.
        cell: number of the notebook cell, counted from 1; ``None`` in a script.
        name: the name, as AIMET has it.
        missing: True where it has no counterpart, False where it behaves differently.
        note: the difference, or what to do.
    """

    line: int
    name: str
    missing: bool
    note: str
    cell: int | None = None

    @property
    def where(self) -> str:
        """The line, with the cell in a notebook."""
        return f"{self.line}" if self.cell is None else f"cell {self.cell}:{self.line}"


@dataclass(frozen=True)
class Migrated:
    """A script with its imports rewritten.

    Attributes:
        source: the new text.
        changed: number of rewritten import statements.
        findings: sorted by line.
    """

    source: str
    changed: int
    findings: tuple[Finding, ...]

    @property
    def missing(self) -> tuple[Finding, ...]:
        """The findings without a counterpart."""
        return tuple(finding for finding in self.findings if finding.missing)


def migrate(source: str, name: str = "script") -> Migrated:
    """Rewrite the AIMET imports of a script and check the names that it uses.

    Args:
        source: text of a Python script.
        name: of the script, for messages.

    Raises:
        ConfigError: it is not Python.

    Example:
        >>> migrate("import aimet_torch.quantsim as q").source
        'import bitwright.aimet_torch.quantsim as q'
    """
    tree = _parsed(source, name)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and _is_ours(node)]
    findings = {
        *_imported(statements, _guarded(tree)),
        *_attributes(tree, statements),
        *_differences(tree, statements),
        *_texts(tree),
        *_pickled_models(tree),
    }
    return Migrated(
        _rewritten(source, statements), len(statements), tuple(sorted(findings, key=lambda f: (f.line, f.name)))
    )


def migrate_file(content: bytes, name: str = "script") -> tuple[bytes, Migrated]:
    """Apply :func:`migrate` to the bytes of a file: a script in its declared encoding, or a notebook (``.ipynb``).

    Line ends, byte order mark and encoding are kept, and in a notebook the outputs and other cells.

    Returns:
        The new bytes, and the findings. For a notebook, ``source`` joins all cells.

    Raises:
        ConfigError: it is not Python, no notebook, or not in the encoding that it declares.
    """
    if name.endswith(".ipynb"):
        return _migrate_notebook(content, name)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        source = content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(
            name,
            f"its text cannot be decoded: {error}",
            "save it as UTF-8, or name its encoding in the first line: # -*- coding: latin-1 -*-",
        ) from error
    found = migrate(source, name)
    return found.source.encode(encoding), found


def _is_another_language(source: str) -> bool:
    """True where a cell begins with a magic for another language, such as ``%%bash``."""
    magic = next(iter(source.lstrip().partition("\n")[0].split()), "")
    return magic.startswith("%%") and magic not in _PYTHON_CELLS


def _code_of(content: bytes, name: str) -> tuple[Any, list[tuple[Any, str]]]:
    """A notebook, and its cells of code with their text."""
    try:
        notebook: Any = json.loads(content)
        json.dumps(notebook, ensure_ascii=False).encode()  # a lone surrogate is no text
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return notebook, [(cell, "".join(cell["source"])) for cell in cells]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            name, f"it is not a notebook: {type(error).__name__}: {error}", "give a notebook of format 4, or a script"
        ) from error


def _migrate_notebook(content: bytes, name: str) -> tuple[bytes, Migrated]:
    notebook, cells = _code_of(content, name)
    done: list[Migrated] = []
    for number, (cell, source) in enumerate(cells, 1):
        if _is_another_language(source):
            continue
        found = migrate(source, f"{name}, cell {number}")
        done.append(replace(found, findings=tuple(replace(f, cell=number) for f in found.findings)))
        if found.changed:
            as_list = isinstance(cell["source"], list)
            cell["source"] = found.source.splitlines(keepends=True) if as_list else found.source
    findings = tuple(finding for found in done for finding in found.findings)
    whole = Migrated("\n".join(found.source for found in done), sum(found.changed for found in done), findings)
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode(), whole


_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun")
_MAGIC = re.compile(r"^(\s*)(?:[%!?]|[\w.]+\?|[\w, ]+=\s*[%!])")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")  # as Python counts lines; str.splitlines knows more ends


def _parsed(source: str, name: str) -> ast.Module:
    """The tree of a script; lines of IPython (``%magic``, ``!command``, ``?name``) count as ``pass``.

    Raises:
        ConfigError: it is not Python.
    """
    try:
        return _tree(source.removeprefix("\ufeff"))
    except SyntaxError as error:
        plain = "".join(
            f"{match[1]}pass\n" if (match := _MAGIC.match(line)) else line
            for line in _LINE.findall(source.removeprefix("\ufeff"))
        )
        try:
            return _tree(plain)
        except SyntaxError:
            raise ConfigError(
                f"{name}, line {error.lineno}",
                f"it is not Python: {error.msg}",
                "give a script that Python 3 can run (2to3 converts Python 2)",
            ) from error


def _tree(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (MemoryError, RecursionError) as error:  # of the parser, whatever the memory
        raise SyntaxError("it is nested too deeply", ("", 1, 0, "")) from error


def _top(name: str | None) -> str:
    return (name or "").partition(".")[0]


def _is_ours(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not node.level and _top(node.module) in PACKAGES
    return any(_top(alias.name) in PACKAGES for alias in node.names)


def _rewritten(source: str, statements: list[ast.Import | ast.ImportFrom]) -> str:
    mark = "\ufeff" if source.startswith("\ufeff") else ""
    lines = _LINE.findall(source.removeprefix(mark))
    for node in sorted(statements, key=lambda n: (n.lineno, n.col_offset), reverse=True):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        block = "".join(lines[first : last + 1]).encode()
        tail = len(lines[last].encode()) - (node.end_col_offset or 0)
        head, middle, rest = (block[: node.col_offset], block[node.col_offset : len(block) - tail], block[-tail:])
        new = _statement(node, middle.decode())
        lines[first : last + 1] = [head.decode() + new + (rest.decode() if tail else "")]
    return mark + "".join(lines)


def _statement(node: ast.Import | ast.ImportFrom, text: str) -> str:
    if isinstance(node, ast.ImportFrom):
        return re.sub(r"^from(\s+)", r"from\1bitwright.", text)
    kept = [alias for alias in node.names if _top(alias.name) not in PACKAGES]
    parts = [f"import {', '.join(ast.unparse(alias) for alias in kept)}"] if kept else []
    for alias in node.names:
        if alias in kept:
            continue
        if alias.asname:
            parts.append(f"import bitwright.{alias.name} as {alias.asname}")
            continue
        if "." in alias.name:
            parts.append(f"import bitwright.{alias.name}")
        parts.append(f"from bitwright import {_top(alias.name)}")
    return "; ".join(parts)


def _look_up(name: str) -> str | None:
    """The reason why ``name`` (dotted, as AIMET has it) does not exist here; ``None`` if it does."""
    known = reason(name)
    try:
        found, rest = _longest_module(f"bitwright.{name}")
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        return known or str(error)
    if found is None:
        return known or "there is no such module here"
    for part in rest:
        try:
            found = getattr(found, part)
        except ImportError:
            return known
        except AttributeError:
            return known or "there is no such name here"
    return None


def _longest_module(name: str) -> tuple[Any, list[str]]:
    """Split a dotted name into the longest importable module and the names after it.

    Raises:
        ModuleNotFoundError: a package that is needed is not installed.
        ImportError: a module refuses to be imported.
    """
    rest: list[str] = []
    while name != "bitwright":
        try:
            return importlib.import_module(name), rest
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "-"):
                raise
        name, _, last = name.rpartition(".")
        rest.insert(0, last)
    return None, rest


def _guarded(tree: ast.Module) -> set[int]:
    """Lines of imports whose failure the script expects: ``try: import ... except ImportError: ...``."""
    expected = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    return {
        inner.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        and any(
            handler.type is None or {_path(name) for name in getattr(handler.type, "elts", [handler.type])} & expected
            for handler in node.handlers
        )
        for statement in node.body
        for inner in ast.walk(statement)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    }


def _imported(statements: list[ast.Import | ast.ImportFrom], guarded: set[int]) -> Iterator[Finding]:
    for node in statements:
        for name in _names_of(node):
            reason = _look_up(name)
            if reason is not None:
                fails = node.lineno not in guarded
                goes_on = "" if fails else "; the script goes on with its except clause"
                yield Finding(node.lineno, name, fails, reason + goes_on)


def _names_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The names of AIMET that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if _top(alias.name) in PACKAGES]
    return [str(node.module) if alias.name == "*" else f"{node.module}.{alias.name}" for alias in node.names]


def _attributes(tree: ast.Module, statements: list[ast.Import | ast.ImportFrom]) -> Iterator[Finding]:
    """Attributes of imported modules that do not exist here: ``aimet_torch.quantsim.this``."""
    bound = dict(chain.from_iterable(map(_bound_by, statements)))
    for attribute in (node for node in ast.walk(tree) if isinstance(node, ast.Attribute)):
        root, path = _chain(attribute)
        if root in bound and _is_module(bound[root]):
            name = ".".join([bound[root], *path])
            reason = _look_up(name)
            if reason is not None:
                yield Finding(attribute.lineno, name, True, reason)


def _bound_by(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Pairs of a bound name and the AIMET name it stands for."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif _top(alias.name) in PACKAGES:
            top = _top(alias.name)
            yield (alias.asname, alias.name) if alias.asname else (top, top)


def _chain(node: ast.Attribute) -> tuple[str, list[str]]:
    path = [node.attr]
    inner: ast.expr = node.value
    while isinstance(inner, ast.Attribute):
        path.insert(0, inner.attr)
        inner = inner.value
    return (inner.id if isinstance(inner, ast.Name) else ""), path


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(f"bitwright.{name}")
    except ImportError:
        return False
    return True


def _texts(tree: ast.Module) -> Iterator[Finding]:
    """Strings that are dotted names of AIMET modules: ``importlib.import_module("aimet_torch.quantsim")``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _top(node.value) in PACKAGES:
            if re.fullmatch(r"[\w.]+", node.value):
                note = f"a string, which is not changed: if a module is imported by it, write 'bitwright.{node.value}'"
                yield Finding(node.lineno, node.value, False, note)


def _pickled_models(tree: ast.Module) -> Iterator[Finding]:
    """Names of files ``<prefix>.pth`` of exports, which are not written here."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _path(n.func).endswith(".export")]
    given = [[*call.args[1:2], *(k.value for k in call.keywords if k.arg == "filename_prefix")] for call in calls]
    prefixes = {x.value for x in chain.from_iterable(given) if isinstance(x, ast.Constant) and isinstance(x.value, str)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".pth"):
            if re.split(r"[/\\]", node.value.removesuffix(".pth"))[-1] in prefixes:
                note = f"not written by export: write it with torch.save({_ORIGINAL}, path)"
                yield Finding(node.lineno, node.value, False, note)


_ORIGINAL = "sim.get_original_model(sim.model)"


def _differences(tree: ast.Module, statements: list[ast.Import | ast.ImportFrom]) -> Iterator[Finding]:
    origins = _origins(tree, statements)
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in KEYWORDS:
            yield Finding(node.value.lineno, node.arg, False, KEYWORDS[node.arg])
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in _NAMES:
            yield from _different_attribute(node, origins)
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            yield from _different_imports(statement)


def _different_attribute(node: ast.Attribute, origins: dict[str, str]) -> Iterator[Finding]:
    origin = _origin(node, origins)
    if origin == OTHER:
        return
    packages = {_top(known) for known in origins.values()} & set(PACKAGES)
    package = _top(origin) or (
        "aimet_torch" if "aimet_torch" in packages or "aimet_onnx" not in packages else "aimet_onnx"
    )
    if note := _note(_path(node), package, origin is None):
        yield Finding(node.lineno, node.attr, False, note)


def _different_imports(statement: ast.ImportFrom) -> Iterator[Finding]:
    for name in (alias.name for alias in statement.names if alias.name in _NAMES):
        if note := _note(f"{statement.module}.{name}", _top(statement.module)):
            yield Finding(statement.lineno, name, False, note)


def _note(path: str, package: str, guessed: bool = False) -> str:
    """The difference of a name in a package of AIMET, empty for none; of another package too where it is ``guessed``."""
    last = path.rpartition(".")[2]
    if path.endswith("onnx.export"):
        return _ONNX_EXPORT
    several = (package, *PACKAGES) if guessed or package == "aimet_common" else (package,)
    return next((note for one in several if (note := DIFFERENCES.get(f"{one} {last}", ""))), "")


OTHER = "other"  # what has nothing to do with AIMET
_SIMULATIONS = ("QuantizationSimModel", "load_checkpoint", "from_onnx_qdq")


def _origins(tree: ast.Module, statements: list[ast.Import | ast.ImportFrom]) -> dict[str, str]:
    """Map names and dotted paths to the AIMET name that they stand for or were created by, or to :data:`OTHER`.

    Ambiguous names, such as parameters of functions, are left out.
    """
    unknown = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    found: dict[str, str] = {}
    for name, origin in _defined(tree, statements):
        if found.setdefault(name, origin) != origin:
            unknown.add(name)
    for names, call in _assigned_calls(tree):
        made = _made_by(call, found)
        for name in names:
            if made is None or found.setdefault(name, made) != made:
                unknown.add(name)
    return {name: origin for name, origin in found.items() if name and name not in unknown}


def _assigned_calls(tree: ast.Module) -> Iterator[tuple[list[str], ast.Call]]:
    """Pairs of assigned names and the call that they are assigned from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            yield [_path(target) for target in node.targets], node.value


def _defined(tree: ast.Module, statements: list[ast.Import | ast.ImportFrom]) -> Iterator[tuple[str, str]]:
    """Pairs of a name that an import or a class defines and its origin."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _bound(node, node in statements)
        elif isinstance(node, ast.ClassDef):
            yield node.name, OTHER


def _bound(node: ast.Import | ast.ImportFrom, ours: bool) -> Iterator[tuple[str, str]]:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{node.module}.{alias.name}" if ours else OTHER
        else:
            name = alias.name if alias.asname else _top(alias.name)
            yield alias.asname or name, name if _top(name) in PACKAGES else OTHER


def _made_by(call: ast.Call, origins: dict[str, str]) -> str | None:
    """Origin of the result of a call: a simulation class, :data:`OTHER`, or ``None`` where the callee is unknown."""
    path = _path(call.func)
    base = origins.get(path.partition(".")[0])
    if base in (None, OTHER):
        return base
    return base if (path if "." in path else base).endswith(_SIMULATIONS) else OTHER


def _origin(node: ast.Attribute, origins: dict[str, str]) -> str | None:
    """Origin of the object that an attribute is read from, by the longest known prefix of its path."""
    path = _path(node.value)
    while path:
        if path in origins:
            return origins[path]
        path = path.rpartition(".")[0]
    return None


def _path(node: ast.expr) -> str:
    """The dotted path ``a.b.c`` of names and attributes; empty for other expressions."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join([node.id, *parts]) if isinstance(node, ast.Name) else ""
