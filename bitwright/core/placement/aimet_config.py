"""Convert AIMET's quantsim configuration JSON to rules, and the shipped targets to that JSON.

The file says, from the general to the particular, what is quantized: ``defaults``, ``params``, ``op_type``,
``supergroups``, ``model_input``, ``model_output``, in this order of application. Each statement becomes a
:class:`~bitwright.core.placement.rules.Rule` whose ``origin`` is its place in the file. What AIMET decides in code,
by the kind of hardware, is added where a rule can say it; the rest is told in ``Rules.notes``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bitwright.core.graph.operators import OPS
from bitwright.core.graph.patterns import MASKED_SOFTMAX, MATMUL_ADD, Pattern
from bitwright.core.numerics.formats import FloatFormat, IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.spec import PRESETS, Preset, Symmetry
from bitwright.core.placement.rules import BOUNDARY_ONLY, Kernel, Rule, Rules
from bitwright.errors import ConfigError, close_matches, with_article

REQUIRED = ("defaults", "params", "op_type", "supergroups", "model_input", "model_output")
SECTIONS = (*REQUIRED, "supergroup_pass_list")

# what may stand where; the values are checked as they are read
_DEFAULTS = (
    "ops",
    "params",
    "strict_symmetric",
    "unsigned_symmetric",
    "per_channel_quantization",
    "supported_kernels",
    "hw_version",
)
_OPS_KEYS = ("is_output_quantized", "is_input_quantized", "is_symmetric")
_PARAM_KEYS = ("is_quantized", "is_symmetric")
_OP_TYPE_KEYS = (*_OPS_KEYS, "params", "per_channel_quantization", "supported_kernels", "encoding_constraints")
_BOOLEANS = {"True": True, "False": False, True: True, False: False}

# names of operator types that differ from ours
_TYPES = {
    "Mean": "ReduceMean",
    "Max": "Max",
    "Upsample": "Resize",
    "GroupNorm": "GroupNormalization",
    "LayerNorm": "LayerNormalization",
    "InstanceNorm": "InstanceNormalization",
    "RMSNorm": "RMSNormalization",
    "BatchNorm": "BatchNormalization",
    "SiLU": "Silu",
    "Swish": "Silu",
    "Linear": "Gemm",
    "BatchToSpace": "DepthToSpace",
    "SpaceToBatch": "SpaceToDepth",
}
_CANONICAL = {name.lower(): name for name, _ in OPS.items()} | {name.lower(): to for name, to in _TYPES.items()}
# types that AIMET's files name and that never appear in a recorded graph as an operator on floats
_KNOWN_ABSENT = ("Cast", "NonMaxSuppression", "NonZero", "Shape", "MaxRoiPool", "SplitToSequence")
_PASSES = {"MatmulAdd": MATMUL_ADD, "MaskedSoftmax": MASKED_SOFTMAX}
_RECORDED_WHOLE = ("LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization")


def is_aimet_config(data: Mapping[str, Any]) -> bool:
    """Whether ``data`` has the top-level keys of AIMET's file rather than ours."""
    return any(key in data for key in REQUIRED if key != "supergroups")


def read_aimet_config(
    data: Mapping[str, Any], preset: Preset = PRESETS["w8a8"], source: str = "AIMET configuration"
) -> Rules:
    """Convert a quantsim configuration to rules.

    Bit widths are not part of the file: they are those of ``preset``, and so is a blockwise granularity,
    which the file cannot express. A bias with ``is_quantized: False`` becomes the int32 that integer
    kernels add, derived from input and weight, because that is what the target runs (AIMET leaves it in
    float while it simulates).

    Args:
        data: the parsed JSON; booleans are the strings "True" and "False".
        preset: base specs of weights and activations.
        source: name for messages.

    Raises:
        ConfigError: a key that is missing, unknown or has a value that cannot be; the message names it.
    """
    return _Reader(data, preset, source).rules()


