"""The page about the command line, from the application itself."""

from __future__ import annotations

from typing import Any

_INTRO = """# Command line

Every command and option of `bitwright`, generated from the program. `bitwright COMMAND --help` prints the same.
Shell completion is installed with `bitwright --install-completion`.
"""


def command_line_page() -> str:
    """Markdown with a section for each command: its text, its arguments and its options."""
    import typer

    from bitwright.cli import app

    parts = [_INTRO]
    waiting: list[tuple[str, Any]] = [("bitwright", typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop(0)
        if command.hidden:
            continue
        parts += [f"## {name}\n", _text(command.help or ""), *_tables(command)]
        children = getattr(command, "commands", {})
        waiting = [(f"{name} {child}", children[child]) for child in sorted(children)] + waiting
    return "\n".join(parts)


def _text(help_text: str) -> str:
    """A help text: paragraphs as they are, those after a backspace as blocks of code."""
    parts = []
    for paragraph in help_text.strip().split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        if lines[0] != "\b":
            parts.append(" ".join(lines).replace("<", "&lt;"))
            continue
        head = [] if lines[1].startswith(" ") else [lines[1]]
        body = [line[2:] if line.startswith("  ") else line for line in lines[1 + len(head) :]]
        parts.append("\n".join([*head, "", "```text", *body, "```"]))
    return "\n\n".join(parts) + "\n"


def _tables(command: Any) -> list[str]:
    """A table of the arguments, then one for each group of options."""
    panels: dict[str, list[str]] = {}
    for param in command.params:
        if getattr(param, "hidden", False):
            continue
        panel = param.rich_help_panel
        group = (
            panel
            if isinstance(panel, str)
            else "Arguments"
            if param.param_type_name == "argument"
            else "Options"
        )
        panels.setdefault(group, []).append(_row(param))
    panels.setdefault("Options", []).append("| `--help` | | Show the help text and exit. |")
    return [
        f"| {group} | default | |\n|---|---|---|\n" + "\n".join(rows) + "\n"
        for group, rows in panels.items()
    ]


def _row(param: Any) -> str:
    if param.param_type_name == "argument":
        name = f"`{(param.metavar or param.name).upper()}`"
    else:
        name = ", ".join(f"`{option}`" for option in [*param.opts, *param.secondary_opts])
    shown = param.default not in (None, "", (), False) and not callable(param.default)
    default = "required" if param.required else f"`{param.default}`" if shown else ""
    text = " ".join((param.help or "").split()).replace("|", "\\|").replace("<", "&lt;")
    return f"| {name} | {default} | {text} |"
