"""``python -m bitwright``, and the console script ``bitwright``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def main() -> None:
    """Run the command that the arguments name.

    ``show PATH`` without options is answered without the parser of options, whose import takes longer than a small file.
    """
    if not _shown(sys.argv[1:]):
        from bitwright.cli import main as run

        run()


def _shown(arguments: Sequence[str]) -> bool:
    """Answer ``show PATH``; returns whether the arguments are that and the file can be read."""
    if len(arguments) != 2 or arguments[0] != "show" or arguments[1].startswith("-"):
        return False
    from bitwright.interrupt import INTERRUPTED, watched
    from bitwright.terminal import interrupted, keep_libraries_off_stdout, print_contents

    with watched():
        try:
            from bitwright.export.contents import contents

            tables = contents(Path(arguments[1]))
        except KeyboardInterrupt as stop:
            interrupted(stop)
            sys.exit(INTERRUPTED)
        except Exception:
            return False  # the application reads the file again, and reports the error as that of any command
        keep_libraries_off_stdout()
        print_contents(tables)
    return True


if __name__ == "__main__":
    main()