@dataclass(frozen=True)
class _Section:
    """An object of the file, with its place there for messages and for the origin of rules."""

    data: Mapping[str, Any]
    at: str
    source: str

    def path(self, key: str) -> str:
        return f"{self.at}.{key}" if self.at else key

    def error(self, key: str, problem: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self.source}: {self.path(key)}", problem, remedy)

    def rule(self, key: str, value: bool, **facets: Any) -> Rule:
        """Convert the value of ``key`` to a rule."""
        return Rule(**facets, origin=f"{self.path(key)}={value} ({self.source})", optional=True)

    def part(self, key: str, known: tuple[str, ...] | None, required: tuple[str, ...] = ()) -> _Section:
        """The object at ``key``, see :func:`_section`; an empty one where there is none."""
        return _section(self.data.get(key, {}), self.path(key), self.source, known, required)

    def number(self, key: str) -> float | None:
        value = self.data.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise self.error(key, f"{value!r} is not a number", "write a number, such as 0.0")
        return None if value is None else float(value)

    def flag(self, key: str, *, only: bool | None = None) -> bool | None:
        """The boolean at ``key``, ``None`` where there is none; ``only`` is the value the schema allows."""
        if key not in self.data:
            return None
        raw = self.data[key]
        if not isinstance(raw, (str, bool)) or raw not in _BOOLEANS:
            raise self.error(key, f"{raw!r} is not a boolean", 'write the string "True" or "False"')
        value = _BOOLEANS[raw]
        if only is not None and value is not only:
            raise self.error(key, f'it may only be "{only}"', "leave the key out to get the opposite")
        return value


def _section(
    value: Any, at: str, source: str, known: tuple[str, ...] | None, required: tuple[str, ...] = ()
) -> _Section:
    """``value`` as an object with none but the ``known`` keys (``None``: any) and all ``required`` ones."""
    where = f"{source}: {at}" if at else source
    if not isinstance(value, Mapping):
        raise ConfigError(where, f"it is {with_article(type(value).__name__)}, not an object", "write {...}")
    for key in value if known is not None else ():
        if key not in (known or ()):
            near = close_matches(str(key), known or ())
            raise ConfigError(where, f"unknown key {key!r}{near}", f"use {', '.join(known or ())}")
    missing = [key for key in required if key not in value]
    if missing:
        raise ConfigError(where, f"the key {missing[0]!r} is missing", f'add "{missing[0]}"; it may be empty')
    return _Section(value, at, source)


