"""Trials of an automatic search: their list, how and where one runs, and its folder.

Fixed trials come first, from cheap to dear, then those that the analysis of the first one suggests. They run in this process, in
local worker processes, or on a Ray cluster.

A finished trial is a folder with an export and ``trial.json``; it appears by one rename. What a killed process left has a
name that begins with a dot, and is removed when the search goes on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.analysis.analyze import analyze
from bitwright.analysis.subject import Subject, open_subject
from bitwright.errors import BitwrightError, ConfigError
from bitwright.export.files.manifest import Fingerprint, fingerprint
from bitwright.export.files.run_state import read_run_state, write_run_state
from bitwright.metrics.labels import label_array
from bitwright.precision.candidates import as_candidates, simulation_of
from bitwright.precision.costs import present_costs
from bitwright.precision.measure import Metric, Noise, one_sided
from bitwright.precision.result import decibel
from bitwright.precision.search import INTERRUPTED, OUT_OF_TIME, mixed_precision
from bitwright.recipes.quantize import quantize
from bitwright.runtimes.onnxruntime import operator_libraries, register_operators


@dataclass(frozen=True)
class Trial:
    """One way to quantize the model.

    Attributes:
        name: unique; also of its folder.
        preset: of the simulation.
        scheme: range method; ``None`` leaves it to the preset and the recipe.
        recipe: steps, by name or as ``{name: options}``; ``None`` is the default recipe of the preset.
        mixed: candidates of a search for mixed precision; empty for one precision.
        why: what it is for.
    """

    name: str
    preset: str
    scheme: str | None = None
    recipe: tuple[str | Mapping[str, Any], ...] | None = None
    mixed: tuple[str, ...] = ()
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Trial:
        """Build one from the data of :meth:`to_dict`."""
        recipe = plain["recipe"]
        return cls(**{**plain, "recipe": None if recipe is None else tuple(recipe), "mixed": tuple(plain["mixed"])})


FIRST = Trial("w8a8-fast", "w8a8", recipe=("fold",), why="nearest rounding: the fastest answer")

_RANGES = tuple(
    Trial(f"w8a8-{scheme}", "w8a8", scheme, ("fold",), why=f"ranges by {scheme}") for scheme in ("mse", "percentile")
)
_PRESETS = ("w8a8", "w8a16", "w4a8", "w4a16")
_RECIPES = tuple(Trial(f"{preset}-recipe", preset, why=f"the default recipe of {preset}") for preset in _PRESETS)
_MIXED = Trial("mixed", "w8a16", mixed=_PRESETS, why="a precision for every layer")

# Cause that the analysis of the first trial found -> recipe that is made for it.
_DIRECTED: dict[str, tuple[str, ...]] = {
    "outlier_channels": ("fold", "smooth", "widen"),
    "disparate_channels": ("fold", "equalize", "bias_correction"),
    "disparate_inputs": ("fold", "equalize", "bias_correction"),
    "outlier_weight_channel": ("fold", "equalize", "bias_correction"),
    "softmax_input": ("fold", "widen"),
    "uneven_samples": ("fold", "widen"),
    "few_bits": ("fold", "adaround"),
    "few_codes": ("fold", "activation_ranges", "widen"),
    "range_too_wide": ("fold", "activation_ranges", "gptq"),
    "clipping": ("fold", "activation_ranges"),
    "accumulating_residual": ("fold", "widen"),
}


def waves(causes: Iterable[str], presets: Sequence[str] = _PRESETS) -> list[list[Trial]]:
    """Trials in groups; those of one group do not depend on each other.

    Args:
        presets: that trials may have.
        causes: keys of ``bitwright.analysis.causes.CAUSES`` that were found in :data:`FIRST`, most frequent first.
    """
    recipes: dict[tuple[str, ...], str] = {}
    for cause in causes:
        if cause in _DIRECTED:
            recipes.setdefault(_DIRECTED[cause], cause)
    directed = [
        Trial(
            f"w8a8-{'-'.join(recipe[1:])}", "w8a8", recipe=recipe, why=f"the analysis found {cause.replace('_', ' ')}"
        )
        for recipe, cause in recipes.items()
    ]
    able = tuple(name for name in _PRESETS if name in presets)
    mixed = []
    if len(able) > 1:
        mixed = [replace(_MIXED, preset="w8a16" if "w8a16" in able else able[0], mixed=able)]
    found = [[*_RECIPES[:1], *_RANGES], directed, [*_RECIPES[1:], *mixed]]
    return [[trial for trial in wave if trial.preset in presets] for wave in found]


logger = logging.getLogger("bitwright")

REPORT = "trial.json"
_VERSION = 3  # of the files of a search
_PARTIAL = ".partial-"
_CONFIDENCE = 0.9  # of the interval that is written down
_QUALITY = (
    "metric", "allowed_drop", "lower_is_better", "labels", "evaluation_data", "confidence", "min_sqnr"
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Data and options shared by the trials of a search; can be sent to another process.

    Attributes:
        model: as the user gave it.
        data: batches.
        options: of the metric: ``metric``, ``lower_is_better``, ``allowed_drop``, ``labels``, ``evaluation_data``, ``min_sqnr``,
            ``seed``, ``cost``, ``times``, ``confidence``, ``config_file``, ``target``, ``filename_prefix``.
        folder: of the search.
        until: of the clock ``time.time``, which processes on other machines have too: when the search has to end.
    """

    model: Any
    data: Sequence[Any]
    options: Mapping[str, Any]
    folder: Path
    until: float | None = None

    def run(self, trial: Trial, given_up: str = "") -> None:
        """As :func:`run_trial`."""
        run_trial(self, trial, *filter(None, [given_up]))

    @cached_property
    def float_side(self) -> FloatSide:
        """The float model's metric and outputs, with which trials are compared; computed once per process."""
        return FloatSide(self)

    def __getstate__(self) -> dict[str, Any]:
        plain = {k: v for k, v in self.__dict__.items() if k != "float_side"}
        return {**plain, "libraries": operator_libraries()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for library in state.pop("libraries"):
            register_operators(library)
        self.__dict__.update(state)


class FloatSide:
    """Metric and outputs of the float model."""

    def __init__(self, job: Job) -> None:
        options = job.options
        sim = simulation_of(job.model, job.data, as_candidates(["w8a16"])[0], options["config_file"])
        self.subject: Subject = open_subject(sim)
        self.noise = Noise(self.subject, job.data)
        self.metric: Metric | None = None
        if options["metric"] is not None:
            data = options["evaluation_data"]
            self.metric = Metric(
                self.subject,
                options["metric"],
                lower_is_better=options["lower_is_better"],
                data=job.data if data is None else data,
                labels=options["labels"],
                allowed=options["allowed_drop"],
                seed=options["seed"],
            )

    def check_metric(self) -> None:
        """Check the metric on outputs that are noise.

        Raises:
            ConfigError: it does not tell them from those of the float model, or calls them better.
        """
        assert self.metric is not None
        self.metric.put_to_test(self.noise)


def run_trial(job: Job, trial: Trial, given_up: str = "") -> None:
    """Run a trial and write its folder; the folder of a failed trial holds the reason.

    Args:
        given_up: why the trial cannot be carried out: its folder says that.
    """
    begin = time.monotonic()
    final = job.folder / "trials" / trial.name
    if final.exists():  # of a process that was lost after its rename
        return
    partial = job.folder / "trials" / f"{_PARTIAL}{trial.name}-{secrets.token_hex(4)}"
    partial.mkdir(parents=True)
    try:
        try:
            report: dict[str, Any] = {"failed": given_up} if given_up else _carried_out(job, trial, partial)
        except Exception as error:  # whatever a model, a metric or a runtime raises; the table shows it
            if _interrupted(error):
                raise KeyboardInterrupt from error
            logger.warning("the trial %s failed: %s", trial.name, error)
            shutil.rmtree(partial)
            partial.mkdir()
            report = {"failed": f"{type(error).__name__}: {error}"}
            if isinstance(error, ConfigError) and error.site == "deadline":
                report["cut"] = OUT_OF_TIME
        report.update(trial=trial.to_dict(), seconds=time.monotonic() - begin)
        write_run_state(partial / REPORT, report)
        if final.exists():  # the same trial, by a worker that was taken for lost
            shutil.rmtree(partial)
            return
        os.rename(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused an error; extension modules convert it into errors of their own."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def simulate(job: Job, trial: Trial) -> Any:
    """The calibrated simulation of a trial, deterministic."""
    return _simulated(job, trial)[0]


def _simulated(job: Job, trial: Trial) -> tuple[Any, dict[str, Any]]:
    options = job.options
    if trial.mixed:
        quality = {name: options[name] for name in _QUALITY}
        found = mixed_precision(
            job.model, job.data, trial.mixed, cost=options["cost"], times=options["times"], seed=options["seed"],
            config_file=options["config_file"], deadline=_left(job), **quality,
        )  # fmt: skip
        cut = [note for note in found.notes if note in (OUT_OF_TIME, INTERRUPTED)]
        return found.sim, {"mixed_precision": found.to_dict(), **({"cut": cut[-1]} if cut else {})}
    made = quantize(
        job.model, list(job.data), trial.preset, recipe=None if trial.recipe is None else list(trial.recipe),
        quant_scheme=trial.scheme, config_file=options["config_file"], progress=False,
    )  # fmt: skip
    return made.sim, {"recipe": str(made.report)}


def _left(job: Job) -> float | None:
    """Seconds until the deadline of the search."""
    return None if job.until is None else max(job.until - time.time(), 0.0)


def _carried_out(job: Job, trial: Trial, folder: Path) -> dict[str, Any]:
    known = job.float_side  # before anything else: a metric that cannot be used ends the search
    sim, report = _simulated(job, trial)
    subject = open_subject(sim)
    noise = known.noise.measure(subject)
    if known.metric is not None:
        score = known.metric.measure(subject)
        metric = known.metric
        found = metric.interval(score, _CONFIDENCE)
        report.update(
            metric=score.mean, drop=metric.drop(score), worst_drop=metric.worst(found),
            sure_drop=metric.worst(metric.interval(score, one_sided(job.options["confidence"]))), share=score.share,
            interval={"low": found.low, "high": found.high, "text": found.text, "n": found.n},
            suspicious=metric.suspicious(score, noise),
        )  # fmt: skip
    noise_db = decibel(noise)
    report.update(costs=present_costs(sim, job.options["times"]), sqnr_db=noise_db if np.isfinite(noise_db) else None)
    if trial.recipe == ("fold",) and trial.scheme is None:
        try:  # keys of the causes, the most frequent first
            analysis = analyze(sim, list(job.data)[:2], mode="fast", progress=False)
            keys = [cause.cause for layer in analysis.layers for cause in layer.causes]
            report["causes"] = sorted(dict.fromkeys(keys), key=lambda key: -keys.count(key))
        except BitwrightError as error:
            logger.warning("no recipe can be directed by an analysis: %s", error)
            report.update(causes=[], no_analysis=str(error))
    sim.export(folder, job.options["filename_prefix"], target=job.options["target"])
    return report


# ------------------------------------------------------------------------------------------------ folders

_REMOVE_TRIAL = "remove the folder of the trial"


def read_trial(folder: Path, name: str, trial: Trial | None = None) -> dict[str, Any] | None:
    """The report of a finished trial; ``None`` where there is none.

    Args:
        trial: what it has to be of.

    Raises:
        ConfigError: the file is damaged, or of another trial of this name.
    """
    path = folder / "trials" / name / REPORT
    if not path.parent.exists():  # a trial's folder appears whole
        return None
    found = read_run_state(path, _REMOVE_TRIAL)
    if trial is not None and _plain(found.get("trial")) != _plain(trial.to_dict()):
        raise ConfigError(
            str(path.parent),
            f"the trial {name} was another one when it ran: {found.get('trial')}",
            f"{_REMOVE_TRIAL} to run it again, or give the new trial a name of its own",
        )
    return found


def _plain(trial: Any) -> Any:
    """A trial as plain JSON data, without its ``why``."""
    return json.loads(json.dumps({k: v for k, v in (trial or {}).items() if k != "why"}))


def remove_partial(folder: Path) -> None:
    """Remove unfinished folders of killed processes."""
    trials = folder / "trials"
    for path in trials.iterdir() if trials.is_dir() else ():
        if path.name.startswith(_PARTIAL):
            shutil.rmtree(path, ignore_errors=True)


def identity(model: Any, data: Sequence[Any], options: Mapping[str, Any]) -> dict[str, str]:
    """Identity of a search folder: hashes of the model and the data, and the options that decide results."""
    files = ("config_file", "times")
    plain = {k: _text(v) for k, v in options.items() if k not in ("labels", "evaluation_data", *files)}
    plain.update({name: _hash_of_file(options[name]) for name in files})
    if options["labels"] is not None:
        known = label_array(options["labels"])
        told = known if known.dtype != object else np.frombuffer(_text(known.tolist()).encode(), np.uint8)
        plain["labels"] = fingerprint([told])
    if options["evaluation_data"] is not None:
        plain["evaluation_data"] = fingerprint(options["evaluation_data"])
    return {"model": _model_hash(model), "data": fingerprint(data), **plain}


def _text(value: Any) -> str:
    if callable(value):
        return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', type(value).__name__)}"
    return repr(value)


def _hash_of_file(option: Any) -> str:
    """The hash of rules or times by content, not by file name."""
    if isinstance(option, (str, os.PathLike)) and Path(option).is_file():
        return hashlib.sha256(Path(option).read_bytes()).hexdigest()
    return _text(option)


def _model_hash(model: Any) -> str:
    if hasattr(model, "state_dict"):
        return _module_hash(model)
    import onnx_ir as ir

    from bitwright.onnx.model.load import load_model

    loaded = load_model(model).model  # weights may lie in files beside the model's
    seen = Fingerprint()
    for graph in loaded.graphs():
        for name, value in graph.initializers.items():
            if value.const_value is not None:
                seen.update({name: value.const_value.numpy()})
    bare = ir.to_proto(loaded)
    return f"{hashlib.sha256(_without_weights(bare)).hexdigest()} {seen}"


def _without_weights(proto: Any) -> bytes:
    """The model without its large weights, which are hashed apart."""
    for tensor in proto.graph.initializer:
        for field in ("raw_data", "external_data", "data_location"):
            tensor.ClearField(field)
    found: bytes = proto.SerializeToString(deterministic=True)
    return found


def _module_hash(model: Any) -> str:
    seen = Fingerprint()
    for name, module in model.named_modules():
        seen.update({name: f"{type(module).__module__}.{type(module).__qualname__}"})
    tensors = {**dict(model.named_buffers()), **model.state_dict()}
    for name, tensor in tensors.items():
        seen.update({name: tensor.detach().cpu()} if hasattr(tensor, "detach") else {name: str(tensor)})
    return f"{type(model).__qualname__} {seen}"


def claim(folder: Path, mine: Mapping[str, str]) -> None:
    """Record the identity of a search in its folder, or check it.

    Raises:
        ConfigError: it belongs to a search of something else.
    """
    (folder / "trials").mkdir(parents=True, exist_ok=True)
    path = folder / "auto.json"
    if path.is_file():
        kept = read_run_state(path)
        if kept.get("version") != _VERSION:
            raise ConfigError(
                str(folder),
                f"another version of bitwright searched there (version {kept.get('version')} of the folder, and not {_VERSION})",
                "name an empty folder",
            )
        theirs = kept.get("identity", {})
        for key, value in mine.items():
            if theirs.get(key) != value:
                raise ConfigError(
                    str(folder),
                    f"it belongs to a search with another {key.replace('_', ' ')}: {str(theirs.get(key))[:80]}, and here it is "
                    f"{value[:80]}",
                    "name an empty folder, or go on with the same model, data and options",
                )
        return
    write_run_state(path, {"format": "bitwright-auto", "version": _VERSION, "identity": dict(mine)})
