"""The files of AIMET's layer outputs: raw float32 numbers, one folder per input."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.report.charts import write_data


class RawFiles:
    """Writes ``inputs/input_<n>.raw`` and ``outputs/layer_outputs_<n>/<name>.raw`` below a folder, n counting the inputs."""

    def __init__(self, dir_path: str) -> None:
        self.folder, self.count = Path(dir_path), 0

    def save(self, inputs: Any, outputs: Mapping[str, Any]) -> None:
        """Write one input with the outputs of every layer, and ``layer_output_name_order.json``."""
        many = isinstance(inputs, tuple | list)
        for i, value in enumerate(inputs if many else [inputs]):
            name = f"input_{self.count}/{i}" if many else f"input_{self.count}"
            _write(self.folder / "inputs" / f"{name}.raw", value)
        for name, value in outputs.items():
            _write(self.folder / "outputs" / f"layer_outputs_{self.count}" / f"{file_name(name)}.raw", value)
        names = {"layer_output_names": [file_name(name) for name in outputs]}
        write_data(self.folder / "layer_output_name_order.json", names)
        self.count += 1


def file_name(name: str) -> str:
    """A name that a file may have: what is not a letter, digit, dot or line becomes a line."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name).strip("_") or "layer"


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = value.detach().cpu().float().numpy() if hasattr(value, "detach") else value
    np.ascontiguousarray(array, np.float32).tofile(path)
