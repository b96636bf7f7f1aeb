"""The command that makes models smaller by fewer operations: ``compress``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from bitwright.cli.app import command, methods_option, output_option
from bitwright.cli.options import Data, JsonFile, Metric, OnnxFile, Reading, write_json
from bitwright.errors import ConfigError, close_matches
from bitwright.terminal import print_report

_METHODS = ("prune", "svd", "drop_blocks", "drop_experts", "replace_blocks", "sparsify")
#: method -> why it takes no target, and the remedy
_WITHOUT_TARGET = {
    "drop_experts": ("experts are taken out by their number", "write --keep 0.75"),
    "sparsify": ("zeros leave as many multiplications", "write --sparsity 0.5, or --method svd"),
}


@command("compress")
def compress_model(
    model: OnnxFile,
    data: Data,
    out: Annotated[Path, output_option(help="Folder for the model; created if missing.")],
    reading: Reading,
    judged: Metric,
    method: Annotated[
        str,
        methods_option(
            help="prune: remove channels, heads and hidden units; svd: low-rank factors; drop_blocks: take out branches of "
            "residual sums; drop_experts: take experts out of mixtures; replace_blocks: make branches linear layers, or take "
            "them out; sparsify: zeros (half of each weight).",
            autocompletion=lambda incomplete: [m for m in _METHODS if m.startswith(incomplete)],
        ),
    ] = "prune",
    macs: Annotated[float | None, methods_option(help="Part of the multiplications that may be left, as 0.5.")] = None,
    params: Annotated[float | None, methods_option(help="Part of the parameters that may be left, as 0.5.")] = None,
    size: Annotated[
        str | None,
        methods_option("--bytes", help="Bytes of the parameters that may be left, as 0.5 or 300kB; with prune."),
    ] = None,
    memory: Annotated[
        str | None,
        methods_option(help="Bytes of parameters and of activations at the peak, as 0.5 or 256KiB; with prune."),
    ] = None,
    cache: Annotated[
        str | None,
        methods_option(
            "--cache-bytes", help="Bytes of keys and values of attention that may be left, as 0.5; with prune."
        ),
    ] = None,
    active: Annotated[
        float | None,
        methods_option(
            "--active-params", help="Part of the parameters that one token reads, of experts those chosen; with prune."
        ),
    ] = None,
    ms: Annotated[
        float | None, methods_option(help="Part of the milliseconds in ONNX Runtime that may be left; with prune.")
    ] = None,
    bits: Annotated[
        str | None,
        methods_option(help="Bits that a weight may have, as 4,8: chosen with the widths, for --bytes; with prune."),
    ] = None,
    count: Annotated[
        int | None, methods_option(help="With drop_blocks: how many blocks go, in place of --macs or --params.")
    ] = None,
    keep: Annotated[float, methods_option(help="With drop_experts: the part of the experts that stays.")] = 0.5,
    resume: Annotated[
        Path | None, output_option(help="Folder that keeps what prune measures, to resume from after a kill.")
    ] = None,
    workers: Annotated[int, methods_option(min=1, help="With prune: processes that measure parts of the model.")] = 1,
    sparsity: Annotated[float, methods_option(help="With sparsify: the part of each weight that becomes zero.")] = 0.5,
    pattern: Annotated[
        str, methods_option(help="With sparsify: unstructured, 2:4, or blocks of outputs and inputs as 4x1.")
    ] = "unstructured",
    prefix: Annotated[str | None, output_option(help="Name of the file; the model's name by default.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Make an ONNX model compute less: prune channels, write layers as low-rank factors, take out blocks.

    The file that is written is an ordinary float model, which `bitwright
    quantize` takes next. Without --metric the outputs alone decide.

    \b
    Examples:
      bitwright compress model.onnx --data samples.npz --macs 0.5 --out small/
      bitwright compress model.onnx --data samples.npz --memory 256KiB --macs 0.6 --out small/
      bitwright compress model.onnx --data samples.npz --bytes 0.1 --bits 4,8 --out small/
      bitwright compress model.onnx --data photos/ --method svd --macs 0.75 --out small/
      bitwright compress model.onnx --data samples.npz --method svd --params 0.6 \\
          --metric accuracy --labels labels.npy --out small/
      bitwright compress model.onnx --data samples.npz --method drop_blocks --count 2 --out small/
      bitwright compress model.onnx --data samples.npz --method drop_experts --keep 0.75 --out small/
      bitwright compress model.onnx --data samples.npz --method replace_blocks --macs 0.8 --out small/
      bitwright compress model.onnx --data samples.npz --method sparsify --pattern 2:4 --out small/
    """
    if method not in _METHODS:
        raise ConfigError(
            "--method", f"there is no method {method!r}{close_matches(method, _METHODS)}", f"use {', '.join(_METHODS)}"
        )  # fmt: skip
    asked = {
        "macs": macs,
        "params": params,
        "active_params": active,
        "bytes": size,
        "memory": memory,
        "cache_bytes": cache,
    }
    target = _target(method, {**asked, "ms": ms}, count)
    levels = _bits(method, bits)
    from bitwright.export.files.onnx_file import save_model
    from bitwright.onnx import load_model
    from bitwright.onnx.model.data import input_specs

    loaded = load_model(model)
    batches = list(reading.batches(data, input_specs(loaded.model)))
    score, lower = judged.of_sessions(loaded.model, lambda: batches)
    name = prefix or model.stem
    report: Any
    if method == "prune":
        from bitwright.compression.compress import compress

        report = compress(
            model, batches, target, metric=score, lower_is_better=lower, bits=levels, resume=resume, workers=workers
        )
        report.save(out, name)
        print_report(str(report))
    else:
        from bitwright.compression.depth import drop_blocks
        from bitwright.compression.experts import drop_experts
        from bitwright.compression.replace import replace_blocks
        from bitwright.compression.sparsify import sparsify_model
        from bitwright.compression.svd import svd_model

        if method == "svd":
            report = svd_model(loaded, batches, macs=macs, params=params, metric=score, lower_is_better=lower)
        elif method == "drop_blocks":
            report = drop_blocks(loaded, batches, count=count, macs=macs, params=params)
        elif method == "drop_experts":
            report = drop_experts(loaded, batches, keep=keep)
        elif method == "replace_blocks":
            report = replace_blocks(loaded, batches, macs=macs, params=params, metric=score, lower_is_better=lower)
        else:
            report = sparsify_model(loaded, batches, sparsity=sparsity, pattern=pattern)
        out.mkdir(parents=True, exist_ok=True)
        save_model(loaded.model, out / f"{name}.onnx")
        print_report(f"{report.summary}\n{report}")
    write_json(json_file, report)