class _Reader:
    def __init__(self, data: Mapping[str, Any], preset: Preset, source: str) -> None:
        self.preset, self.source = preset, source
        self.notes: list[str] = []
        self.kernels: dict[str, tuple[Kernel, ...]] = {}
        self.top = _section(data, "", source, SECTIONS, REQUIRED)
        self.defaults = self.top.part("defaults", _DEFAULTS, ("ops", "params"))
        strict, unsigned = self.defaults.flag("strict_symmetric"), self.defaults.flag("unsigned_symmetric")
        if strict and unsigned:
            self.notes.append("defaults.unsigned_symmetric has no effect beside defaults.strict_symmetric")
        self.word: Symmetry = "strict_symmetric" if strict else "unsigned_symmetric" if unsigned else "symmetric"

    def rules(self) -> Rules:
        found = [
            BOUNDARY_ONLY,  # AIMET quantizes what enters and leaves a recurrent layer
            *self._default_rules(),
            *self._param_rules(self.top.part("params", None), "*"),
            *self._op_type_rules(),
            *self._model_rules("model_input", "is_input_quantized"),
            *self._model_rules("model_output", "is_output_quantized"),
            *self._hardware_rules(),
        ]
        groups = (*self._supergroups(), *self._passes())
        return Rules(
            self.preset.weight,
            self.preset.activation,
            tuple(found),
            groups,
            fixed_ranges=False,
            float_tail=False,
            split_joins=False,
            source=self.source,
            notes=tuple(self.notes),
            kernels=self.kernels,
            ends="as others",
            hw_version=_version(self.defaults),
        )

    # ---- sections, in the order of application

    def _default_rules(self) -> Iterator[Rule]:
        ops = self.defaults.part("ops", _OPS_KEYS)
        params = self.defaults.part("params", _PARAM_KEYS)
        for port in ("output", "input"):
            key = f"is_{port}_quantized"
            quantized = ops.flag(key, only=True) or False
            yield ops.rule(key, quantized, port=port, quantized=quantized)
        symmetric = ops.flag("is_symmetric") or False
        for port in ("output", "input", "constant"):
            yield ops.rule("is_symmetric", symmetric, port=port, symmetry=self._symmetry(symmetric))
        quantized = params.flag("is_quantized") or False
        yield params.rule("is_quantized", quantized, port="param", quantized=quantized)
        symmetric = params.flag("is_symmetric") or False
        yield params.rule("is_symmetric", symmetric, port="param", symmetry=self._symmetry(symmetric))
        yield from self._per_channel(self.defaults, "*", default=False)
        self._note_kernels(self.defaults, "defaults")

    def _param_rules(self, params: _Section, op: str) -> Iterator[Rule]:
        for name in params.data:
            section = params.part(name, _PARAM_KEYS)
            quantized = section.flag("is_quantized")
            bias = name == "bias"
            selector: dict[str, Any] = {"op": op, "port": "bias" if bias else "param"}
            if not bias:
                selector["param"] = name
            if quantized is not None:
                value = "derived" if bias and not quantized else quantized
                yield section.rule("is_quantized", quantized, **selector, quantized=value)
            symmetric = section.flag("is_symmetric")
            if symmetric is not None:
                yield section.rule("is_symmetric", symmetric, **selector, symmetry=self._symmetry(symmetric))

    def _op_type_rules(self) -> Iterator[Rule]:
        types = self.top.part("op_type", None)
        for name in types.data:
            op = self._type(name, "op_type")
            section = types.part(name, _OP_TYPE_KEYS)
            output = section.flag("is_output_quantized")
            if output is not None:
                yield section.rule("is_output_quantized", output, op=op, port="output", quantized=output)
            if section.flag("is_input_quantized", only=True):
                yield section.rule("is_input_quantized", True, op=op, port="input", quantized=True)
            symmetric = section.flag("is_symmetric")
            if symmetric is not None:
                # of what an operator writes and of what it reads, wherever that is quantized
                asked = {"op": op, "symmetry": self._symmetry(symmetric)}
                yield section.rule("is_symmetric", symmetric, **asked, port="output")
                yield section.rule("is_symmetric", symmetric, **asked, port="input")
                yield section.rule("is_symmetric", symmetric, **asked, port="input", reaches_producer=True)
            yield from self._param_rules(section.part("params", None), op)
            yield from self._per_channel(section, op, default=None)
            yield from self._constraints(section, op)
            self._note_kernels(section, op)

    def _per_channel(self, section: _Section, op: str, default: bool | None) -> Iterator[Rule]:
        value = section.flag("per_channel_quantization")
        value = default if value is None else value
        if value is None or isinstance(self.preset.weight and self.preset.weight.granularity, PerBlock):
            return
        granularity = PerChannel() if value else PerTensor()
        yield section.rule("per_channel_quantization", value, op=op, port="weight", granularity=granularity)

    def _constraints(self, section: _Section, op: str) -> Iterator[Rule]:
        if "encoding_constraints" not in section.data:
            return
        ends = section.part("encoding_constraints", ("min", "max"), ("min",))
        lo, hi = ends.number("min"), ends.number("max")
        symmetry: Symmetry | None = None
        if lo is not None and hi is not None and lo == -hi:
            symmetry = self._symmetry(True)  # both ends equally far from zero ask for a symmetric grid
        yield Rule(
            op=op,
            port="output",
            fixed_range=(lo, hi),
            symmetry=symmetry,
            origin=f"{ends.at} ({self.source})",
            optional=True,
        )

    def _supergroups(self) -> Iterator[Pattern]:
        groups = self.top.data["supergroups"]
        if not isinstance(groups, list):
            problem = f"it is {with_article(type(groups).__name__)}"
            raise self.top.error("supergroups", problem, 'write a list of {"op_list": [...]}')
        for i, entry in enumerate(groups):
            section = _section(entry, f"supergroups[{i}]", self.source, ("op_list",), ("op_list",))
            types = section.data["op_list"]
            if not isinstance(types, list) or len(types) < 2 or not all(isinstance(t, str) for t in types):
                raise section.error("op_list", f"{types!r} is not a chain", "list at least two operator types")
            at = section.path("op_list")
            yield Pattern(tuple(self._type(t, at) for t in types), plain_only=True)

    def _model_rules(self, name: str, key: str) -> Iterator[Rule]:
        section = self.top.part(name, (key,))
        if section.flag(key, only=True):
            yield section.rule(key, True, port=name, quantized=True)

    def _hardware_rules(self) -> Iterator[Rule]:
        """Rules that AIMET hard-codes: normalisation scales, and weights that follow their output on newer targets."""
        weight, activation = self.preset.weight, self.preset.activation
        bits = weight.format.bits if weight is not None and isinstance(weight.format, IntFormat) else 0
        if bits:
            symmetry = self._symmetry(bits >= 16)
            origin = "AIMET's rule for the scale of layer normalisations"
            yield Rule(op="LayerNormalization", param="weight", symmetry=symmetry, origin=origin, optional=True)
        version = _version(self.defaults)
        if version is None:
            return
        if version >= 73 and activation is not None:
            ops = self.defaults.part("ops", _OPS_KEYS)
            symmetric = isinstance(activation.format, FloatFormat) or bool(ops.flag("is_symmetric"))
            follows: dict[str, Any] = {
                "format": activation.format,
                "symmetry": self._symmetry(symmetric),
                "granularity": PerTensor(),
                "origin": f"AIMET's rule for parameters that follow their output (V{version})",
                "optional": True,
            }
            yield Rule(op=("Embedding", "GroupNormalization"), param="weight", **follows)
            yield Rule(op="GroupNormalization", param="bias", **follows)
        self.notes.append(
            f"defaults.hw_version: AIMET's special cases of V{version} for products of two activations, "
            "rotary embeddings and rescaling by a constant are not applied; write rules where they matter"
        )

    def _passes(self) -> Iterator[Pattern]:
        names = self.top.data.get("supergroup_pass_list", [])
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            problem = f"{names!r} is not a list of names"
            raise self.top.error("supergroup_pass_list", problem, "write a list of strings")
        for name in names:
            if name in _PASSES:
                yield from _PASSES[name]
            elif name not in _RECORDED_WHOLE:  # these need no pass: the front ends see one operator
                near = close_matches(name, (*_PASSES, *_RECORDED_WHOLE))
                self.notes.append(f"supergroup_pass_list: {name!r} has no effect here{near}")

    # ---- values

    def _symmetry(self, symmetric: bool) -> Symmetry:
        return self.word if symmetric else "asymmetric"

    def _note_kernels(self, section: _Section, op: str) -> None:
        kernels = section.data.get("supported_kernels")
        if kernels is None:
            return
        if not isinstance(kernels, list) or not kernels or not all(isinstance(k, Mapping) for k in kernels):
            problem = f"{kernels!r} is not a list of kernels"
            remedy = 'write [{"activation": {"bitwidth": 8, "dtype": "int"}}]'
            raise section.error("supported_kernels", problem, remedy)
        self.kernels[op] = tuple(_kernel(section, kernel) for kernel in kernels)
        self.notes.append(
            f"{section.at}.supported_kernels is for mixed precision: widths of a simulation come from the preset and from rules"
        )

    def _type(self, name: str, at: str) -> str:
        canonical = _CANONICAL.get(name.lower())
        if canonical is None and name not in _KNOWN_ABSENT:
            self.notes.append(f"{at}: no operator of type {name!r} is known{close_matches(name, OPS)}")
        return canonical or name


