"""The commands of ``bitwright``: one file per command, or per few that belong together.

A command is one function under ``@app.command()``: its arguments become the command line, its docstring the
help. It imports what it needs inside, so that ``--help`` answers at once; it prints through ``console``;
it raises the toolkit's own errors, which the application turns into three lines and exit code 2; and it
ends with ``raise typer.Exit(NO)`` where its answer is no. A new file needs a row below.
"""

from bitwright.cli.commands import analyze, auto, benchmark, doctor, drift, migrate, names, quantize, report, show  # noqa: F401  (each registers its commands)
