"""The runtimes that files can be written for, one row each, with the forms that suit them.

Every row gives the same numbers, the simulation's; rows differ in how these are stored and in which operators compute them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bitwright.core.graph.cost import KernelTimes
from bitwright.core.numerics.spec import Preset, find_preset
from bitwright.core.registry import Registry
from bitwright.errors import ConfigError, close_matches

RecurrentForm = Literal["scan", "native"]
FileFormat = Literal["onnx", "tflite"]


@dataclass(frozen=True)
class SlowStem:
    """First convolutions of a network that a runtime computes faster in float than on codes.

    Attributes:
        channels: most channels of the image.
        depthwise_channels: most channels of a depthwise convolution right after.
        elements: fewest numbers per sample of what the first convolution makes, and a depthwise one reads; below, the
            conversion costs as much as it saves.
    """

    channels: int
    depthwise_channels: int
    elements: int


@dataclass(frozen=True)
class Target:
    """Settings of files for one runtime.

    Attributes:
        name: what ``target=`` takes.
        about: one line for the user.
        widens: bits of a weight -> bits its codes are stored in beside a quantized activation, where the runtime has an
            integer kernel for the wider type only.
        folds: whether weights of recurrent operators and of convolutions that the runtime computes in float are written so that
            it computes their float value once, when it loads: as Cast and Mul, which every optimiser folds. A DequantizeLinear
            is computed in every run, and keeps the operator from arranging its weights beforehand.
        recurrent: form of recurrent layers whose steps hold no quantizers.
        runtime: the adapter that runs the file, see :mod:`bitwright.runtimes`.
        format: of the file that is deployed; those of ONNX are written in any case.
        rules: keys of a configuration file that describe what its kernels compute, where the user names no configuration.
        wide_rules: the same for presets whose activations have more than 8 bits; ``None`` for no difference.
        multiplies_nbits: whether products of float activations with 4-bit weights are written as MatMulNBits, which computes
            what the simulation does; other runtimes have no such operator, or quantize the activations in it.
        gathers_codes: whether a Gather of a quantized table reads codes, and what it returns is dequantized; else the whole
            table is, in every run.
        pools_floats: whether what is made in float goes on its grid after the MaxPool that alone reads it; else before.
        measures_codes: whether Shape and Size read codes, where every reader of a DequantizeLinear gets one of its own.
        spells_operators: whether operators are written as its fast kernels know them: SiLU and GELU as one of ``com.microsoft``,
            the mean of an image on codes as GlobalAveragePool.
        packs_odd_rows: whether 4-bit weights of an odd inner length take 4 bits. OpenVINO 2026.4 reads their rows at wrong places
            where the data has more than two axes: 11 to 24 dB, without a word.
        short_blocks: whether the last block of a weight may be shorter than the others, which OpenVINO 2026.4 refuses.
        closes_scans: whether bodies of Scan nodes hold the constants that they read, which OpenVINO asks for.
        unsigned_in_bodies: whether codes of weights in bodies of If, Loop and Scan are unsigned. ONNX Runtime's products of uint8
            and int8 saturate on CPUs without VNNI; what it does against that where a session asks for it leaves bodies out. An
            export that finds its own file saturating on the CPU where it runs writes the other weights unsigned too.
        exact_session: what a session of one's own has to be told to compute products of float activations with quantized weights
            as simulated, where its defaults do not.
        code_results: types of layers whose integer kernels return codes only: one whose output has no grid is computed in float.
        mixes: whether a network may compute some operators in float and others on codes; else every activation needs a grid.
        wide_bits: what ``quantize`` gives an activation whose 8 bits cost the outputs much, where a layer multiplies it; ``None``
            for float, where layers on more than 8 bits are computed in float and the conversions would only take time.
        signed: whether codes of signed grids of activations stay signed, where others write them unsigned.
        float_biases: whether biases are written in float, as kernels add them after the sum is one.
        encoding_version: of the encodings file where the caller asks for the default; ``None`` for the default itself.
        kernel_times: what its kernels take, by which ``quantize`` weighs what it raises; ``None`` to count multiplications.
        slow_stem: first convolutions that ``quantize`` leaves in float, where the user names no configuration.
    """

    name: str
    about: str
    widens: tuple[tuple[int, int], ...]
    folds: bool
    recurrent: RecurrentForm
    runtime: str
    format: FileFormat = "onnx"
    rules: Mapping[str, Any] = field(default_factory=dict)
    wide_rules: Mapping[str, Any] | None = None
    slow_stem: SlowStem | None = None
    multiplies_nbits: bool = False
    gathers_codes: bool = False
    pools_floats: bool = False
    measures_codes: bool = False
    spells_operators: bool = False
    packs_odd_rows: bool = True
    short_blocks: bool = True
    closes_scans: bool = False
    unsigned_in_bodies: bool = False
    exact_session: str = ""
    code_results: frozenset[str] = frozenset()
    mixes: bool = True
    wide_bits: int | None = 16
    signed: bool = False
    float_biases: bool = False
    encoding_version: str | None = None
    kernel_times: KernelTimes | None = None

    def stored_bits(self, bits: int, *, beside_codes: bool) -> int:
        """The stored width of codes of ``bits`` bits; ``beside_codes``: an integer kernel may read them."""
        return dict(self.widens).get(bits, bits) if beside_codes else bits


#: no runtime here has a kernel for products of 4-bit weights with quantized activations
_ON_8_BITS = ((2, 8), (3, 8), (4, 8))
#: a runtime that computes recurrent layers in operators of its own rounds nothing inside their steps
_BOUNDARY: Mapping[str, Any] = {"recurrent": "boundary_only"}
#: measured: 1.1 to 5 times as fast as float, where that operator with dequantized weights is as fast (docs/recurrent.md)
_RUN_TIME: Mapping[str, Any] = {"recurrent": "run_time"}
#: LSTM layers are in float in any case
_LITERT_LAYERS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
#: int8 kernels of LiteRT take weights from -127 to 127, and these functions have one output grid
_LITERT: Mapping[str, Any] = {
    **_BOUNDARY,
    "rules": [
        {"optional": True, "weight": {"symmetry": "strict_symmetric"}},
        {"optional": True, "op": ["Sigmoid", "Softmax"], "output": {"fixed_range": [0.0, 255 / 256]}},
        {"optional": True, "op": "Tanh", "output": {"fixed_range": [-1.0, 127 / 128]}},
    ],
}
#: kernels of 16 bits take symmetric activations
_LITERT_WIDE: Mapping[str, Any] = {
    **_BOUNDARY,
    "rules": [
        {"optional": True, "weight": {"symmetry": "strict_symmetric"}},
        *(
            {"optional": True, port: {"symmetry": "symmetric"}}
            for port in ("output", "input", "model_input", "model_output", "constant")
        ),
        {"optional": True, "op": ["Sigmoid", "Softmax", "Tanh"], "output": {"fixed_range": [-1.0, 32767 / 32768]}},
    ],
}
#: TensorRT takes zero points of 0 only and adds the bias in float; a sum that follows a convolution is fused with it, so that no
#: quantizer stands between them (TensorRT documentation, Q/DQ placement recommendations)
_TENSORRT: Mapping[str, Any] = {
    **_BOUNDARY,
    "supergroups": [["Conv", "Add", "Relu"], ["Conv", "Add"], "default"],
    "rules": [
        {"optional": True, "weight": {"symmetry": "strict_symmetric"}},
        {"optional": True, "bias": None},
        *(
            {"optional": True, port: {"symmetry": "symmetric"}}
            for port in ("output", "input", "model_input", "model_output", "constant")
        ),
    ],
}
#: codes of ncnn lie between -127 and 127, and its layers add biases in float (ncnn, src/layer/quantize.cpp, convolution.cpp)
_NCNN: Mapping[str, Any] = {
    **_BOUNDARY,
    "rules": [
        {"optional": True, "bias": None},
        *(
            {"optional": True, port: {"symmetry": "strict_symmetric"}}
            for port in ("weight", "output", "input", "model_input", "model_output", "constant")
        ),
    ],
}
#: measured with OpenVINO 2026.4: 44 to 50 dB without, on CPUs that have VNNI; metadata of an ONNX file does not reach its options
_OPENVINO_SESSION = (
    "OpenVINO's defaults quantize these activations to 8 bits or compute them in bfloat16, as no simulation does: compile the "
    'file with {"EXECUTION_MODE_HINT": "ACCURACY"}'
)
_ORT_CONVOLUTIONS = frozenset(("Conv", "ConvTranspose"))
#: measured: benchmarks/results/stem_speed.md
_ORT_STEM = SlowStem(channels=3, depthwise_channels=32, elements=1 << 16)
#: measured on AVX-512 with VNNI, how they were settled: docs/decisions/0011-default-recipe.md
_ORT_TIMES = KernelTimes(
    product=(0.014, 0.005),
    result=(0.35, 0.2),
    depthwise=(0.6, 0.7),
    patch=9.0,
    conversion=0.42,
    operator=1500.0,
    transpose=0.08,
    pool=15.0,
)


def _checked_target(name: str, row: Any) -> Target:
    """Check a target of a plug-in."""
    found = row() if callable(row) else row
    if not isinstance(found, Target) or found.name != name:
        problem = f"{found!r:.100} is not a Target of that name"
        raise ConfigError(
            f"target {name!r}", problem, "register dataclasses.replace(TARGETS['packed'], name=..., about=...)"
        )
    return found


_OWN: dict[str, Target] = {
    row.name: row
    for row in (
        Target("ort_cpu", "ONNX Runtime on CPUs: narrow weights on 8-bit kernels", _ON_8_BITS, True, "native", "onnxruntime",
               rules=_RUN_TIME, slow_stem=_ORT_STEM, multiplies_nbits=True, gathers_codes=True, measures_codes=True,
               spells_operators=True, pools_floats=True, code_results=_ORT_CONVOLUTIONS, wide_bits=None,
               kernel_times=_ORT_TIMES, unsigned_in_bodies=True),
        Target("openvino_cpu", "OpenVINO on CPUs: narrow weights on 8-bit kernels", _ON_8_BITS, True, "native", "openvino",
               rules=_BOUNDARY, packs_odd_rows=False, short_blocks=False, closes_scans=True, exact_session=_OPENVINO_SESSION,
               wide_bits=None),
        Target("litert", "LiteRT (TensorFlow Lite): a .tflite file beside the others", _ON_8_BITS, False, "native", "litert",
               "tflite", _LITERT, _LITERT_WIDE, code_results=_LITERT_LAYERS, wide_bits=None),
        Target("tensorrt", "TensorRT, explicit quantization: symmetric int8, biases in float, no quantizer inside fused layers",
               _ON_8_BITS, False, "scan", "onnxruntime", rules=_TENSORRT, wide_bits=None, signed=True, float_biases=True),
        Target("ncnn", "ncnn: symmetric int8 inputs of layers and biases in float, for bitwright.onnx.write_ncnn",
               _ON_8_BITS, False, "scan", "onnxruntime", rules=_NCNN, wide_bits=None, signed=True, float_biases=True),
        Target("qnn", "Qualcomm's converters (QNN, HTP): uint8 activations, and encodings of version 2.0.0", (), False, "scan",
               "onnxruntime", rules=_BOUNDARY, encoding_version="2.0.0", mixes=False),
        Target("packed", "compilers, and the smallest file: 4-bit weights take 4 bits", (), False, "scan", "onnxruntime"),
    )
}  # fmt: skip
TARGETS: Registry[Target] = Registry("targets", _OWN, _checked_target)
DEFAULT_TARGET = "ort_cpu"


_COMPILERS = (
    "export with target='packed', whose ONNX file with QuantizeLinear and DequantizeLinear its compiler may read, "
    "or give the compiler the float ONNX file and the .encodings file of the export"
)
#: runtimes that users name and no row serves -> what to use
_ELSEWHERE = {name: _COMPILERS for name in ("hailo", "tvm", "coreml")}
#: other names of runtimes -> what to use
_OTHER_NAMES = {
    "trt": "use target='tensorrt'",
    "snpe": "use target='qnn', whose encodings its converter takes",
    "tflite": "use target='litert', the runtime's present name",
}


def find_target(name: str | Target) -> Target:
    """The row of ``name``.

    Raises:
        ConfigError: there is none, with close matches.

    Example:
        >>> find_target("ort_cpu").stored_bits(4, beside_codes=True)
        8
    """
    if isinstance(name, Target):
        return name
    if name not in TARGETS:
        given = str(name).casefold()
        if given in _ELSEWHERE:
            problem = f"{name!r} is not a target: files for it are not written yet"
            raise ConfigError("target", problem, _ELSEWHERE[given])
        if given in _OTHER_NAMES:
            raise ConfigError("target", f"{name!r} is not the name of a target", _OTHER_NAMES[given])
        raise ConfigError(
            "target", f"{name!r} is not a target{close_matches(str(name), TARGETS)}", f"use one of {listed(TARGETS)}"
        )
    return TARGETS[name]


def target_for(target: str | Target, format: FileFormat | None = None) -> Target:
    """The row that files of ``format`` are written for: ``target``, or where that is the default one that has the format.

    Raises:
        ConfigError: there is no such target or format, or the target has another one.
    """
    row, formats = find_target(target), {one.format: one for one in reversed(TARGETS.values())}
    if format is None or format == row.format:
        return row
    if format not in formats:
        problem = f"{format!r} is not a format{close_matches(str(format), formats)}"
        raise ConfigError("format", problem, f"use one of {listed(sorted(formats))}")
    if row.name != DEFAULT_TARGET:
        problem = f"files for {row.name} are {row.format}, not {format}"
        raise ConfigError("format", problem, f"export with target={formats[format].name!r}, or leave the format out")
    return formats[format]


def target_in(target: str | Target, *runtimes: str) -> Target:
    """The row whose form is compared in ``runtimes``: ``target``, or where that is the default one, theirs.

    Raises:
        ConfigError: there is no such target.

    Example:
        >>> target_in("ort_cpu", "openvino").name, target_in("packed", "openvino").name
        ('openvino_cpu', 'packed')
    """
    row = find_target(target)
    if row.name != DEFAULT_TARGET:
        return row
    others = (one for one in TARGETS.values() if one.runtime in runtimes and one.runtime != row.runtime)
    return next(others, row)


def rules_for(target: str, config_file: Any, preset: str | Preset = "w8a8") -> Any:
    """The rules that a simulation for ``target`` under ``preset`` follows where the user names none, ``config_file`` where
    they do.
    """
    row, activation = find_target(target), find_preset(preset).activation
    wide = activation is not None and activation.format.bits > 8 and row.wide_rules is not None
    rules = row.wide_rules if wide else row.rules
    return dict(rules) if config_file is None and rules else config_file


def listed(names: Iterable[str]) -> str:
    """``'a', 'b'`` for messages."""
    return ", ".join(map(repr, names))
