"""Where the tests spend their time: the sum of every folder, and the variants of parametrized tests that are long.

Reads what ``pytest --durations=0 -vv`` prints (set-up, call and clean-up of every test, in seconds). A long variant of a test
with a quicker one belongs into ``@pytest.mark.slow_variants`` of that test: it then runs in ``make test-all`` only.

    python -m pytest -n 2 -m "not slow" --durations=0 -vv tests > times.log
    python tools/test_time.py times.log
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

_LINE = re.compile(r"\s*(\d+\.\d+)s (?:call|setup|teardown)\s+(\S.*)")


def main() -> None:
    """Print the sums and the long variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="what pytest printed")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a long variant (default: 0.3)")
    options = parser.parse_args()
    seconds: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    variants: Counter[str] = Counter()
    for line in options.log.read_text(encoding="utf-8").splitlines():
        if match := _LINE.fullmatch(line):
            seconds[match[2]] += float(match[1])
    for test, time in seconds.items():
        folders[str(Path(test.partition("::")[0]).parent)] += time
        variants[test.partition("[")[0]] += 1
    for test, time in seconds.most_common():
        if time >= options.seconds and variants[test.partition("[")[0]] > 1:
            print(f"{time:7.2f} s  {test}")
    for folder, time in folders.most_common():
        print(f"{time:7.1f} s  {folder}")
    print(f"{sum(seconds.values()):7.1f} s  together, {len(seconds)} tests that take 5 ms or more")


if __name__ == "__main__":
    main()
