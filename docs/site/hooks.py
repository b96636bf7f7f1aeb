"""Hooks of the documentation site: pages from outside docs/, generated pages, sessions and links.

Rule for links that leave docs/: the Markdown files of ``OUTSIDE`` are pages of the site and linked as such; any other
file is named by its path in a checkout, because the site has no copy of it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
#: pages of the site that lie elsewhere in the repository
OUTSIDE = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "benchmarks/results").glob("*.md")),
]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
PACKAGES = {
    "bitwright": "__init__.pyi",
    "bitwright.torch": "torch/__init__.pyi",
    "bitwright.onnx": "onnx/__init__.pyi",
}
_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```$|`[^`\n]+`(?!\]))", re.MULTILINE | re.DOTALL)
_SESSION = re.compile(r"^```python\n(>>> .*?)^```$", re.MULTILINE | re.DOTALL)
without_prompts = runpy.run_path(str(Path(__file__).parent / "sessions.py"))["without_prompts"]
#: sections of the reference in reading order; names that no section lists follow under "More"
SECTIONS = {
    "Quantize in one call": ["quantize", "auto_quantize", "mixed_precision", "Result"],
    "Compress": ["compress", "rebuild", "load_compressed"],
    "Simulate": [
        "QuantizationSimModel", "Inputs", "SiteMap", "Site", "SiteGroup", "load_model", "Loaded", "load_data", "Pictures",
    ],
    "Explain": ["analyze", "drift", "check_model", "HealthReport", "stabilize", "Stabilized", "progressive", "LayerOutputUtil"],
    "Formats, specs and rules": [
        "QuantSpec", "IntFormat", "FloatFormat", "PerTensor", "PerChannel", "PerBlock", "PerGate", "RangeMethod", "Rule",
        "Preset", "PRESETS",
    ],
    "Fold, equalize, smooth, rotate": [
        "fold_all_batch_norms", "fold_all_batch_norms_to_scale", "equalize_model",
        "smooth_model", "awq_model", "fold_norms", "rotate_model", "transform_model", "apply_spinquant",
    ],
    "Round weights, correct biases": [
        "apply_reconstruction", "apply_gptq", "apply_bias_correction", "add_biases", "add_low_rank_branches", "correct_errors",
    ],
    "Mixed precision": ["PrecisionRequest", "set_precisions", "measure_times"],
    "Train": [
        "TrainingGuard", "parameter_groups", "Distillation", "distillation_loss", "reestimate_bn_stats",
        "freeze_batch_norms", "WeightFreezing", "dampening_loss", "pivot_gradients", "LowRankCorrection", "gather_batches",
    ],
    "Plug-ins": ["register"],
    "Errors": [
        "BitwrightError", "ConfigError", "ModelError", "CalibrationError", "ExportError", "EncodingsError", "RangeError",
        "FormatError", "GranularityError", "UnknownArgumentError", "UnknownAttributeError", "BusyError",
    ],
}  # fmt: skip


def public_names(package: str) -> dict[str, str]:
    """Public name -> module that defines it, read from the stub of ``package`` without importing it."""
    tree = ast.parse((ROOT / "bitwright" / PACKAGES[package]).read_text())
    return {
        alias.asname or alias.name: str(node.module)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != package  # modules of the package
        for alias in node.names
    }


def reference_page(package: str) -> str:
    """Markdown of the reference of one package: every public name, from its docstring, the most used first."""
    homes = public_names(package)
    parts = [f"# {package}\n", f"Every public name of `{package}`, the most used first.\n"]
    listed = {name for names in SECTIONS.values() for name in names}
    sections = {**SECTIONS, "More": [name for name in homes if name not in listed]}
    for title, names in sections.items():
        if entries := [f"::: {homes[name]}.{name}\n" for name in names if name in homes]:
            parts += [f"## {title}\n", *entries]
    return "\n".join(parts)


def notebook_page(path: Path) -> str:
    """Markdown of a notebook, its stored outputs included; the file itself lies beside the page."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [_shown(output) for output in cell["outputs"]]
    title, *rest = parts
    return "\n\n".join([title, f"[The notebook]({path.name}) can be downloaded and run.", *rest])


def _shown(output: dict[str, Any]) -> str:
    """One output of a cell: a table of HTML, or text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "text/html" in data:
        return f'<div class="output" markdown="0">\n{"".join(data["text/html"])}\n</div>'
    return f"```text\n{''.join(data['text/plain']).rstrip()}\n```"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the lists of decisions and measurements into the navigation."""
    decisions = [f"decisions/{p.name}" for p in sorted((ROOT / "docs/decisions").glob("*.md"))]
    lists = {
        "DECISIONS": decisions,
        "MEASUREMENTS": [p for p in OUTSIDE if p.startswith("benchmarks/")],
    }
    for section in config.nav or []:
        for title, entries in section.items():
            section[title] = [_filled(entry, lists) for entry in entries]
    return config


def _filled(entry: Any, lists: dict[str, list[str]]) -> Any:
    if isinstance(entry, dict):
        return {title: lists.get(value, value) for title, value in entry.items()}
    return entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, the notebooks and the reference."""
    from mkdocs.structure.files import File

    for path in OUTSIDE:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for package in PACKAGES:
        files.append(
            File.generated(config, f"reference/{package}.md", content=reference_page(package))
        )
    page = runpy.run_path(str(Path(__file__).parent / "command_line.py"))["command_line_page"]()
    files.append(File.generated(config, "command-line.md", content=page))
    for path in NOTEBOOKS:
        files.append(
            File.generated(config, f"notebooks/{path.stem}.md", content=notebook_page(path))
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Apply the rule for links that leave docs/, and show interpreter sessions as code that can be copied."""
    source = page.file.src_uri
    parts = _FENCE.split(_SESSION.sub(copyable, markdown))
    parts[::2] = [_LINK.sub(lambda match: relinked(match, source), part) for part in parts[::2]]
    return "".join(parts)


def copyable(match: re.Match[str]) -> str:
    """The blocks that the site shows for a session."""
    return "\n\n".join(
        f"```{language}\n{text}\n```" for language, text in without_prompts(match[1])
    )


def relinked(match: re.Match[str], source: str) -> str:
    """The link as it stands on the page ``source`` of the site."""
    text, target, anchor = match[1], match[2], match[3] or ""
    folder = "" if source in OUTSIDE else "docs"
    path = os.path.normpath(os.path.join(folder, os.path.dirname(source), target))
    on_site = (
        path
        if path in OUTSIDE
        else path.removeprefix("docs/")
        if path.startswith("docs/")
        else None
    )
    if on_site is None:
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
    return f"[{text}]({os.path.relpath(on_site, os.path.dirname(source) or '.')}{anchor})"
