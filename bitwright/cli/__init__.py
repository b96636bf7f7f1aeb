"""The ``bitwright`` command: the application, the options that commands share, and the commands themselves.

Nothing here computes: a command reads its arguments, calls the public functions and prints what they return.
"""

from bitwright.cli import commands  # noqa: F401  (registers the commands)
from bitwright.cli.app import app, main

__all__ = ["app", "main"]
