"""Widths and bits of weights chosen together, beside widths alone and bits alone, at equal bytes of ResNet-20.

    python benchmarks/compression_bits.py            # some four minutes on one free core

The bytes that are left are a part of those in float; weights are chosen from 4 and 8 bits together with the widths, 8 bits and
widths, 4 bits and widths, or 3, 4 and 8 bits alone (the cap leaves no group narrower). Choices are fitted to 64 training images.
Then batch norms are folded, the ranges of weights chosen by the error of the outputs (``seq_mse``), biases corrected, on 128
others; activations have 8 bits. Top-1 is of 1,000 test images, nothing is trained. Needs the developer data set.
"""

from __future__ import annotations

import argparse
import logging

import measure  # first: it puts the repository on the path
from pruning import SUBJECTS, few

import bitwright
from tests.support import data

CHOICES = {
    "widths and 4 or 8 bits": ((4, 8), 0.9),
    "widths, 8 bits": ((8,), 0.9),
    "widths, 4 bits": ((4,), 0.9),
    "3, 4 or 8 bits": ((3, 4, 8), 0.01),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=float, default=0.11, help="of the bytes that may be left")
    part = parser.parse_args().part
    logging.disable(logging.WARNING)
    model, images, test = SUBJECTS["resnet20_aux"].model(), data.cifar("train").x, few(data.cifar(), 1000)
    rows = []
    for name, (bits, cap) in CHOICES.items():
        found = bitwright.compress(model, [images[:64]], {"bytes": part}, bits=bits, cap=cap, progress=False)
        recipe = ["fold", "seq_mse", "bias_correction"]
        rounded = bitwright.quantize(
            found.model, [images[64:192]], recipe=recipe, config_file=dict(found.rules), progress=False
        )
        left = [f"{found.after[cost] / found.before[cost]:.1%}" for cost in ("bytes", "macs")]
        rows.append([name, *left, f"{data.accuracy(rounded.sim.model, test):.1f}"])
        print(rows[-1], flush=True)
    measure.show("Widths and bits of ResNet-20", ["chosen", "bytes left", "MACs left", "top-1"], rows)


if __name__ == "__main__":
    main()
