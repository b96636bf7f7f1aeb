"""What an ONNX simulation hands out: files for deployment, and values at its sites."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.export.artefacts import (
    Exported,
    Samples,
    bias_form,
    check_encoding_version,
    recurrent_form,
    write_artefacts,
)
from bitwright.export.deployed import measured
from bitwright.export.files.atomic import check_destination
from bitwright.export.qdq.forms import Builder
from bitwright.export.qdq.markers import STATES
from bitwright.export.qdq.products import show
from bitwright.export.qdq.write import QdqResult, to_qdq
from bitwright.export.recurrent.write import write_recurrent
from bitwright.export.targets import FileFormat, RecurrentForm, Target, target_for
from bitwright.export.verify.runtime import refusals
from bitwright.export.verify.samples import plain
from bitwright.onnx.model.data import Feeds, as_feeds
from bitwright.onnx.model.instrument import Instrument
from bitwright.onnx.model.session import first_line, open_session, run_session
from bitwright.onnx.simulation.simulate import Simulation
from bitwright.runtimes.outputs import named_arrays

if TYPE_CHECKING:
    from bitwright.onnx.simulation.quantsim import QuantizationSimModel

logger = logging.getLogger("bitwright")

Array = NDArray[Any]
_ACTIVATIONS = ("input", "output")


def export(
    sim: QuantizationSimModel,
    path: str | Path,
    filename_prefix: str,
    target: str,
    format: FileFormat | None,
    *,
    encoding_version: str,
    samples: bool,
    measure_speed: bool,
    bias: Any,
    **options: Any,
) -> Exported:
    """See :meth:`QuantizationSimModel.export`."""
    check_destination(path, filename_prefix)
    check_encoding_version(encoding_version)
    target = target_for(target, format).name
    encodings = sim._encodings()
    example = sim.example()
    sim._close_large()  # what is written takes memory too

    def of_rows(result: QdqResult, rows: int | None) -> Samples:
        return sample(sim, result, {n: x[:rows] if x.ndim else x for n, x in example.items()})

    exported = write_artefacts(
        sim,
        path,
        filename_prefix,
        sim.marked,
        encodings,
        encoding_version=encoding_version,
        bias=bias_form(sim, bias),
        target=target,
        data=[plain(array) for array in example.values()],
        samples=of_rows if samples else None,
        **options,
    )
    return measured(exported, target) if measure_speed else exported


def as_qdq(
    sim: QuantizationSimModel, target: str | Target, bias: Any, recurrent: RecurrentForm | None, **options: Any
) -> QdqResult:
    """The file that an export for ``target`` would write."""
    marked = write_recurrent(sim.marked, recurrent_form(sim, recurrent, target))
    form = bias_form(sim, bias)
    return to_qdq(marked, sim._encodings(), bias=form, target=target, **options)


def sampled(
    sim: QuantizationSimModel,
    feeds: Any,
    target: str | Target,
    bias: Any,
    recurrent: RecurrentForm | None,
    **options: Any,
) -> tuple[QdqResult, Samples]:
    """The file that an export would write, and what the simulation computes on ``feeds``, by default the example."""
    checked = sim.example() if feeds is None else as_feeds(feeds, sim.specs)
    result = as_qdq(sim, target, bias, recurrent, **options)
    return result, sample(sim, result, checked)


def sample(sim: QuantizationSimModel, result: QdqResult, feeds: Feeds) -> Samples:
    """What the simulation computes on ``feeds``, at the sites that a file has."""
    names = [
        s.name for s in sim.quantizers.values() if s.role in _ACTIVATIONS and s.name in result.tensors and s.enabled
    ]
    outputs = named_arrays(dict(zip(sim.output_names, sim.run(feeds), strict=True)))
    sim._close_large()  # the next session is another one
    return Samples(sim.capture(names, feeds), feeds, outputs)


def capture(sim: QuantizationSimModel, names: Sequence[str], feeds: Feeds) -> dict[str, list[Array]]:
    """See :meth:`QuantizationSimModel.capture`."""
    try:
        return _captured(sim, names, feeds, bodies=True)
    except refusals() as error:
        if all(graph is sim.marked.graph for graph in sim.marked.graphs()):
            raise
        logger.warning("what bodies make cannot be brought out of them: %s", first_line(error))
        return _captured(sim, names, feeds, bodies=False)


def _captured(sim: QuantizationSimModel, names: Sequence[str], feeds: Feeds, *, bodies: bool) -> dict[str, list[Array]]:
    """Values at sites; of those in bodies, other than the steps of recurrent layers, only where ``bodies`` says so."""
    simulation = sim.simulation()
    places = list(_places(simulation, names, bodies))
    shown = show(Builder(simulation.model), [value for _, value in places])
    fetch = list(dict.fromkeys(str(value.name) for value in shown.values()))
    values = {}
    if fetch:
        session = open_session(simulation.model, sim.providers, threads=sim.threads)
        values = dict(zip(fetch, run_session(session, feeds, "the simulation", fetch), strict=True))
    found: dict[str, list[Array]] = {}
    for name, value in places:
        found.setdefault(name, []).append(values[str(shown[value].name)])
    return found


def _places(simulation: Simulation, names: Sequence[str], bodies: bool) -> Iterator[tuple[str, ir.Value]]:
    """Site -> a value of the main graph that shows it, for every place of every site."""
    instrument, graph = Instrument(simulation.model), simulation.model.graph
    for name, value in ((site, value) for site in names for value in simulation.results.get(site, ())):
        inside = value.graph
        assert inside is not None
        owner = instrument.owner(inside)
        if owner is None:
            yield name, value
        elif bodies or (owner.graph is graph and STATES in owner.metadata_props):
            dtype = (value.dtype or ir.DataType.FLOAT).numpy()
            yield name, instrument.lift(value, inside, np.zeros(0, dtype), None)[0]
