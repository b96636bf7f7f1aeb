"""AIMET's ways to export, and its names of files."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitwright.aimet_common.absent import differs
from bitwright.errors import ConfigError

# torch.onnx.export's arguments that mean something and have no effect here
_IGNORED = ("opset_version", "training")


def export(
    sim: Any, write: Callable[..., Any], call: tuple[Any, Any, Any, Any], form: dict[str, Any], options: dict[str, Any]
) -> tuple[Path, ...]:
    """Write AIMET's files: the float ``<prefix>.onnx``, ``<prefix>.encodings`` and ``<prefix>_torch.encodings``.

    Every tensor that lies on a grid has an entry; ``<prefix>_sites.json`` says which are a simulation's own.
    ``<prefix>_qdq.onnx``, with QuantizeLinear and DequantizeLinear, is what other runtimes load.

    Returns:
        The files.

    Raises:
        ConfigError: TorchScript is asked for.
    """
    path, prefix, dummy_input, onnx_export_args = call
    if form["export_to_torchscript"]:
        raise ConfigError("export_to_torchscript", "TorchScript is not written here", "leave it out: ONNX is written")
    if form["use_embedded_encodings"]:
        differs("export(use_embedded_encodings=True)", f"{prefix}_qdq.onnx has the encodings embedded, always")
    if onnx_export_args is not None:
        named = onnx_export_args if isinstance(onnx_export_args, dict) else vars(onnx_export_args)
        options = {**onnx_options(named), **options}
    encodings = form["filename_prefix_encodings"] or prefix
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = write(work, prefix, dummy_input, samples=False, **{"every_tensor": True, **options})
        _tell_fixed_batch(made, options)
        target = folder / f"{encodings}_torch.encodings"
        sim.save_encodings(target, options.get("encoding_version", "1.0.0"))
        files = [target, _moved(made.encodings, folder / f"{encodings}.encodings")]
        files.append(_moved(made.sites, folder / f"{encodings}_sites.json"))
        if form["export_model"]:
            files.append(_moved_model(made.float_model, folder / f"{prefix}.onnx"))
            files.append(_moved_model(made.qdq, folder / f"{prefix}_qdq.onnx"))
    return tuple(files)


def onnx_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """What our export makes of ``torch.onnx.export``'s keywords; what has no counterpart warns."""
    found: dict[str, Any] = {}
    if arguments.get("dynamic_shapes"):
        found["dynamic_shapes"] = arguments["dynamic_shapes"]
    elif arguments.get("dynamic_axes"):
        found["dynamic_batch"] = "auto"  # an example of one sample would fix the axis
        differs("export(dynamic_axes=...)", "the first axis of every input varies; dynamic_shapes= names others")
    found.update({name: list(arguments[name]) for name in ("input_names", "output_names") if arguments.get(name)})
    ignored = [name for name in _IGNORED if arguments.get(name) is not None]
    if ignored:
        differs(f"export({', '.join(ignored)})", "without effect: the opset is 21, in evaluation mode")
    return found


def _tell_fixed_batch(made: Any, options: dict[str, Any]) -> None:
    """Warn where the first axis was to vary and could not."""
    for note in made.notes if options.get("dynamic_batch") else ():
        if note.startswith("batch:"):
            differs("export(dynamic_axes=...)", note)


def _moved(source: Path, target: Path) -> Path:
    os.replace(source, target)
    return target


def _moved_model(source: Path, target: Path) -> Path:
    """``source`` under another name; weights in a file of their own go with it."""
    if not source.with_name(f"{source.name}.data").exists():
        return _moved(source, target)
    import onnx

    onnx.save(onnx.load(str(source)), str(target), save_as_external_data=True, location=f"{target.name}.data")
    return target


class OnnxExporter:
    """``sim.onnx``."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim

    def export(
        self,
        args: Any,
        f: str | Path,
        *,
        encoding_version: str | None = None,
        export_int32_bias: bool | None = None,
        force_activation_as: str | None = "unsigned",
        **kwargs: Any,
    ) -> None:
        """Write the float model to ``f`` and its encodings beside it, with the suffix ``.encodings``.

        ``<stem>_sites.json`` says which of them are a simulation's own.

        Raises:
            TypeError: ``f`` is not a path.
        """
        made, work = _exported(
            self._sim, args, f, export_int32_bias, force_activation_as, encoding_version or "1.0.0", kwargs
        )
        with work:
            target = Path(f)
            _moved(made.encodings, target.with_suffix(".encodings"))
            _moved(made.sites, target.with_name(f"{target.stem}_sites.json"))
            _moved_model(made.float_model, target)


def export_qdq(
    model: Any,
    args: Any,
    f: Any,
    *,
    export_int32_bias: bool = True,
    prequantize_constants: bool = False,
    force_activation_as: str | None = "unsigned",
    **kwargs: Any,
) -> None:
    """Write one ONNX model with QuantizeLinear and DequantizeLinear to ``f``, a path or a binary file.

    Args:
        model: a simulation, or its model.
        prequantize_constants: weights are always stored as integers here.
    """
    from bitwright.aimet_torch import _modules

    record = _modules.record_of(model)
    sim = model if record is None else record.sim
    made, work = _exported(sim, args, f, export_int32_bias, force_activation_as, "1.0.0", kwargs)
    with work:
        if isinstance(f, io.IOBase):
            f.write(made.qdq.read_bytes())
        else:
            _moved_model(made.qdq, Path(f))


def _exported(
    sim: Any, args: Any, f: Any, bias: bool | None, activation: str | None, version: str, kwargs: dict[str, Any]
) -> tuple[Any, tempfile.TemporaryDirectory[str]]:
    if not isinstance(f, (str, os.PathLike, io.IOBase)):
        raise TypeError(f"f is a path, not a {type(f).__name__}")
    if activation == "signed":
        raise ConfigError("force_activation_as", "'signed' grids are not written here", "use 'unsigned' or None")
    folder = None if isinstance(f, io.IOBase) else Path(f).resolve().parent
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    work = tempfile.TemporaryDirectory(dir=folder)
    asked = onnx_options(kwargs)
    try:
        made = sim.write_artefacts(
            work.name, "model", args, encoding_version=version, samples=False, every_tensor=True,
            bias="float" if bias is False else "int32",
            activation="as_is" if activation is None else activation, **asked,
        )  # fmt: skip
    except BaseException:
        shutil.rmtree(work.name, ignore_errors=True)
        raise
    _tell_fixed_batch(made, asked)
    return made, work
