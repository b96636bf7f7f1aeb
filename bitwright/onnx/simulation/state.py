"""The parameters of an ONNX simulation, and snapshots of its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.simulation.protocols import Undo
from bitwright.errors import ModelError
from bitwright.export.qdq.markers import is_site, site_of
from bitwright.onnx.simulation.repairs import put_in_force

if TYPE_CHECKING:
    from bitwright.onnx.simulation.quantsim import QuantizationSimModel

Array = NDArray[Any]


def set_parameter(sim: QuantizationSimModel, name: str, value: Array) -> None:
    """See :meth:`QuantizationSimModel.set_parameter`; the caller holds the lock."""
    holder = sim.marked.graph.initializers[name]
    tensor = holder.const_value
    assert tensor is not None, name
    if tuple(value.shape) != tuple(tensor.shape.numpy()):
        raise ModelError(
            name,
            f"the new value has shape {value.shape}, the parameter {tuple(tensor.shape.numpy())}",
            "keep the shape",
        )
    array = np.ascontiguousarray(value).astype(tensor.dtype.numpy())
    holder.const_value = ir.Tensor(array, dtype=tensor.dtype, name=name)
    for site in sim._sites_of.get(name, ()):
        sim.constants[site] = np.asarray(array, np.float32) if array.dtype.kind == "V" else array
        if site in sim._biases:
            sim._biases[site].replace(sim.constants[site])
    sim.forget_simulations()


def remember(sim: QuantizationSimModel, parameters: bool) -> Undo:
    """See :meth:`QuantizationSimModel.remember`."""
    quantizers, calibrated, log = sim.quantizers.remember(), sim.calibrated, sim.calibration_log
    repairs = sim.repairs
    initializers = sim.marked.graph.initializers if parameters else {}
    tensors = {name: value.const_value for name, value in initializers.items()}
    constants = dict(sim.constants) if parameters else {}

    def restore() -> None:
        if sim.repairs is not repairs:
            put_in_force(sim, repairs)
        for name, tensor in tensors.items():
            holder = sim.marked.graph.initializers.get(name)  # gone where a chosen weight took its place
            if tensor is not None and holder is not None and holder.const_value is not tensor:
                sim.set_parameter(name, tensor.numpy())
        _restore_computed(sim, constants)
        quantizers()
        sim.calibrated, sim.calibration_log = calibrated, log

    return restore


def _restore_computed(sim: QuantizationSimModel, constants: Mapping[str, Array]) -> None:
    """Give weights that nodes computed, and that a method has replaced since, the values they had."""
    changed = {
        site: array
        for site, array in constants.items()
        if sim.constants[site] is not array and sim.graph.values[sim.plan.sites[site].value].param is None
    }
    for marker in [node for node in sim.marked.graph if is_site(node)] if changed else ():
        array = changed.get(site_of(marker))
        chosen = marker.inputs[0]
        if array is not None and chosen is not None and chosen.is_initializer():
            chosen.const_value = ir.Tensor(array, name=chosen.name)
            sim.constants[site_of(marker)] = array
    sim.forget_simulations()
