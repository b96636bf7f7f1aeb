"""Commands about names and scripts: ``list``, ``presets``, ``check-config`` and ``migrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from bitwright.cli.app import NO, command, output_option
from bitwright.cli.options import NAMES, Preset, names_of, spec_text
from bitwright.errors import ConfigError, close_matches
from bitwright.terminal import answer, details, is_quiet

if TYPE_CHECKING:
    from bitwright.core.placement.rules import Rule

#: what ``bitwright list`` takes -> the tables that it prints
_KINDS = {
    "presets": ("presets",),
    "methods": ("steps", "ranges", "efforts"),
    "targets": ("targets",),
    "runtimes": ("runtimes",),
    "metrics": ("metrics",),
    "profiles": ("profiles",),
    "configs": ("configs",),
}


@command("list")
def list_names(
    what: Annotated[
        str | None,
        typer.Argument(
            help="presets, methods, targets, runtimes, profiles, metrics or configs; all of them by default.",
            show_default=False,
            autocompletion=lambda incomplete: [kind for kind in _KINDS if kind.startswith(incomplete)],
        ),
    ] = None,
) -> None:
    """List the names that options, Python calls and configuration files take.

    Presets go into preset=, steps into recipe=, range methods into quant_scheme=
    and method:, efforts into effort=, configurations into config_file=, targets
    into target=. With -q the names alone, one per line.

    \b
    Examples:
      bitwright list
      bitwright list targets
      bitwright list presets -q
    """
    _print_names(what)


def _print_names(what: str | None) -> None:
    if what is not None and what not in _KINDS:
        raise ConfigError("list", f"there is no list {what!r}{close_matches(what, _KINDS)}", f"use {', '.join(_KINDS)}")
    from bitwright.tables import Table

    for kind in [kind for name in _KINDS if what in (None, name) for kind in _KINDS[name]]:
        title, head, rows = NAMES[kind]
        if is_quiet():
            answer("\n".join(names_of(kind)))
        else:
            details(Table(head, rows(), title))


@command()
def presets() -> None:
    """List presets and all other names; the same as `bitwright list`.

    \b
    Examples:
      bitwright presets
      bitwright list presets             the presets alone
    """
    _print_names(None)


@command("check-config")
def check_config(
    file: Annotated[
        str, typer.Argument(help="Rules in YAML, TOML or JSON, AIMET's quantsim JSON, or a name such as htp_v73.")
    ],
    preset: Preset = "w8a8",
) -> None:
    """Read a configuration and print the rules it stands for, or what is wrong in it.

    Rules are applied from top to bottom, and a later one wins; they start from
    --preset where the file names none. Whether a rule matches anything depends
    on the model: QuantizationSimModel reports those that do not.

    \b
    Examples:
      bitwright check-config rules.yaml
      bitwright check-config default_config.json
      bitwright check-config htp_v73 --preset w4a8
    """
    from bitwright.core.numerics.spec import find_preset
    from bitwright.core.placement.config import load_config
    from bitwright.tables import Table

    rules = load_config(file, find_preset(preset))
    rows = [(str(i), *_rule_cells(rule)) for i, rule in enumerate(rules.rules)]
    details(
        f"weights      {spec_text(rules.weight)}",
        f"activations  {spec_text(rules.activation)}",
        Table(("", "about", "port", "parameter", "sets", "written in"), rows, "Rules"),
        f"{len(rules.supergroups)} supergroups: {', '.join(map(str, rules.supergroups))}",
        *(f"note: {note}" for note in rules.notes),
    )
    answer(f"{file}: {len(rules.rules)} rules, no error")


def _rule_cells(rule: Rule) -> tuple[str, ...]:
    """Cells of a rule: the tensors it matches, what it sets, and where it was written."""
    from bitwright.core.numerics.granularity import phrase

    about = [f"names {rule.name}"] if rule.name != "*" else []
    about += [f"operators {' '.join(rule.types)}"] if rule.types != ("*",) else []
    port = "all" if rule.port == "*" else rule.port
    sets = []
    for facet in ("quantized", "format", "symmetry", "method", "fixed_range"):
        value = getattr(rule, facet)
        sets += [] if value is None else [f"{facet}={getattr(value, 'name', value)}"]
    sets += [] if rule.granularity is None else [phrase(rule.granularity)]
    return ", ".join(about) or "everything", port, rule.param or "", ", ".join(sets), rule.origin


@command()
def migrate(
    script: Annotated[Path, typer.Argument(help="A Python script or notebook that uses AIMET.", show_default=False)],
    output: Annotated[
        Path | None, output_option(help="Where the new script goes; <script>_bitwright.py by default.")
    ] = None,
) -> None:
    """Rewrite the imports of an AIMET script, and list what has no counterpart and what behaves differently.

    Exit code 1 when something has no counterpart.

    \b
    Examples:
      bitwright migrate quantize_resnet.py
      bitwright migrate notebook.ipynb --output ported.ipynb
    """
    from bitwright.migrate import migrate_file

    try:
        content = script.read_bytes()
    except OSError as error:
        raise ConfigError(str(script), f"it cannot be read: {error}", "give the path of a script") from error
    rewritten, found = migrate_file(content, str(script))
    target = output or script.with_name(f"{script.stem}_bitwright{script.suffix}")
    target.write_bytes(rewritten)
    for finding in found.findings:
        kind = ("no counterpart", "red") if finding.missing else ("different", "yellow")
        details(Text.assemble(f"{script}:{finding.where} ", kind, f" {finding.name}: {finding.note}"))
    answer(f"{found.changed} import statements rewritten in {target}; {len(found.missing)} names without a counterpart")
    if found.missing:
        raise typer.Exit(NO)
