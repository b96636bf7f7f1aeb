"""Where the tests spend their time, and which of them ``make test`` leaves to ``make test-all``.

Reads what ``pytest --durations=0 -vv`` prints (set-up, call, clean-up of every test, in seconds). Prints the sum of each folder
and the tests whose variants take more than ``--seconds`` on average; ``--write`` makes them the list of costly tests.

    python -m pytest -n 2 --dist worksteal -m "not slow" --durations=0 -vv tests > times.log
    python tools/test_time.py times.log --write tests/costly.txt
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

_LINE = re.compile(r"\s*(\d+\.\d+)s (?:call|setup|teardown)\s+(\S.*)")


def main() -> None:
    """Print the sums and the costly tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="what pytest printed")
    parser.add_argument(
        "--seconds", type=float, default=0.05, help="of the mean variant of a costly test (default: 0.05)"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the names of the costly tests")
    options = parser.parse_args()
    seconds: Counter[str] = Counter()
    for line in options.log.read_text(encoding="utf-8").splitlines():
        if match := _LINE.fullmatch(line):
            seconds[match[2]] += float(match[1])
    folders: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    variants: Counter[str] = Counter()
    for test, time in seconds.items():
        function = test.partition("[")[0]
        folders[str(Path(function.partition("::")[0]).parent)] += time
        functions[function] += time
        variants[function] += 1
    costly = [function for function, time in functions.most_common() if time > options.seconds * variants[function]]
    for function in costly:
        print(f"{functions[function]:7.2f} s in {variants[function]:3} variants  {function}")
    for folder, time in folders.most_common():
        print(f"{time:7.1f} s  {folder}")
    within = sum(functions[function] for function in costly)
    print(f"{sum(seconds.values()):7.1f} s  together, {within:.1f} s of it in {len(costly)} costly tests")
    if options.write:
        names = sorted(function.removeprefix("tests/") for function in costly)
        options.write.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


if __name__ == "__main__":
    main()
