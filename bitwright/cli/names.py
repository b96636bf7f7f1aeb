"""Commands about names and scripts: ``list``, ``presets``, ``check-config`` and ``migrate``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bitwright.cli.app import NO, OUTPUT, answer, command, details, is_quiet
from bitwright.cli.options import Preset
from bitwright.errors import ConfigError, close_matches

if TYPE_CHECKING:
    from bitwright.core.numerics.spec import QuantSpec
    from bitwright.core.placement.rules import Rule
Rows = list[tuple[str, ...]]


def _presets() -> Rows:
    from bitwright.core.numerics.spec import PRESETS

    return [(name, _spec(p.weight), _spec(p.activation)) for name, p in PRESETS.items()]


def _ranges() -> Rows:
    from bitwright.core.numerics.ranges import RANGE_METHODS, method_aliases

    def options(row: Any) -> str:
        return ", ".join(f"{name}={d:g} ({lo:g} to {hi:g})" for name, (d, lo, hi) in row.options.items())

    return [(name, row.needs, options(row), ", ".join(method_aliases(name))) for name, row in RANGE_METHODS.items()]


def _steps() -> Rows:
    from bitwright.recipes.recipe import KINDS

    return [(name, kind.phase, kind.does) for name, kind in KINDS.items()]


def _efforts() -> Rows:
    from bitwright.recipes.default_recipe import EFFORTS

    return [(name, row.does) for name, row in EFFORTS.items()]


def _configs() -> Rows:
    from bitwright.core.placement.aimet_config import ALIASES, SHIPPED

    return [(name, ", ".join(a for a, to in ALIASES.items() if to == name)) for name in SHIPPED]


def _targets() -> Rows:
    from bitwright.export.targets import TARGETS

    return [(row.name, row.runtime, row.about) for row in TARGETS.values()]


def _runtimes() -> Rows:
    from importlib.util import find_spec

    from bitwright.runtimes.adapters import RUNTIMES

    def state(row: Any) -> str:
        return "yes" if find_spec(row.module.partition(".")[0]) else f"pip install 'bitwright[{row.extra}]'"

    return [(name, row.suffix, state(row)) for name, row in RUNTIMES.items()]


#: kind of names -> title, head and rows of its table
_TABLES: dict[str, tuple[str, tuple[str, ...], Callable[[], Rows]]] = {
    "presets": ("Presets (--preset, preset=)", ("preset", "weights", "activations"), _presets),
    "steps": ("Steps of recipes (--recipe, recipe=)", ("step", "works on", "does"), _steps),
    "ranges": ("Range methods (--scheme, quant_scheme=)", ("method", "reads", "options", "also called"), _ranges),
    "efforts": ("Efforts, where no recipe is given (--effort, effort=)", ("effort", "does"), _efforts),
    "targets": ("Targets of export (--target, target=)", ("target", "runtime", "for"), _targets),
    "runtimes": ("Runtimes (--runtime, runtime=)", ("runtime", "reads", "installed"), _runtimes),
    "configs": ("Configurations (--config, config_file=)", ("configuration", "also called"), _configs),
}
_KINDS = {
    "presets": ("presets",),
    "methods": ("steps", "ranges", "efforts"),
    "targets": ("targets",),
    "runtimes": ("runtimes",),
    "configs": ("configs",),
}


def names_of(kind: str) -> list[str]:
    """The names in a table: ``presets``, ``steps``, ``ranges``, ``efforts``, ``targets``, ``runtimes`` or ``configs``."""
    return [row[0] for row in _TABLES[kind][2]()]


def _spec(spec: QuantSpec | None) -> str:
    return "float" if spec is None else spec.describe()


@command("list")
def list_names(
    what: Annotated[
        str | None,
        typer.Argument(
            help="presets, methods, targets, runtimes or configs; all of them by default.",
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
        title, head, rows = _TABLES[kind]
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
        f"weights      {_spec(rules.weight)}",
        f"activations  {_spec(rules.activation)}",
        Table(("", "about", "port", "parameter", "sets", "written in"), rows, "Rules"),
        f"{len(rules.supergroups)} supergroups: {', '.join(map(str, rules.supergroups))}",
        *(f"note: {note}" for note in rules.notes),
    )
    answer(f"{file}: {len(rules.rules)} rules, no error")


def _rule_cells(rule: Rule) -> tuple[str, ...]:
    """Which tensors a rule is about, what it sets, and where it was written."""
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
        Path | None,
        typer.Option(help="Where the new script goes; <script>_bitwright.py by default.", rich_help_panel=OUTPUT),
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
