"""Compressed models that save themselves as a configuration and weights: new numbers in the configuration, or a refusal.

``from_pretrained`` builds a class from its configuration alone. After a compression the numbers of the configuration that equal
a length which was cut are tried, one after the other and in pairs, until a model built from the configuration, read back
from JSON, has exactly the shapes that are there, and computes the same with the same weights. Where no numbers do,
``save_pretrained`` of the model refuses with the reason.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright.core.simulation.float_model import Array, Undo
from bitwright.errors import ConfigError, ExportError, first_few
from bitwright.export.files.atomic import write_json
from bitwright.torch.calls.inputs import evaluation, model_device, outputs_of, to_device

Changes = dict[tuple[str, str], Any]
"""``(holder, name) -> value``: numbers of a configuration and of those inside it."""

_PLAN_FILE = "model.plan.json"
_PAIRS = 150  # of numbers, tried at once
_CLOSE = 1e-3  # of the largest output, with weights of 16 bits 1e-2
_CLOSE_OF_16_BITS = 1e-2
#: numbers that are multiplied by another one to give a width
_FACTOR = re.compile("expand|ratio|mult|factor")
#: numbers that a class computes where they are not given
_WIDTH = re.compile("size|dim|inner|heads|width|channels")


def is_pretrained(model: Any) -> bool:
    """Whether the model is saved as a configuration object and weights, as in transformers."""
    config = getattr(model, "config", None)
    return hasattr(model, "save_pretrained") and hasattr(config, "to_dict") and hasattr(config, "save_pretrained")


def _is_built_from_dict(model: nn.Module) -> bool:
    """Whether the model is saved as a dictionary and weights, as in diffusers."""
    return hasattr(model, "save_pretrained") and hasattr(type(model), "from_config") and hasattr(model, "config")


def configurations(model: Any) -> dict[str, dict[str, Any]]:
    """Holder -> numbers of the configuration and of those inside it: ``config``, ``config.text_config``."""
    found: dict[str, dict[str, Any]] = {}
    waiting = [("config", getattr(model, "config", None))] if is_pretrained(model) else []
    while waiting:
        path, config = waiting.pop()
        held = getattr(config, "__dict__", {})
        found[path] = held
        inner = [(f"{path}.{name}", value) for name, value in held.items() if hasattr(value, "to_json_string")]
        waiting += [(name, value) for name, value in inner if not any(value.__dict__ is h for h in found.values())]
    return found


@dataclass(frozen=True)
class Fit:
    """What the configuration of a model can say of its widths.

    Attributes:
        changed: the numbers to change.
        reason: why no numbers describe the model; empty where they do.
    """

    changed: Mapping[tuple[str, str], Any]
    reason: str = ""

    @property
    def attributes(self) -> dict[str, dict[str, Any]]:
        """The changes by holder, as a plan has them."""
        found: dict[str, dict[str, Any]] = {}
        for (holder, name), value in self.changed.items():
            found.setdefault(holder, {})[name] = value
        return found


def fit_configuration(model: nn.Module, sizes: Collection[tuple[int, int]], example: Any) -> Fit:
    """Find the numbers of the configuration with which the class builds the present model.

    Args:
        model: after a compression.
        sizes: lengths of axes before and after, where they changed.
        example: an input, on which both are compared.

    Returns:
        No change and no reason for a model without a configuration.
    """
    if not is_pretrained(model):
        return Fit({}, _reason_of_dict(model) if _is_built_from_dict(model) else "")
    builder, tries = _Builder(model), list(_tries(model, sizes))
    reason = ""
    for start, order in itertools.product(_starts(model), (tries, tries[::-1])):
        found = _fitted(builder, start, order)
        problem = builder.wrong(found).problem or _difference(model, builder, found, example)
        if not problem:
            return Fit(_needed(builder, found))
        reason = reason or problem
    return Fit({}, reason)


def undescribed(model: nn.Module, sizes: Collection[tuple[int, int]]) -> str:
    """Why no numbers of the configuration give the present shapes; empty where some do, or the model has no configuration.

    Args:
        model: after a cut.
        sizes: lengths of axes before and after, where they changed.
    """
    if not is_pretrained(model):
        return _reason_of_dict(model) if _is_built_from_dict(model) else ""
    builder, tries = _Builder(model), list(_tries(model, sizes))
    found = [builder.wrong(_fitted(builder, start, tries)) for start in _starts(model)]
    return min(found, key=lambda wrong: wrong.count).problem


def _starts(model: nn.Module) -> Iterator[Changes]:
    yield {}
    held = vars(model.config)
    if {"hidden_size", "num_attention_heads"} <= held.keys() and "head_dim" not in held:
        # classes that would compute the width of a head from the number of heads read it where it is given
        yield {("config", "head_dim"): held["hidden_size"] // max(held["num_attention_heads"], 1)}


def _tries(model: nn.Module, sizes: Collection[tuple[int, int]]) -> Iterator[tuple[tuple[str, str], int | None, Any]]:
    """``(place, position in a list, new value)`` of numbers that may hold a width that was cut."""
    pairs = sorted(sizes)
    for holder, held in configurations(model).items():
        factors = sorted({v for v in held.values() if type(v) is int and v > 0})
        for name, at, value in _entries(held):
            yield from (((holder, name), at, new) for new in _replacements(name, value, pairs, factors))


def _entries(held: Mapping[str, Any]) -> Iterator[tuple[str, int | None, Any]]:
    """``(name, position, value)`` of a configuration, entries of lists one by one."""
    for name, value in held.items():
        if isinstance(value, (list, tuple)):
            yield from ((name, i, entry) for i, entry in enumerate(value))
        else:
            yield name, None, value


def _replacements(name: str, value: Any, pairs: Sequence[tuple[int, int]], factors: Sequence[int]) -> Iterator[Any]:
    """Values that a number of a configuration may have after widths were cut.

    Args:
        name: of the number.
        value: at present.
        pairs: lengths before and after.
        factors: other numbers, one of which may be multiplied by this one.
    """
    if value is None and _WIDTH.search(name):
        yield from dict.fromkeys(new for _, new in pairs)
    if type(value) is int:
        yield from (new for old, new in pairs if value == old)
    if type(value) in (int, float) and _FACTOR.search(name):
        products = ((by, new) for by in factors for old, new in pairs if value * by == old)
        yield from (new / by if new % by else new // by for by, new in products)


@dataclass(frozen=True)
class _Wrong:
    """How a model built from numbers differs from the present one.

    Attributes:
        count: parameters of another shape, or that one of both does not have.
        problem: the first ones; empty where there are none.
    """

    count: int
    problem: str = ""


class _Builder:
    """Builds models of a class from its configuration, read back from JSON."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._have = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        self._seen: dict[str, _Wrong] = {}

    def config(self, changed: Mapping[tuple[str, str], Any]) -> Any:
        """The configuration as a file holds it."""
        config = copy.deepcopy(self.model.config)
        holders = configurations(_Holder(config))
        for (holder, name), value in changed.items():
            holders[holder][name] = value
        made = type(config).from_dict(json.loads(config.to_json_string()))
        kept = getattr(self.model.config, "_attn_implementation", None)
        if kept is not None:
            made._attn_implementation = kept
        return made

    def build(self, changed: Mapping[tuple[str, str], Any], device: str) -> nn.Module:
        """A new model; the state of the random numbers stays."""
        with torch.random.fork_rng(devices=[]), torch.device(device):
            made: nn.Module = type(self.model)(self.config(changed))
        return made

    def wrong(self, changed: Mapping[tuple[str, str], Any]) -> _Wrong:
        """Compare the shapes of all parameters and buffers."""
        key = repr(sorted(changed.items()))
        if key not in self._seen:
            self._seen[key] = self._wrong(changed)
        return self._seen[key]

    def _wrong(self, changed: Mapping[tuple[str, str], Any]) -> _Wrong:
        have = self._have
        try:
            made = {name: tuple(t.shape) for name, t in self.build(changed, "meta").state_dict().items()}
        except Exception as error:  # of the class: numbers that do not go together
            return _Wrong(2 * len(have) + 1, f"a model cannot be built from it: {error}".splitlines()[0])
        names = [name for name in {**have, **made} if have.get(name) != made.get(name)]
        said = [
            f"{name} has the shape {have.get(name, 'none')}, and {made.get(name, 'none')} when it is built from the configuration"
            for name in names
        ]
        return _Wrong(len(names), first_few(said, 2))


