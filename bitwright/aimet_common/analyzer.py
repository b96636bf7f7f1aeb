"""AIMET's analyzer, for both packages: the evaluation of the user with one layer quantized, and with all but one.

``bitwright.analyze`` answers the same question from a few passes over the data; this keeps AIMET's calls and file names.
The files hold ranges of quantizers, histograms of what they saw, and outputs of layers.
"""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.analysis.layer_outputs import layer_values
from bitwright.analysis.subject import Subject, open_subject
from bitwright.core.simulation.sites import Site
from bitwright.errors import CalibrationError, ConfigError, with_article
from bitwright.methods.switching import Costs, by_itself, by_operator, left_out
from bitwright.report.document import seen_values
from bitwright.report.page import histogram_chart, ranges_chart, scores_chart, write_data, write_page

# ------------------------------------------------------------------------------------ scores


logger = logging.getLogger("bitwright")

Scores = dict[str, float]
Evaluate = Callable[[Any], float]


def checked(evaluate: Evaluate, model: Any, where: str) -> float:
    """Score ``model`` by the callback and check that the score is a number.

    Raises:
        ConfigError: it returns no number, or NaN.
    """
    found = evaluate(model)
    try:
        score = float(found)
    except (TypeError, ValueError) as error:
        remedy = "return one number"
        raise ConfigError(where, f"the evaluation returned {with_article(type(found).__name__)}", remedy) from error
    if np.isnan(score):
        raise ConfigError(where, "the evaluation returned NaN", "check it for empty batches and divisions by zero")
    return score


def scores_of(subject: Subject, evaluate: Evaluate, groups: Mapping[str, Collection[str]], *, alone: bool) -> Scores:
    """Group -> what the evaluation says with only its sites quantized, or with all but these; the simulation stays as it is."""
    found = {}
    switch = by_itself if alone else left_out
    settings = {name: [partial(switch, subject.sites, frozenset(held))] for name, held in groups.items()}
    with subject.exclusive():
        for name, scores in Costs().scores(settings, lambda name: checked(evaluate, subject.runnable(), name)):
            found[name] = scores[0]
            logger.info("%s: %g %s", name, found[name], "alone" if alone else "all but this one")
    return found


