"""The ``bitwright`` command: its application (``app``), the options that commands share (``options``), and the commands.

A command is one function under ``@command()``: its arguments become the command line, its docstring the help. It imports what
it needs inside, so that ``--help`` answers at once; it calls public functions and prints what they return; it raises the
toolkit's own errors, which the application turns into three lines and exit code 2; and it ends with ``raise typer.Exit(NO)``
where its answer is no. A new file of commands needs to be imported below.
"""

from bitwright.cli import compress, diagnose, exported, llm, names, quantize  # noqa: F401  (each registers its commands)
from bitwright.cli.app import app, main

__all__ = ["app", "main"]