def _version(defaults: _Section) -> int | None:
    version = defaults.data.get("hw_version")
    if version is None or version == "default":  # which AIMET takes for none
        return None
    digits = str(version).upper().removeprefix("V")
    if not isinstance(version, str) or not digits.isdigit():
        raise defaults.error("hw_version", f"{version!r} is not a version", 'write it like "V73"')
    return int(digits)


def written_kernels(rules: Rules, dtype: Callable[[str], Any] = str) -> dict[str, list[dict[str, Any]]]:
    """The kernels of a configuration as AIMET tells them; ``defaults`` is always there.

    Args:
        rules: of the configuration.
        dtype: makes what stands at ``dtype`` of ``"int"`` and ``"float"``.
    """

    def entry(width: tuple[int, str] | None) -> dict[str, Any] | None:
        return None if width is None else {"bitwidth": width[0], "dtype": dtype(width[1])}

    found: dict[str, list[dict[str, Any]]] = {"defaults": []}
    for name, kernels in rules.kernels.items():
        pairs = [{"activation": entry(k.activation), "param": entry(k.weight)} for k in kernels]
        found[name] = [{key: value for key, value in pair.items() if value is not None} for pair in pairs]
    return found


def _kernel(section: _Section, kernel: Mapping[str, Any]) -> Kernel:
    found: dict[str, tuple[int, str] | None] = dict.fromkeys(("activation", "param"))
    for key in found:
        width = kernel.get(key)
        if width is None:
            continue
        bits, kind = (width.get("bitwidth"), width.get("dtype")) if isinstance(width, Mapping) else (None, None)
        if type(bits) is not int or kind not in ("int", "float"):
            remedy = 'write {"bitwidth": 8, "dtype": "int"}, with "int" or "float"'
            raise section.error(f"supported_kernels.{key}", f"{width!r} names no bits and kind", remedy)
        found[key] = (bits, kind)
    return Kernel(found["activation"], found["param"])


