"""A session for trials: grids and weights are inputs, so that other bits or scales need no new session.

Every activation quantizer is a Clip at the ends of its grid and a pair of QuantizeLinear and DequantizeLinear with 16-bit
codes, which holds every integer grid of up to 16 bits; ends, scale and zero point are inputs of the model. Weights are inputs
too, so that the runtime cannot pack them for its fastest kernels: a run takes longer than a run of ``sim.session``, and the
difference is less than opening one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerTensor
from bitwright.export.qdq.constants import find_constants
from bitwright.export.qdq.forms import Builder, before, write_activation
from bitwright.export.qdq.markers import bypass, close, copy_model, remove_unread, site_nodes, site_of
from bitwright.export.qdq.products import guard_outputs
from bitwright.export.qdq.stored import unsigned
from bitwright.export.recurrent.write import expand_recurrent
from bitwright.onnx.model.session import open_session
from bitwright.onnx.simulation.simulate import folded_constant

if TYPE_CHECKING:
    from bitwright.onnx.simulation.quantsim import QuantizationSimModel

Array = NDArray[Any]
D = ir.DataType
_KEPT = 4  # sessions, of different sets of quantizers that work
_WIDEST = 16


class TrialSession:
    """Runs a simulation as it stands at each run, like an ``InferenceSession``.

    Args:
        sim: a calibrated simulation; its quantizers may change between runs in every way.
    """

    def __init__(self, sim: QuantizationSimModel) -> None:
        self._sim = sim
        self._sessions: dict[tuple[Any, ...], _Inputs] = {}

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Array], *_: Any) -> list[Array]:
        """Outputs of the simulation, as ``sim.session.run`` gives them."""
        encodings = self._sim._encodings()
        key = _structure(self._sim, encodings)
        found = self._sessions.pop(key, None)
        if found is None or found.outdated(self._sim):
            found = _Inputs(self._sim, encodings)
            for old in list(self._sessions)[: len(self._sessions) + 1 - _KEPT]:
                del self._sessions[old]
        self._sessions[key] = found
        wanted = self._sim.output_names if output_names is None else list(output_names)
        result: list[Array] = found.session.run(wanted, {**feeds, **found.feeds(self._sim, encodings)})
        return result

    def get_inputs(self) -> list[Any]:
        """The inputs of the model itself."""
        return list(self._sim.session.get_inputs())

    def get_outputs(self) -> list[Any]:
        """The outputs of the model."""
        return list(self._sim.session.get_outputs())


def _structure(sim: QuantizationSimModel, encodings: Mapping[str, Encoding]) -> tuple[Any, ...]:
    """What a session depends on: which sites work, and the encodings that are written into it."""
    activations = (site for site in sim.quantizers if site not in sim.constants)
    return tuple(None if (e := encodings.get(site)) is None else True if _is_input(e) else e for site in activations)


def _is_input(encoding: Encoding) -> bool:
    """Whether the grid can be fed: one scale for the tensor, at most 16 bits."""
    fmt = encoding.format
    return isinstance(fmt, IntFormat) and fmt.bits <= _WIDEST and isinstance(encoding.granularity, PerTensor)


class _Inputs:
    """One session, and what it is fed beside the model's inputs."""

    def __init__(self, sim: QuantizationSimModel, encodings: Mapping[str, Encoding]) -> None:
        self._biases = set(sim._biases)
        self._constants: dict[str, tuple[str, ir.TensorProtocol]] = {}  # input -> site, tensor
        self._grids: dict[str, list[ir.Value]] = {}  # site -> inputs: ends, scale, zero point
        # site of a constant that the model holds in another form -> what it was made of
        self._written: dict[str, Array] = {}
        self._fed: dict[str, tuple[Encoding | None, Array | None, list[Array]]] = {}
        model = self._model(sim, encodings)
        self.session = open_session(model, sim.providers, threads=sim.threads)

    def _model(self, sim: QuantizationSimModel, encodings: Mapping[str, Encoding]) -> ir.Model:
        copy = copy_model(expand_recurrent(sim.marked))
        builder, constants = Builder(copy), find_constants(copy)
        replaced: dict[ir.Value, None] = {}
        for node in site_nodes(copy):
            site, source = site_of(node), node.inputs[0]
            assert source is not None
            if source in constants:
                tensor = constants[source]
                fed = self._input(builder, f"{source.name}_trial", tensor.dtype, tensor.shape.numpy())
                self._constants[str(fed.name)] = site, tensor
                if not _same_form(sim.constants.get(site), tensor):
                    self._written[site] = sim.constants[site]
                node.replace_input_with(0, fed)
                replaced[source] = None
                bypass(node, builder.outputs)
            elif (encoding := encodings.get(site)) is None:
                bypass(node, builder.outputs)
            elif _is_input(encoding) and source.dtype in (None, D.FLOAT):
                self._write(builder, node, source, site)
            else:
                write_activation(builder, node, encoding, unsigned(encoding), site)
        for source in replaced:
            remove_unread(source)
        guard_outputs(builder, copy.graph.all_nodes())
        close(copy)
        return copy

    def _input(self, builder: Builder, base: str, dtype: ir.DataType, shape: Sequence[int] = ()) -> ir.Value:
        name = builder.names.value(base)
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        builder.graph.inputs.append(value)
        return value

    def _write(self, builder: Builder, node: ir.Node, source: ir.Value, site: str) -> None:
        if site not in self._grids:
            kinds = {"low": D.FLOAT, "high": D.FLOAT, "scale": D.FLOAT, "zero_point": D.UINT16}
            self._grids[site] = [
                self._input(builder, f"{source.name}_trial_{kind}", dtype) for kind, dtype in kinds.items()
            ]
        low, high, *pair = self._grids[site]
        place, base = before(node), str(source.name)
        inside = builder.emit(place, "Clip", [source, low, high], f"{base}_trial_clip", D.FLOAT)
        codes = builder.emit(place, "QuantizeLinear", [inside, *pair], f"{base}_trial_q", D.UINT16)
        value = builder.emit(place, "DequantizeLinear", [codes, *pair], f"{base}_trial_dq", D.FLOAT)
        builder.take_over(node, value)

    def outdated(self, sim: QuantizationSimModel) -> bool:
        """Whether a constant was replaced that cannot be fed: one that the model holds in another form than the simulation."""
        return any(sim.constants.get(site) is not array for site, array in self._written.items())

    def feeds(self, sim: QuantizationSimModel, encodings: Mapping[str, Encoding]) -> dict[str, Array]:
        """Grids and weights for ``encodings``; what did not change since the last call is not computed again."""
        found: dict[str, Array] = {}
        for name, (site, tensor) in self._constants.items():
            encoding, bias = encodings.get(site), site in self._biases
            live = None if site in self._written else sim.constants[site]
            if self._changed(name, encoding, live):
                array = tensor.numpy() if live is None else live
                self._fed[name] = encoding, live, [_on_grid(array, encoding, bias)]
            found[name] = self._fed[name][2][0]
        for site, values in self._grids.items():
            if self._changed(site, encodings[site]):
                self._fed[site] = encodings[site], None, _grid(encodings[site])
            found.update(zip((str(v.name) for v in values), self._fed[site][2], strict=True))
        return found

    def _changed(self, key: str, encoding: Encoding | None, array: Array | None = None) -> bool:
        known = self._fed.get(key)
        return known is None or known[0] is not encoding or known[1] is not array


def _on_grid(array: Array, encoding: Encoding | None, bias: bool) -> Array:
    return array if encoding is None else folded_constant(array, encoding, bias=bias)


def _same_form(array: Array | None, tensor: ir.TensorProtocol) -> bool:
    """Whether a constant of the simulation can be fed in the place of the one that a model was made with."""
    return array is not None and array.shape == tuple(tensor.shape.numpy()) and array.dtype == tensor.dtype.numpy()


def _grid(encoding: Encoding) -> list[Array]:
    """Ends, scale and zero point of a grid whose codes are counted from 0, as float32 and uint16."""
    shown = unsigned(encoding)
    fmt, zero_point = encoding.format, encoding.zero_point.astype(np.float32)
    assert isinstance(fmt, IntFormat)
    ends = [(np.float32(end) - zero_point) * encoding.scale for end in (fmt.qmin, fmt.qmax)]
    floats = [np.asarray(number, np.float32) for number in (*ends, shown.scale)]
    return [*floats, np.asarray(shown.zero_point, np.uint16)]
