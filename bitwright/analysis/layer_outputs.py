"""Write the output of every layer for an input, in float and simulated."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bitwright.analysis.subject import open_subject
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ConfigError, checks_arguments, close_matches
from bitwright.export.encodings.of_simulation import read_sites
from bitwright.export.files.atomic import file_error
from bitwright.export.samples import find_export

Array = NDArray[Any]
Form = Literal["npy", "safetensors", "raw"]
FORMS: tuple[Form, ...] = ("npy", "safetensors", "raw")


def layer_values(sim: Any, batch: Any) -> Iterator[tuple[str, Array, Array]]:
    """``(name, in float, simulated)`` of what every operator makes of ``batch``, in execution order.

    An operator with several results has ``name[0]``, ``name[1]``; one that runs several times ``name``, ``name#1``, and so on.
    Values that are not arrays (sequences) are left out. Only values that are still to be read are held.

    Args:
        sim: a calibrated simulation of either front end.
        batch: as the model takes it.

    Raises:
        CalibrationError: the simulation is not calibrated.
        ModelError: the model fails on the batch.
    """
    import torch

    from bitwright.methods.rounding.program import run_step

    subject = open_subject(sim)
    with subject.exclusive(), torch.no_grad():
        model = subject.steps()
        program, start = model.program(batch)
        states = (dict(start), dict(start))
        runs: dict[str, int] = {}
        for i, step in enumerate(program.steps):
            made = []
            for state, quantize in zip(states, (None, model.quantize), strict=True):
                made.append(run_step(step, state, program.constants, quantize))
                _keep(state, step, made[-1], program.last_read, i)
            if step.op:
                runs[step.op] = count = runs.get(step.op, -1) + 1
                yield from _named(step.op + (f"#{count}" if count else ""), *made)


def _keep(state: dict[int, Any], step: Any, results: Any, last_read: Mapping[int, int], here: int) -> None:
    """Release values that no later operator reads."""
    for value in step.reads:
        if last_read.get(value) == here:
            state.pop(value, None)
    for value, result in zip(step.writes, results, strict=True):
        if last_read.get(value, -1) > here:
            state[value] = result


def _named(name: str, real: Any, quantized: Any) -> Iterator[tuple[str, Array, Array]]:
    for i, (one, other) in enumerate(zip(real, quantized, strict=True)):
        if hasattr(one, "detach") and hasattr(other, "detach"):
            yield (f"{name}[{i}]" if len(real) > 1 else name), _array(one), _array(other)


def _array(tensor: Any) -> Array:
    """A tensor as numpy has it; half precision as float32."""
    half = tensor.is_floating_point() and tensor.dtype.itemsize == 2
    found: Array = (tensor.float() if half else tensor).detach().cpu().numpy()
    return found


class LayerOutputUtil:
    """Writes the outputs of every layer, of the float and of the simulated model, to files.

    Every call of :meth:`generate_layer_outputs` makes a folder ``batch_<n>``::

        names.json                  what lies where, in execution order
        inputs/<name>.npy
        float/<layer>.npy           float.safetensors with form="safetensors"
        quantized/<layer>.npy       quantized.safetensors

    ``form="raw"`` writes float32 numbers without a head, one folder per sample (``float/layer_outputs_<i>/<layer>.raw``).

    Args:
        sim: a calibrated simulation of either front end.
        dir_path: folder, created if missing.
        form: ``"npy"``, ``"safetensors"`` or ``"raw"``.
        exported: a folder that ``sim.export`` wrote: files are called as the tensors of the exported model are, where a
            tensor of it is the output of a layer.
        prefix: stem of the export's files; needed when the folder holds several.

    Raises:
        ConfigError: there is no such form.
        ExportError: ``exported`` holds no export.
    """

    @checks_arguments
    def __init__(
        self,
        sim: Any,
        dir_path: str | os.PathLike[str],
        *,
        form: Form = "npy",
        exported: str | os.PathLike[str] | None = None,
        prefix: str | None = None,
    ) -> None:
        if form not in FORMS:
            near = close_matches(str(form), FORMS)
            raise ConfigError("form", f"there is no form {form!r}{near}", f"use one of {', '.join(FORMS)}")
        self.sim, self.folder, self.form = sim, Path(dir_path), form
        self._tensors = {} if exported is None else names_of_export(Path(exported), prefix)

    @checks_arguments
    def generate_layer_outputs(self, batch: Any) -> Path:
        """Run ``batch`` and write what every layer makes of it; the folder appears whole or not at all.

        Returns:
            The folder.

        Raises:
            CalibrationError: the simulation is not calibrated.
            ModelError: the model fails on the batch.
            ExportError: the files cannot be written.
        """
        folder = self._next()
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            hidden = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            try:
                self._fill(hidden, batch)
                hidden.chmod(0o755)
                hidden.rename(folder)
            finally:
                shutil.rmtree(hidden, ignore_errors=True)
        except OSError as error:
            raise file_error(folder, error) from error
        return folder

    def _next(self) -> Path:
        count = 0
        while (found := self.folder / f"batch_{count}").exists():
            count += 1
        return found

    def _fill(self, folder: Path, batch: Any) -> None:
        """Write everything of one batch."""
        write, called = _FORMS[self.form], _Names()
        for i, (key, array) in enumerate(_arrays(batch)):
            write(folder, "inputs", called(f"inputs/{key or f'input_{i}'}"), array)
        order = []
        for name, real, quantized in layer_values(self.sim, batch):
            tensor = self._tensors.get(name)
            file = called(tensor or name)
            write(folder, "float", file, real)
            write(folder, "quantized", file, quantized)
            row = {"layer": name, "tensor": tensor, "file": file, "shape": list(real.shape), "dtype": str(real.dtype)}
            order.append({**row, "sqnr_db": _sqnr(real, quantized)})
        if self.form == "safetensors":
            _join(folder)
        text = json.dumps({"form": self.form, "order": order}, indent=1)
        (folder / "names.json").write_text(text, encoding="utf-8")


def names_of_export(folder: Path, prefix: str | None) -> dict[str, str]:
    """Layer -> tensor of the exported model, of every site of an output."""
    stem = find_export(folder, prefix)
    found = {}
    for name, site in read_sites(folder / f"{stem}_sites.json").sites.items():
        if site.role == "output" and site.tensors:
            layer, _, index = name.removesuffix("]").rpartition(".output[")
            found[layer if index == "0" else f"{layer}[{index}]"] = site.tensors[0]
            found[f"{layer}[{index}]"] = site.tensors[0]
    return found


class _Names:
    """Unique file names."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def __call__(self, wanted: str) -> str:
        """``wanted``, or what is closest to it among the names that are left."""
        stem = (re.sub(r"[^\w.\-#\[\]]+", "_", wanted.removeprefix("inputs/")).strip("_.") or "layer")[:180]
        place = "inputs/" if wanted.startswith("inputs/") else ""
        unique, i = stem, 1
        while place + unique.lower() in self._taken:
            unique, i = f"{stem}_{i}", i + 1
        self._taken.add(place + unique.lower())
        return unique