class QuantAnalyzerBase:
    """The steps of the analysis, for simulations of either front end.

    Args:
        model: in float; it is left as it is.
        dummy_input: an example of its input.
        forward_pass_callback: runs the model it is given on calibration data.
        eval_callback: rates the model it is given.
    """

    def __init__(
        self, model: Any, dummy_input: Any, forward_pass_callback: Callable[..., Any], eval_callback: Evaluate
    ) -> None:
        for name, given in (("forward_pass_callback", forward_pass_callback), ("eval_callback", eval_callback)):
            if not callable(given):
                problem = f"it is {with_article(type(given).__name__)}, not a function"
                raise ConfigError(name, problem, "pass a function of the model, or CallbackFunc(function, arguments)")
        self._model, self._dummy_input = model, dummy_input
        self._forward_pass_callback, self._eval_callback = forward_pass_callback, eval_callback
        self._dataset: Any = None
        self._num_batches = 0

    @abstractmethod
    def _float_score(self, subject: Subject) -> float:
        """Score of the float model."""

    def enable_per_layer_mse_loss(self, unlabeled_dataset_iterable: Any, num_batches: int) -> None:
        """Let :meth:`analyze` compare the outputs of every layer too, on so many batches.

        Raises:
            ConfigError: (a ValueError) the data holds fewer batches.
        """
        if len(unlabeled_dataset_iterable) < num_batches:
            raise ConfigError(
                "enable_per_layer_mse_loss",
                f"{num_batches} batches are asked for, and the data holds {len(unlabeled_dataset_iterable)}",
                "pass more data, or ask for fewer batches",
            )
        self._dataset, self._num_batches = unlabeled_dataset_iterable, num_batches

    def _all_steps(self, sim: Any, results_dir: str | Path, *, histograms: bool) -> None:
        self.check_model_sensitivity_to_quantization(sim)
        self._per_layer(sim, results_dir, None, alone=True)
        self._per_layer(sim, results_dir, None, alone=False)
        self.export_per_layer_encoding_min_max_range(sim, results_dir)
        if histograms:
            self.export_per_layer_stats_histogram(sim, results_dir)
        if self._dataset is not None:
            self.export_per_layer_mse_loss(sim, results_dir)

    def check_model_sensitivity_to_quantization(self, sim: Any) -> tuple[float, float, float]:
        """Scores of the float model, with only weights quantized, and with only activations quantized."""
        subject = open_subject(sim)
        weights = [name for name, site in subject.sites.items() if site.is_stored or site.role == "bias"]
        others = [name for name in subject.sites if name not in set(weights)]
        real = self._float_score(subject)
        scores = scores_of(subject, self._eval_callback, {"weights": weights, "activations": others}, alone=True)
        logger.info("float %g, weights quantized %g, activations quantized %g", real, *scores.values())
        return real, scores["weights"], scores["activations"]

    def _per_layer(self, sim: Any, results_dir: Any, filename: str | None, *, alone: bool) -> Scores:
        subject = open_subject(sim)
        groups = by_operator(subject.sites)
        scores = scores_of(subject, self._eval_callback, groups, alone=alone)
        title = f"per_layer_quant_{'enabled' if alone else 'disabled'}"
        if results_dir is not None:
            write_page(Path(results_dir) / (filename or f"{title}.html"), title, scores_chart(scores, "evaluation"))
            write_data(Path(results_dir) / f"{Path(filename or title).stem}.json", scores)
        elif filename is not None:
            write_page(filename, title, scores_chart(scores, "evaluation"))
        return scores

    def export_per_layer_encoding_min_max_range(
        self, sim: Any, results_dir: str | Path
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Ranges of weights and activations, as ``min_max_ranges/weights.json``, ``activations.json`` and pages."""
        return write_range_files(sim, Path(results_dir) / "min_max_ranges")

    def export_per_layer_stats_histogram(self, sim: Any, results_dir: str | Path) -> None:
        """Histograms of what calibration saw, and of the weights, as ``activations_pdf`` and ``weights_pdf``."""
        write_histograms(sim, Path(results_dir))

    def export_per_layer_mse_loss(self, sim: Any, results_dir: str | Path) -> Scores:
        """Mean squared error of every layer's output against float, as ``per_layer_mse_loss.json`` and a page.

        Raises:
            CalibrationError: :meth:`enable_per_layer_mse_loss` was not called.
        """
        if self._dataset is None:
            raise CalibrationError(
                "export_per_layer_mse_loss",
                "no data was given for it",
                "call analyzer.enable_per_layer_mse_loss(batches, num_batches) first",
            )
        losses: dict[str, list[float]] = {}
        for _, batch in zip(range(self._num_batches), self._dataset, strict=False):
            for name, real, quantized in layer_values(sim, batch):
                if real.dtype.kind == "f" and real.shape == quantized.shape:
                    error = np.square(real.astype(np.float64) - quantized).mean() if real.size else 0.0
                    losses.setdefault(name, []).append(float(error))
        found = {name: float(np.mean(values)) for name, values in losses.items()}
        folder = Path(results_dir)
        write_page(folder / "per_layer_mse_loss.html", "per_layer_mse_loss", scores_chart(found, "mean squared error"))
        write_data(folder / "per_layer_mse_loss.json", found)
        return found


_BINS = 64


def write_range_files(sim: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ranges of weights and activations, as ``weights.json``, ``activations.json`` and pages."""
    weights: dict[str, Any] = {}
    activations: dict[str, Any] = {}
    for site in _calibrated(sim):
        if site.role != "bias":  # int32 from the scales of others
            (weights if site.is_stored else activations)[called(site)] = _ranges_of(site)
    for title, found in (("weights", weights), ("activations", activations)):
        pages = {file_name(name): (name, pairs) for name, pairs in found.items() if isinstance(pairs, dict)}
        whole = {name: pair for name, pair in found.items() if isinstance(pair, tuple)}
        write_data(folder / f"{title}.json", found)
        for page, (name, pairs) in {**({title: (title, whole)} if whole else {}), **pages}.items():
            write_page(folder / f"{page}.html", name, ranges_chart(pairs))
    return weights, activations


def write_histograms(sim: Any, folder: Path) -> None:
    """Histograms of what calibration saw, and of the weights, as ``activations_pdf`` and ``weights_pdf``."""
    subject = open_subject(sim)
    model: Any = None
    for site in _calibrated(sim):
        if site.is_stored:
            model = model or subject.steps()
            _write_weight(folder / "weights_pdf" / file_name(site.op), site, model.weight(site.name))
        elif site.role in ("input", "output"):
            histogram = seen_values(site.quantizer.statistics).get("histogram")
            if histogram is not None:
                name = f"{file_name(site.op)}_{site.role}_q{site.port}_0"
                chart = histogram_chart(histogram["edges"], histogram["counts"])
                write_page(folder / "activations_pdf" / f"{name}.html", name, chart)


def _calibrated(sim: Any) -> list[Site]:
    """The sites that work and have a grid."""
    return [site for site in open_subject(sim).sites.values() if site.enabled and site.encoding is not None]


def called(site: Site) -> str:
    """The name of a quantizer in files: ``conv1_weight``, ``conv1_output_0``."""
    if site.role in ("input", "output"):
        return f"{site.op}_{site.role}_{site.port}"
    return f"{site.op}_{site.name.removeprefix(site.op + '.')}"


def _ranges_of(site: Site) -> tuple[float, float] | dict[str, tuple[float, float]]:
    """The range of a tensor, or those of its channels by name."""
    encoding = site.encoding
    assert encoding is not None
    pairs = list(zip(encoding.min.ravel().tolist(), encoding.max.ravel().tolist(), strict=True))
    return pairs[0] if len(pairs) == 1 else {f"{called(site)}_{i}": pair for i, pair in enumerate(pairs)}


def _write_weight(folder: Path, site: Site, weight: Any) -> None:
    """A page per channel of a weight with a grid per channel, else one."""
    values = np.asarray(weight.detach().cpu().float().numpy())
    name = file_name(called(site))
    assert site.encoding is not None
    axis = getattr(site.encoding.granularity, "axis", None)
    rows = values.reshape(1, -1) if axis is None else np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
    for i, row in enumerate(rows):
        counts, edges = np.histogram(row, _BINS)
        write_page(folder / f"{name}_{i}.html", f"{site.name} {i}", histogram_chart(edges.tolist(), counts.tolist()))


_KINDS = {"Activations": ("input", "output"), "Weights": ("weight", "constant", "bias")}


def write_ranges(sim: Any, save_path: str, title: str, *, apart: bool = False) -> None:
    """Write the ranges of every quantizer that works as one page, or as two.

    Args:
        sim: calibrated.
        save_path: of the page.
        title: of the page.
        apart: write ``<path>_activations.html`` and ``<path>_weights.html`` instead, of which one without ranges is left out.

    Raises:
        ConfigError: (a ValueError) the path has not the suffix ``.html``.
        CalibrationError: the simulation is not calibrated.
        TypeError: ``sim`` is no simulation.
    """
    if not hasattr(sim, "quantizers"):
        raise TypeError(f"a simulation is shown, not {with_article(type(sim).__name__)}")
    if not str(save_path).endswith(".html"):
        raise ConfigError("save_path", f"{save_path!r} does not end with .html", "name an HTML file")
    sites = open_subject(sim).sites.values()
    charts = {}
    for heading, roles in _KINDS.items():
        found = {
            called(site): (float(site.encoding.min.min()), float(site.encoding.max.max()))
            for site in sites
            if site.enabled and site.encoding is not None and site.role in roles
        }
        if found or not apart:
            charts[heading] = ranges_chart(found, heading)
    if not apart:
        write_page(save_path, title, *charts.values())
        return
    path = Path(save_path)
    for heading, chart in charts.items():
        write_page(path.with_name(f"{path.stem}_{heading.lower()}.html"), title, chart)


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
    """A name for a file: other characters than letters, digits and ``_`` become ``_``."""
    return re.sub(r"\W+", "_", name)


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = value.detach().cpu().float().numpy() if hasattr(value, "detach") else value
    np.ascontiguousarray(array, np.float32).tofile(path)
