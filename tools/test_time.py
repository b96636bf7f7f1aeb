"""Where the tests spend their time, and which of their variants run in ``make test-all`` only.

Reads what ``pytest --durations=0 -vv`` prints (set-up, call and clean-up of every test, in seconds) and prints the sum of every
folder. With ``--write`` it also chooses the long variants: of a parametrized test, those that take ``--seconds`` or more, but
for its quickest one and those of ``KEPT``, so that no test is left out of ``make test`` altogether. They are written into
``tests/support/long_variants.json``, and ``tests/conftest.py`` marks them as slow.

    python -m pytest -n 2 -m "not slow" --durations=0 -vv tests > times.log
    python tools/test_time.py times.log
    python tools/test_time.py times.log --write   # times of all tests: without -m "not slow"
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

TABLE = Path(__file__).parents[1] / "tests/support/long_variants.json"
#: variants that stay in ``make test`` whatever they take: they are what their test is about
KEPT = {
    "test_every_layer_of_the_zoo_agrees_with_the_runtime": ("activations", "lstm", "norms", "resnet18", "vit-sdpa"),
    "test_training_and_inference_are_one_graph_each_and_bit_equal": ("conv",),
    "test_the_simulation_comes_nearer_to_the_float_model": ("qdrop",),
    "test_the_steps_are_those_of_the_host": ("lstm-fixed",),
    "test_loops_that_clear_the_gradients_of_the_model_alone_train_as_others": ("1-compiled",),
}
#: tests of which the first one to run pays for an import, and no variant is long
LEVEL = (
    "test_importing_stays_light",
    "test_chain_keeps_its_signal",
    "test_modules_of_one_hidden_function_are_compiled_with_their_quantizers",
    "test_cost_grows_linearly",
    "test_one_site_and_all_but_one_are_those_of_the_simulation",
    "test_models_tell_their_origin",
)
_LINE = re.compile(r"\s*(\d+\.\d+)s (?:call|setup|teardown)\s+(\S.*)")


def times(text: str) -> dict[str, float]:
    """Seconds of every test that a log names."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if match := _LINE.fullmatch(line):
            found[match[2]] += float(match[1])
    return dict(found)


def by_folder(seconds: dict[str, float]) -> dict[str, float]:
    """Sum of every folder with tests, the largest first."""
    found: defaultdict[str, float] = defaultdict(float)
    for test, time in seconds.items():
        found[str(Path(test.partition("::")[0]).parent)] += time
    return dict(sorted(found.items(), key=lambda row: -row[1]))


def long_variants(seconds: dict[str, float], limit: float) -> dict[str, list[str]]:
    """Test -> its variants of ``limit`` seconds or more; the quickest of a test is none of them.

    >>> long_variants({"a.py::test[x]": 1.0, "a.py::test[y]": 2.0, "a.py::other": 9.0}, 0.5)
    {'a.py::test': ['y']}
    """
    variants: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for test, time in seconds.items():
        if test.endswith("]"):
            name, _, variant = test[:-1].partition("[")
            variants[name][variant] = time
    chosen = {}
    for name, known in sorted(variants.items()):
        short = name.rpartition("::")[2]
        if short in LEVEL:
            continue
        kept = {min(known, key=lambda variant: known[variant]), *KEPT.get(short, ())}
        if found := sorted(v for v, time in known.items() if time >= limit and v not in kept):
            chosen[name] = found
    return chosen


def main() -> None:
    """Print the sums, and write the table when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="what pytest printed")
    parser.add_argument("--write", action="store_true", help=f"choose the long variants anew: {TABLE.name}")
    parser.add_argument("--seconds", type=float, default=0.12, help="of a long variant (default: 0.12)")
    options = parser.parse_args()
    seconds = times(options.log.read_text(encoding="utf-8"))
    for folder, time in by_folder(seconds).items():
        print(f"{time:7.1f} s  {folder}")
    print(f"{sum(seconds.values()):7.1f} s  together, {len(seconds)} tests that take 5 ms or more")
    if options.write:
        table = long_variants(seconds, options.seconds)
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        print(f"{sum(map(len, table.values()))} long variants of {len(table)} tests in {TABLE}")


if __name__ == "__main__":
    main()