def _arrays(batch: Any) -> Iterator[tuple[str | None, Array]]:
    """The arrays of a batch, with the names of a mapping's."""
    stack: list[tuple[str | None, Any]] = [(None, batch)]
    while stack:
        name, item = stack.pop()
        if isinstance(item, Mapping):
            stack.extend((str(key), value) for key, value in reversed(list(item.items())))
        elif isinstance(item, tuple | list):
            stack.extend((None, value) for value in reversed(item))
        elif hasattr(item, "detach"):
            yield name, item.detach().cpu().numpy()
        elif hasattr(item, "shape"):
            yield name, np.asarray(item)


def _sqnr(one: Array, other: Array) -> float | None:
    if one.shape != other.shape or one.dtype.kind != "f" or not one.size:
        return None
    both = np.isfinite(one) & np.isfinite(other)
    found = float(sqnr(one[both].astype(np.float64), other[both].astype(np.float64)))
    return round(found, 2) if np.isfinite(found) else None


# ---- forms


def _as_npy(folder: Path, kind: str, name: str, array: Array) -> None:
    (folder / kind).mkdir(exist_ok=True)
    np.save(folder / kind / f"{name}.npy", array, allow_pickle=False)


def _as_raw(folder: Path, kind: str, name: str, array: Array) -> None:
    numbers = np.ascontiguousarray(array, np.float32)
    for i, sample in enumerate(numbers if array.ndim else numbers.reshape(1)):
        place = folder / kind / (f"layer_outputs_{i}" if kind != "inputs" else f"sample_{i}")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.raw").write_bytes(sample.tobytes())


def _join(folder: Path) -> None:
    """One safetensors file instead of a folder of arrays, for each kind."""
    from safetensors.numpy import save_file

    for kind in ("inputs", "float", "quantized"):
        parts = sorted((folder / kind).glob("*.npy"))
        arrays = {path.stem: np.ascontiguousarray(np.load(path, allow_pickle=False)) for path in parts}
        save_file(arrays, folder / f"{kind}.safetensors")
        shutil.rmtree(folder / kind, ignore_errors=True)


#: form -> how one array is written
_FORMS: dict[str, Callable[[Path, str, str, Array], None]] = {
    "npy": _as_npy,
    "safetensors": _as_npy,  # joined at the end
    "raw": _as_raw,
}
