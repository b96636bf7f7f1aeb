"""``bitwright presets`` and ``check-config``: the names that configurations know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bitwright.cli.app import app, console, table

if TYPE_CHECKING:
    from bitwright.core.numerics.spec import QuantSpec
    from bitwright.core.placement.rules import Rule


@app.command()
def presets() -> None:
    """List the names that the Python calls and the configuration files know.

    Presets go into preset=, range methods into quant_scheme= and method:,
    configurations into config_file=, steps into recipe=, efforts into effort=.

    \b
    Examples:
      quantize(model, data, preset="w4a8")
      QuantizationSimModel(model, x, "percentile", config_file="htp_v73")
    """
    from bitwright.algorithms.search.default_recipe import EFFORTS
    from bitwright.algorithms.search.recipe import KINDS
    from bitwright.core.numerics.ranges import RANGE_METHODS, method_aliases
    from bitwright.core.numerics.spec import PRESETS
    from bitwright.core.placement.aimet_config import ALIASES, SHIPPED
    from bitwright.export.targets import TARGETS

    out = console()
    specs = [(name, _spec(p.weight), _spec(p.activation)) for name, p in PRESETS.items()]
    out.print(table("Presets", ("preset", "weights", "activations"), specs))
    methods = [
        (name, row.needs, _options_of(row.options), ", ".join(method_aliases(name)))
        for name, row in RANGE_METHODS.items()
    ]
    out.print(table("Range methods", ("method", "reads", "options", "also called"), methods))
    targets = [(name, ", ".join(a for a, to in ALIASES.items() if to == name)) for name in SHIPPED]
    out.print(table("Configurations", ("configuration", "also called"), targets))
    rows = [(row.name, row.about) for row in TARGETS.values()]
    out.print(table("Targets of export", ("target", "for"), rows))
    kinds = [(name, kind.phase, kind.does) for name, kind in KINDS.items()]
    out.print(table("Steps of recipes", ("step", "works on", "does"), kinds))
    efforts = [(name, row.does) for name, row in EFFORTS.items()]
    out.print(table("Efforts, where no recipe is given", ("effort", "does"), efforts))


def _spec(spec: QuantSpec | None) -> str:
    return "float" if spec is None else spec.describe()


def _options_of(options: Any) -> str:
    """``percentile=100 (50 to 100)`` for every option of a range method."""
    return ", ".join(f"{name}={d:g} ({lo:g} to {hi:g})" for name, (d, lo, hi) in options.items())


@app.command("check-config")
def check_config(
    file: Annotated[
        str, typer.Argument(help="Rules in YAML, TOML or JSON, AIMET's quantsim JSON, or a name such as htp_v73.")
    ],
    preset: Annotated[str, typer.Option(help="Specs that the rules start from, where the file names none.")] = "w8a8",
) -> None:
    """Read a configuration and print the rules it stands for, or what is wrong in it.

    Rules are applied from top to bottom, and a later one wins. Whether a rule
    matches anything depends on the model: QuantizationSimModel reports those
    that do not.

    \b
    Examples:
      bitwright check-config rules.yaml
      bitwright check-config default_config.json
      bitwright check-config htp_v73 --preset w4a8
    """
    from bitwright.core.numerics.spec import find_preset
    from bitwright.core.placement.config import load_config

    rules = load_config(file, find_preset(preset))
    out = console()
    out.print(Text(f"weights      {_spec(rules.weight)}"))
    out.print(Text(f"activations  {_spec(rules.activation)}"))
    rows = [(str(i), *_rule_cells(rule)) for i, rule in enumerate(rules.rules)]
    out.print(table(f"{len(rules.rules)} rules", ("", "about", "port", "parameter", "sets", "written in"), rows))
    out.print(Text(f"{len(rules.supergroups)} supergroups: {', '.join(map(str, rules.supergroups))}"))
    for note in rules.notes:
        out.print(Text(f"note: {note}"))


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
