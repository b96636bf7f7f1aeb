"""What scaled channels (AWQ) do to the perplexity of a language model with few bits of weight, alone and before other methods.

    python benchmarks/awq.py                            # some ten minutes on one core
    python benchmarks/awq.py --formats int4 --methods nearest

``stories260k`` on 128 stories, 32 to calibrate; weights per channel, activations in float, the table that embedding and
output layer share in int8. It is a small network without outliers; "outliers" is the same function with four channels
of every norm sixteen times larger, as large language models have them. Needs the developer data set (see tests/support/data.py).
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import measure  # first: it puts the repository on the path
from torch import Tensor

from bitwright import Rule
from bitwright.core.numerics.spec import Preset, weight_spec
from bitwright.core.placement.config import make_rules
from bitwright.torch import QuantizationSimModel, apply_reconstruction, awq_model
from tests.methods.transformer import with_outliers
from tests.support import data

METHODS = {"nearest": (), "seq_mse": ("seq_mse",), "gptq": ("gptq",), "seq_mse, gptq": ("seq_mse", "gptq")}
COLUMNS = [f"{what}{awq}" for what in ("as trained", "outliers") for awq in ("", ", awq")]


def score(format: str, methods: Sequence[str], outliers: bool, awq: bool, batches: Sequence[Tensor]) -> float:
    """Perplexity of the simulation."""
    model = data.trained("stories260k")
    if outliers:
        with_outliers(model, batches[0][:1])
    if awq:
        awq_model(model, batches, weight=weight_spec(format))
    ends = [Rule(f"role:{role}", port="weight", format="int8") for role in ("embedding", "lm_head")]
    rules = make_rules(None, Preset(weight_spec(format), None)).extended(ends)
    sim = QuantizationSimModel(model, batches[0][:1], config_file=rules)
    sim.compute_encodings(batches, progress=False)
    for method in methods:
        apply_reconstruction(sim, batches, method, progress=False)
    return data.perplexity(sim.model, data.stories())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["int4", "int3"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args(arguments)
    logging.getLogger("bitwright").setLevel(logging.ERROR)
    batches = list(data.stories("calib")[:, :-1].split(8))
    rows: list[list[str]] = []
    raw: list[dict[str, object]] = []
    for format in options.formats:
        for name in options.methods:
            found = [
                score(format, METHODS[name], outliers, awq, batches)
                for outliers in (False, True)
                for awq in (False, True)
            ]
            rows.append([f"{format}, {name}", *(f"{value:.3f}" for value in found)])
            raw.append({"format": format, "method": name, **dict(zip(COLUMNS, found, strict=True))})
            print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    title = "Perplexity of stories260k with few bits of weight, with and without scaled channels"
    columns = ["weights", *COLUMNS]
    measure.show(title, columns, rows)
    measure.save(options.json, options.markdown, title, columns, rows, raw)


if __name__ == "__main__":
    main()