# ---- shipped targets

_PER_CHANNEL = ("Conv", "ConvTranspose", "Gemm", "MatMul", "PRelu")
_STATS = ("running_mean", "running_var")
_OFF = {"is_output_quantized": "False"}
_ASYMMETRIC_WEIGHT = {"params": {"weight": {"is_symmetric": "False"}}}
_UNIT = {"encoding_constraints": {"min": 0.0, "max": 1.0}}
_SIGNED_UNIT = {"encoding_constraints": {"min": -1.0, "max": 1.0}}
_WAVES = dict.fromkeys(("Sin", "Cos", "Tanh"), _SIGNED_UNIT)
_NORM_PASSES = ("LayerNormalization", "RMSNormalization", "MatmulAdd")

_DEFAULT_OPS = {"Cast": _OFF}
_DEFAULT_GROUPS = "Conv>Relu ConvTranspose>Relu Conv>Clip Add>Relu Gemm>Relu"
_V68_OPS = {
    **dict.fromkeys(("Cast", "ChannelShuffle", "Gather", "NonMaxSuppression"), _OFF),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "InstanceNormalization"), _ASYMMETRIC_WEIGHT),
    **_WAVES,
    "Relu": {"encoding_constraints": {"min": 0.0}},
}
_V66_OPS = {k: v for k, v in _V68_OPS.items() if k not in ("RMSNormalization", "InstanceNormalization")}
_V73_OPS = {
    **_V68_OPS,
    "GroupNormalization": {"params": {"bias": {"is_quantized": "True"}}},
    "Sigmoid": _UNIT,
    "Softmax": _UNIT,
}
_V68_GROUPS = "ConvTranspose>Relu Add>Relu Gemm>Relu"
_V73_GROUPS = " ".join(
    ["Add>Relu"]
    + [f"Conv>BatchNormalization>{a}" for a in ("HardSwish", "PRelu", "LeakyRelu", "Relu")]
    + [f"Conv>Transpose>{a}" for a in ("Relu", "PRelu", "LeakyRelu")]
    + [f"Conv>{a}" for a in ("Clip", "PRelu", "LeakyRelu", "Relu")]
    + ["ConvTranspose>Relu", "Gemm>Relu"]
)
_ENPU_OPS = {**_WAVES, "Sigmoid": _UNIT, "Softmax": _UNIT}
_ENPU_V7_OPS = {**_ENPU_OPS, **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _ASYMMETRIC_WEIGHT)}
_IMAGE = ("Conv", "ConvTranspose", "AveragePool", "MaxPool")
_SIX = ("Relu", "Clip", "Sigmoid", "Tanh", "HardSwish", "Gelu")
_ENPU_GROUPS = " ".join(
    [f"{h}>{a}" for h in _IMAGE for a in (*_SIX, "PRelu", "LeakyRelu", "BatchNormalization")]
    + [f"{h}>BatchNormalization>{a}" for h in _IMAGE for a in _SIX]
    + [f"{h}>{a}" for h in ("Gemm", "MatMul", "Add", "Sub", "Mul") for a in (*_SIX, "LeakyRelu")]
)
_LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")

