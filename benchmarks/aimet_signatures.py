"""Every public function, class and method of AIMET against the layer's: which signatures match.

The sources of AIMET are read, not imported: give the folder that holds ``aimet_torch`` and ``aimet_onnx`` (the wheels,
unpacked)::

    python benchmarks/aimet_signatures.py FOLDER [--list]

A signature matches when a call written for AIMET's binds to ours: the same parameters in the same order where they are
positional, by the same names, and none of ours beyond them without a default. What :mod:`bitwright.aimet_common.names` lists
is counted apart, as its capability does not exist here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bitwright.aimet_common.names import absence  # noqa: E402

# Modules whose names AIMET documents, and where their definitions stand if not there.
PUBLIC = {
    "aimet_torch.quantsim": ["quantsim/quantsim.py", "_base/quantsim.py"],
    "aimet_torch.quantsim.config_utils": ["quantsim/config_utils.py"],
    "aimet_torch.nn": ["nn/base.py", "nn/true_quant.py", "nn/__init__.py"],
    "aimet_torch.nn.modules.custom": ["_base/nn/modules/custom.py", "nn/modules/custom.py"],
    "aimet_torch.quantization.affine": [
        "quantization/affine/encoding.py", "quantization/affine/quantizer.py", "quantization/affine/backends/__init__.py",
    ],
    "aimet_torch.quantization.float": ["quantization/float/encoding.py", "quantization/float/quantizer.py"],
    "aimet_torch.quantization": ["quantization/tensor.py"],
    "aimet_torch.quantization.base": ["quantization/base/encoding.py", "quantization/base/quantizer.py"],
    "aimet_torch.quantization.encoding_analyzer": ["quantization/encoding_analyzer.py"],
    "aimet_torch.batch_norm_fold": ["batch_norm_fold.py", "_base/batch_norm_fold.py"],
    "aimet_torch.cross_layer_equalization": ["cross_layer_equalization.py", "common/cross_layer_equalization.py"],
    "aimet_torch.adaround.adaround_weight": ["_base/adaround/adaround_weight.py", "adaround/adaround_weight.py"],
    "aimet_torch.seq_mse": ["seq_mse.py", "_base/seq_mse.py"],
    "aimet_torch.bn_reestimation": ["bn_reestimation.py"],
    "aimet_torch.quant_analyzer": ["_base/quant_analyzer.py", "quant_analyzer.py"],
    "aimet_torch.layer_output_utils": ["layer_output_utils.py"],
    "aimet_torch.model_preparer": ["model_preparer.py"],
    "aimet_torch.model_validator.model_validator": ["model_validator/model_validator.py"],
    "aimet_torch.mixed_precision": ["mixed_precision/__init__.py", "mixed_precision/manual_mixed_precision.py"],
    "aimet_torch.compress": ["compress.py"],
    "aimet_torch.peft": ["peft.py"],
    "aimet_torch.gptvq": ["gptvq/gptvq_weight.py", "gptvq/defs.py"],
    "aimet_torch.onnx": ["onnx.py"],
    "aimet_torch.utils": ["utils.py"],
    "aimet_torch.adascale": ["adascale/adascale_optimizer.py"],
    "aimet_torch.spinquant": ["spinquant/spinquant_optimizer.py"],
    "aimet_torch.experimental.omniquant": ["experimental/omniquant/omniquant_optimizer.py"],
    "aimet_torch.experimental.pgs": ["experimental/pgs.py"],
    "aimet_torch.experimental.c_round": ["experimental/c_round.py"],
    "aimet_torch.visualization_tools": ["visualization_tools/quant_stats_visualization.py"],
    "aimet_torch.visualize_model": ["visualize_model.py"],
    "aimet_torch.arch_checker": ["arch_checker/arch_checker.py"],
    "aimet_torch.common.defs": ["common/defs.py"],
    "aimet_onnx.quantsim": ["quantsim.py"],
    "aimet_onnx.qc_quantize_op": ["qc_quantize_op.py"],
    "aimet_onnx.defs": ["defs.py"],
    "aimet_onnx.batch_norm_fold": ["batch_norm_fold.py"],
    "aimet_onnx.cross_layer_equalization": ["cross_layer_equalization.py"],
    "aimet_onnx.adaround.adaround_weight": ["adaround/adaround_weight.py"],
    "aimet_onnx.sequential_mse.seq_mse": ["sequential_mse/seq_mse.py"],
    "aimet_onnx.spinquant": ["spinquant/spinquant.py"],
    "aimet_onnx.mixed_precision": ["mixed_precision.py"],
    "aimet_onnx.quant_analyzer": ["quant_analyzer.py"],
    "aimet_onnx.analysis": ["analysis/sensitivity.py", "analysis/sensitivity_plot.py", "analysis/quant_stats_visualization.py"],
    "aimet_onnx.lite_mp": ["lite_mp.py"],
    "aimet_onnx.layer_output_utils": ["layer_output_utils.py"],
    "aimet_onnx.utils": ["utils.py"],
}  # fmt: skip

# What AIMET's own code is built of, in the same files; counted apart, as a script has no use for it.
INTERNAL = {
    "AdaroundBase", "AdaroundConstants", "AdaroundWrapper", "BatchNormFoldBase", "ClsImpl", "ClsLayerType", "GraphSearchUtils",
    "HbfImpl", "MinMaxQuantizer", "PerBlockCheckpointManager", "PythonClsImpl", "PythonHbfImpl", "QuantizationMixinMeta",
    "QuantizationSimModelOnnxExporter", "ScaleOffsetQuantizer", "Scope", "ScopeContextManager", "SequentialMseBase",
    "LayerCompRatioPair", "LayerCompRatioEvalScore", "GreedyCompressionRatioSelectionStats", "CompressionStats",
    "TarCompressionRatioSelectionStats", "forward_function_wrapper", "create_wrapper_module", "implements", "adjust_min_max",
    "get_ordered_list_of_conv_modules", "neg_sqnr", "conv2d_create_node", "check_dynamic_conv2d", "conv2d_create_module",
    "merge_args_and_kwargs", "get_node_attr", "concat_create_node", "concat_create_module", "get_module_for_activation_fn",
    "log_and_catch_mismatched_encodings", "get_encoding_mismatch_info", "get_ordered_conv_linears", "is_valid_bn_fold",
    "get_input_output_channels", "get_weight_dimensions", "SpinQuantConfig", "VLMSpinQuantConfig", "AdaScaleModelConfig",
    "QuantizedNonDynamicallyQuantizableLinear", "compute_encodings_from_stats", "generate_err_msg", "generate_code_example",
    "extract_adascale_params", "restore_adascale_params", "flatten_state_dict", "unflatten_state_dict",
    "fold_adascale_quantizers", "create_cls_set_info_list", "get_loss_fn", "set_growth_limit",
    "CustomCallbacks", "DataSources", "InputWidgets", "LayerOutput", "QuantStatsVisualizer", "TableFilters", "TableObjects",
    "TableViews", "patch_quantsim_to_store_histogram",
}  # fmt: skip
# Classes whose methods scripts call on a class made from them.
BASES = {"QuantAnalyzerBase": "QuantAnalyzer"}
HELPERS = ("aimet_torch.utils", "aimet_onnx.utils")  # for AIMET's own code: what we do not have of them is internal

Signature = ast.arguments | None


def public(name: str) -> bool:
    """Whether a name is public, or a constructor or call."""
    return not name.startswith("_") or name in ("__init__", "__call__")


def defined(path: Path) -> Iterator[tuple[str, Signature, bool]]:
    """``(name, arguments, bound)`` of what a file defines; the last of several definitions (overloads) counts."""
    found: dict[str, tuple[Signature, bool]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and public(node.name):
            found[node.name] = (node.args, False)
        elif isinstance(node, ast.ClassDef) and public(node.name):
            found[node.name] = (None, False)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and public(inner.name):
                    marks = {ast.unparse(d) for d in inner.decorator_list}
                    is_property = "property" in marks or any(m.endswith(".setter") for m in marks)
                    static = "staticmethod" in marks
                    found[f"{node.name}.{inner.name}"] = (None if is_property else inner.args, not static)
    for name, (arguments, bound) in found.items():
        owner, dot, rest = name.partition(".")
        yield BASES.get(owner, owner) + dot + rest, arguments, bound


def ours(module: str, name: str) -> Any:
    """Our object, or ``None``."""
    try:
        found = importlib.import_module(f"bitwright.{module}")
        for part in name.split("."):
            found = getattr(found, part, None) or _attribute(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def _attribute(owner: Any, name: str) -> Any:
    """What instances get in the constructor."""
    if not isinstance(owner, type):
        raise AttributeError(name)
    if name in owner.__annotations__ or f"self.{name}" in inspect.getsource(owner):
        return property()
    raise AttributeError(name)


def fits(arguments: ast.arguments, bound: bool, mine: Any) -> str | None:
    """Why a call written for ``arguments`` does not bind to ``mine``; ``None`` when it does."""
    try:
        parameters = list(inspect.signature(mine).parameters.values())
    except (TypeError, ValueError):
        return "its signature cannot be read"
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    theirs = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    theirs = [name for name in theirs if not (bound and name in ("self", "cls"))]
    kinds = inspect.Parameter
    anything = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    many = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
    positional = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if not many and positional[: len(theirs)] != theirs:
        return f"positional ({', '.join(positional)}) for ({', '.join(theirs)})"
    names = {p.name for p in parameters}
    missing = [a.arg for a in arguments.kwonlyargs if a.arg not in names]
    if missing and not anything:
        return f"no keyword {', '.join(missing)}"
    known = {*theirs, *(a.arg for a in arguments.kwonlyargs)}
    needed = [p.name for p in parameters if p.default is p.empty and p.name not in known
              and p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]  # fmt: skip
    if needed and not (arguments.vararg or arguments.kwarg):
        return f"needs {', '.join(needed)}"
    return None


def compared(folder: Path) -> Iterator[tuple[str, str, str]]:
    """``(name, status, note)`` of everything: match, differs, missing, absent, or internal."""
    for module, files in PUBLIC.items():
        package = module.partition(".")[0]
        seen: set[str] = set()
        for file in files:
            path = folder / package / file
            for name, arguments, bound in defined(path) if path.exists() else ():
                full = f"{module}.{name}"
                if name in seen:
                    continue
                seen.add(name)
                reason = absence(full)
                mine = None if reason else ours(module, name)
                internal = bool(INTERNAL & set(name.split("."))) or (mine is None and module in HELPERS)
                if internal:
                    yield full, "internal", ""
                elif reason:
                    yield full, "absent", reason
                elif mine is None:
                    yield full, "missing", ""
                else:
                    why = None if arguments is None or isinstance(mine, property) else fits(arguments, bound, mine)
                    yield full, "match" if why is None else "differs", why or ""


def main() -> None:
    """Print the shares, by module."""
    rows = list(compared(Path(sys.argv[1])))
    if "--list" in sys.argv:
        for name, status, note in rows:
            print(f"{status:8} {name}  {note}")
    print("| module | match | differ | missing | absent | internal |\n|---|---|---|---|---|---|")
    total = dict.fromkeys(("match", "differs", "missing", "absent", "internal"), 0)
    for module in PUBLIC:
        counts = dict.fromkeys(total, 0)
        for name, status, _ in rows:
            if name.startswith(f"{module}.") and not any(
                name.startswith(f"{longer}.") for longer in PUBLIC if longer.startswith(f"{module}.")
            ):
                counts[status] += 1
                total[status] += 1
        print(f"| `{module}` | {' | '.join(str(count) for count in counts.values())} |")
    there = total["match"] + total["differs"] + total["missing"]
    print(f"\n{total['match']} of {there} match, {total['match'] / there:.1%}; {total['absent']} have no counterpart")
    print(f"{total['internal']} internal names are left out")


if __name__ == "__main__":
    main()