def _target(method: str, given: dict[str, float | str | None], count: int | None) -> dict[str, float | str]:
    """The targets that were given.

    Raises:
        ConfigError: the method takes none, or others.
    """
    target = {name: _number(part) for name, part in given.items() if part is not None}
    if count is not None and method != "drop_blocks":
        raise ConfigError("--count", f"{method} takes no blocks out", "write --method drop_blocks, or --macs 0.5")
    if not target and count is None and method not in _WITHOUT_TARGET:
        remedy = "write --count 2 or --macs 0.7" if method == "drop_blocks" else "write --macs 0.5 or --params 0.5"
        raise ConfigError("--macs", "no target is given", remedy)
    if target and method in _WITHOUT_TARGET:
        raise ConfigError("--macs", *_WITHOUT_TARGET[method])
    if method in ("svd", "drop_blocks", "replace_blocks") and not target.keys() <= {"macs", "params"}:
        what = "low-rank factors are" if method == "svd" else "blocks are"
        raise ConfigError(
            "--bytes, --memory, --cache-bytes, --active-params, --ms",
            f"{what} chosen by --macs and --params",
            "write --macs 0.5",
        )
    return target


def _bits(method: str, given: str | None) -> tuple[int, ...]:
    """Numbers from ``4,8``.

    Raises:
        ConfigError: the method chooses none, or one is not a number.
    """
    if given is None:
        return ()
    if method != "prune":
        raise ConfigError("--bits", f"{method} chooses no bits", "leave it out, and run `bitwright quantize` next")
    try:
        return tuple(int(n) for n in given.split(","))
    except ValueError as error:
        raise ConfigError("--bits", f"{given!r} is not numbers with commas between them", "write --bits 4,8") from error


def _number(part: float | str) -> float | str:
    """A part as a number; bytes with a unit as they are."""
    try:
        return float(part)
    except ValueError:
        return part