# name -> hw_version, per-channel types, operator types, supergroups, passes
_TARGETS: dict[str, tuple[str, tuple[str, ...], dict[str, Any], str, tuple[str, ...]]] = {
    "default": ("", _PER_CHANNEL, _DEFAULT_OPS, _DEFAULT_GROUPS, ("MatmulAdd",)),
    "default_per_tensor": ("", (), _DEFAULT_OPS, _DEFAULT_GROUPS, ("MatmulAdd",)),
    "htp_v66": ("V66", (), {**_V66_OPS, "Flatten": _OFF}, _V68_GROUPS, ()),
    "htp_v68": ("V68", ("Conv", "ConvTranspose", "PRelu"), _V68_OPS, _V68_GROUPS, _NORM_PASSES),
    "htp_v69": ("V69", _PER_CHANNEL, _V68_OPS, _V68_GROUPS, _NORM_PASSES),
    **{f"htp_v{n}": (f"V{n}", _PER_CHANNEL, _V73_OPS, _V73_GROUPS, _NORM_PASSES) for n in (73, 75, 79, 81, 85)},
    "enpu_v6": ("", (), _ENPU_OPS, _ENPU_GROUPS, _NORM_PASSES),
    "enpu_v7": ("", (), _ENPU_V7_OPS, _ENPU_GROUPS, _NORM_PASSES),
    "enpu_v7_per_channel": ("", _LINEAR, _ENPU_V7_OPS, _ENPU_GROUPS, _NORM_PASSES),
}
SHIPPED: tuple[str, ...] = tuple(_TARGETS)
ALIASES: dict[str, str] = {
    "default_config": "default_per_tensor",
    "default_per_channel": "default",
    "default_config_per_channel": "default",
    **{f"htp_quantsim_config_v{n}": f"htp_v{n}" for n in (66, 68, 69, 73, 75, 79, 81, 85)},
    **{f"htp_v{n}_per_channel_linear": f"htp_v{n}" for n in (69, 73, 75, 79, 81)},
}


def shipped_config(name: str) -> dict[str, Any]:
    """The configuration of a shipped target, in AIMET's form.

    ``default`` (per channel), ``default_per_tensor``, ``htp_v66`` to ``htp_v85`` and ``enpu_v6``,
    ``enpu_v7``, ``enpu_v7_per_channel``; AIMET's own names for them are known too. They are written from
    the published behaviour of AIMET 2.42. Six chains that enpu_v7 has beyond enpu_v6 are not published and
    so not in it.

    Raises:
        ConfigError: no such target; the message lists close names.

    >>> shipped_config("htp_v73")["defaults"]["hw_version"]
    'V73'
    """
    key = ALIASES.get(name, name)
    if key not in _TARGETS:
        raise ConfigError(
            f"configuration {name!r}",
            f"there is no target of this name{close_matches(name, (*SHIPPED, *ALIASES))}",
            f"use one of {', '.join(SHIPPED)}, or the path of a file",
        )
    version, per_channel, op_types, groups, passes = _TARGETS[key]
    enpu = key.startswith("enpu")
    defaults: dict[str, Any] = {
        "ops": {"is_output_quantized": "True", "is_symmetric": str(enpu)},
        "params": {"is_quantized": "True", "is_symmetric": "True"},
        "per_channel_quantization": "False",
    }
    if version:
        defaults["hw_version"] = version
    unquantized = ("weight", "bias", *_STATS) if enpu else _STATS
    op_type: dict[str, Any] = {
        "BatchNormalization": {"params": {name: {"is_quantized": "False"} for name in unquantized}}
    }
    for op, entry in op_types.items():
        op_type[op] = dict(entry)
    for op in _LINEAR if enpu else per_channel:
        op_type.setdefault(op, {})["per_channel_quantization"] = str(op in per_channel)
    config: dict[str, Any] = {
        "defaults": defaults,
        "params": {"bias": {"is_quantized": "False"}},
        "op_type": op_type,
        "supergroups": [{"op_list": chain.split(">")} for chain in groups.split()],
        "model_input": {"is_input_quantized": "True"},
        "model_output": {"is_output_quantized": "True"} if enpu else {},
    }
    if passes:
        config["supergroup_pass_list"] = list(passes)
    return config