class _Holder:
    """What :func:`configurations` reads of a model."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def save_pretrained(self) -> None:
        """Not called."""


def _fitted(builder: _Builder, start: Changes, tries: Sequence[tuple[tuple[str, str], int | None, Any]]) -> Changes:
    """``start`` with the trials, and then pairs of them, that correct more shapes."""
    found, left = dict(start), builder.wrong(start).count
    held = configurations(builder.model)
    pairs = itertools.islice(itertools.combinations(tries, 2), _PAIRS)
    for some in itertools.chain(((one,) for one in tries), pairs):
        if not left:
            break
        more = _with(found, some, held)
        now = builder.wrong(more).count if more != found else left
        if now < left:
            found, left = more, now
    return found


def _with(found: Changes, tries: Iterable[tuple[tuple[str, str], int | None, Any]], held: Mapping[str, Any]) -> Changes:
    made = dict(found)
    for place, at, value in tries:
        if at is None and place not in found:
            made[place] = value
        elif at is not None:
            row = list(made.get(place, held[place[0]][place[1]]))
            row[at] = value
            made[place] = row
    return made


def _needed(builder: _Builder, found: Changes) -> Changes:
    """Without what all shapes are right without."""
    for place in list(found):
        fewer = {key: value for key, value in found.items() if key != place}
        if place[1] != "head_dim" and not builder.wrong(fewer).count:
            found = fewer
    return found


def _difference(model: nn.Module, builder: _Builder, changed: Changes, example: Any) -> str:
    """Whether a model built from the configuration computes something else with the same weights; empty where it does not."""
    try:
        made = builder.build(changed, "cpu")
        made.load_state_dict(model.state_dict())
        first = next(model.parameters())
        made = made.to(model_device(model), first.dtype)
        with torch.no_grad():
            wanted, found = (_outputs(m, example) for m in (model, made))
    except Exception as error:  # of the model's code
        return f"a model built from the configuration fails: {error}".splitlines()[0]
    most = _CLOSE if first.dtype in (torch.float32, torch.float64) else _CLOSE_OF_16_BITS
    for a, b in zip(wanted, found, strict=False):
        if a.shape != b.shape or not np.allclose(a, b, rtol=0, atol=most * max(_largest(a), 1e-6), equal_nan=True):
            return (
                "a model that is built from the configuration with the same weights computes something else: the code reads a "
                "number that the configuration does not hold"
            )
    return ""


def _outputs(model: nn.Module, example: Any) -> list[Array]:
    with evaluation(model):
        return outputs_of(model, to_device(example, model_device(model)))


def _largest(array: Array) -> float:
    finite = np.abs(array[np.isfinite(array)]) if array.dtype.kind == "f" else np.abs(array)
    return float(finite.max(initial=0))


def _reason_of_dict(model: Any) -> str:
    """Why ``from_config`` does not build this model, whose configuration is not rewritten; empty where it does."""
    have = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            made = type(model).from_config(dict(model.config))
    except Exception as error:  # of the class
        return f"a model cannot be built from its configuration: {error}".splitlines()[0]
    built = {name: tuple(t.shape) for name, t in made.state_dict().items()}
    wrong = next((name for name in {**have, **built} if have.get(name) != built.get(name)), None)
    if wrong is None:
        return ""
    return (
        f"configurations of {type(model).__name__} are not rewritten: {wrong} has the shape {have.get(wrong, 'none')}, and "
        f"{built.get(wrong, 'none')} when it is built from the configuration"
    )


# ------------------------------------------------------------------------------------------------- saving


class RefusedSave:
    """``save_pretrained`` of a model that its configuration does not describe: refuses, with the reason.

    A call with the keyword ``state_dict`` is let through, since a ``Trainer`` writes its checkpoints so: the same Trainer goes on
    from the folder, and ``model.plan.json`` in it says how to rebuild the model.

    Args:
        model: whose class saves.
        reason: shown in the message.
        plan: written beside a checkpoint.
    """

    def __init__(self, model: Any, reason: str, plan: Mapping[str, Any]) -> None:
        self.model, self.reason, self.plan = model, reason, plan

    def __call__(self, save_directory: Any, *args: Any, **options: Any) -> Any:
        """Save a checkpoint, or refuse.

        Raises:
            ExportError: it is no checkpoint of a training loop.
        """
        if "state_dict" not in options:  # a Trainer gives it, as None too
            raise ExportError(
                str(save_directory),
                f"{type(self.model).__name__}.from_pretrained could not load it: {self.reason}",
                "call save() of the result, and load it with bitwright.torch.load_compressed; or exclude these layers",
            )
        saved = type(self.model).save_pretrained(self.model, save_directory, *args, **options)
        write_json(Path(save_directory) / _PLAN_FILE, {**self.plan, "not_in_config": self.reason})
        return saved


def refuse_to_save(model: nn.Module, reason: str, plan: Mapping[str, Any]) -> Undo:
    """Let ``save_pretrained`` of this object refuse with a reason; an empty one lets it save again."""
    held = vars(model)
    before = held.pop("save_pretrained", None)
    if reason and hasattr(type(model), "save_pretrained"):
        held["save_pretrained"] = RefusedSave(model, reason, plan)

    def undo() -> None:
        held.pop("save_pretrained", None)
        if before is not None:
            held["save_pretrained"] = before

    return undo


def refusal_of(plan: Mapping[str, Any]) -> str:
    """The reason that a plan holds; empty where its model can be saved as its class.

    Raises:
        ConfigError: it is no text.
    """
    reason = plan.get("not_in_config", "")
    if not isinstance(reason, str):
        raise ConfigError("plan", "its reason not_in_config is no text", "give the plan as it was written")
    return reason
