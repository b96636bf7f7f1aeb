"""``bitwright migrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bitwright.cli.app import NO, app, console
from bitwright.errors import ConfigError


@app.command()
def migrate(
    script: Annotated[Path, typer.Argument(help="A Python script or notebook that uses AIMET.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option(help="Where the new script goes; <script>_bitwright.py by default.")
    ] = None,
) -> None:
    """Rewrite the imports of an AIMET script, and list what has no counterpart and what behaves differently.

    Exit code 1: something has no counterpart.
    """
    from bitwright.migrate import migrate_file

    try:
        content = script.read_bytes()
    except OSError as error:
        raise ConfigError(str(script), f"it cannot be read: {error}", "give the path of a script") from error
    rewritten, found = migrate_file(content, str(script))
    target = output or script.with_name(f"{script.stem}_bitwright{script.suffix}")
    target.write_bytes(rewritten)
    out = console()
    for finding in found.findings:
        kind = ("no counterpart", "red") if finding.missing else ("different", "yellow")
        out.print(Text.assemble(f"{script}:{finding.where} ", kind, f" {finding.name}: {finding.note}"))
    out.print(
        Text(
            f"{found.changed} import statements rewritten in {target}; {len(found.missing)} names without a counterpart"
        )
    )
    if found.missing:
        raise typer.Exit(NO)
