"""A decoder file in its engines: does it generate what was simulated? One command, a few minutes.

    python benchmarks/decoder_export.py --markdown benchmarks/results/decoder_export.md

``stories260k`` as a Llama of transformers, weights in int4 blocks of 32, its ``down_proj`` layers (172 inputs, no multiple of
32) in float. Tokens are 32 greedy ones after each of 8 beginnings of stories. Needs the developer data set (see
tests/support/data.py), ``onnxruntime-genai``, ``openvino``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import measure  # first of ours: it puts the repository on the path

from bitwright.compare.generation import Generated
from bitwright.compare.verify import verify_folder
from bitwright.llm import export_decoder, export_openvino
from bitwright.llm.engines import open_engine
from bitwright.torch import QuantizationSimModel
from tests.support import data

COLUMNS = ("engine", "attention", "prompts with all 32 tokens equal", "tokens equal", "file (KiB)")
_PROMPT = 12


def row(engine: str, attention: str, folder: Path, generated: Sequence[Generated], weights: str) -> list[str]:
    opened, equal, whole = open_engine(folder), 0, 0
    for one in generated:
        made = opened.generate(one.prompt, len(one.tokens))
        same = [a == b for a, b in zip(made, one.tokens, strict=False)]
        first = same.index(False) if False in same else len(same)
        equal, whole = equal + first, whole + (first == len(one.tokens))
    count = len(generated) * len(generated[0].tokens)
    size = sum(path.stat().st_size for path in folder.glob(weights)) / 1024
    return [engine, attention, f"{whole} of {len(generated)}", f"{equal} of {count}", f"{size:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--quick", action="store_true", help="GroupQueryAttention and OpenVINO only")
    arguments = parser.parse_args()
    batch = data.stories("calib")[:4, :64]
    prompts = [[int(token) for token in story[:_PROMPT]] for story in data.stories("calib")[:8]]
    rules = {"preset": "w4g32", "rules": [{"match": "*down_proj*", "all": "float"}]}
    sim = QuantizationSimModel(data.stories_of_transformers(), {"input_ids": batch}, config_file=rules)
    sim.compute_encodings([{"input_ids": batch}], progress=False)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        for attention in ("grouped",) if arguments.quick else ("grouped", "plain"):
            made = export_decoder(sim, room / attention, prompts=prompts, attention=attention)  # type: ignore[arg-type]
            report = verify_folder(room / attention)
            told = [f"{sum(r.equal == r.tokens for r in report.generated)} of {len(report.generated)}"]
            told.append(f"{sum(r.equal for r in report.generated)} of {sum(r.tokens for r in report.generated)}")
            size = f"{(room / attention / 'model.onnx').stat().st_size / 1024:.0f}"
            rows.append(["ONNX Runtime (bitwright verify)", attention, *told, size])
            rows.append(row("onnxruntime-genai", attention, room / attention, made.generated, "model.onnx"))
        ov = export_openvino(sim, room / "ov", prompts=prompts)
        rows.append(row("OpenVINO, stateful IR", "plain", ov.folder, ov.generated, "openvino_model.*"))
    title = (
        "A decoder of 260 thousand parameters, weights in int4, in its engines: greedy tokens equal to the simulation"
    )
    measure.show(title, COLUMNS, rows)
    measure.save(None, arguments.markdown, title, COLUMNS, rows, None)


if __name__ == "__main__":
    main()
