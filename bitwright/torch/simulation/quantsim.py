"""``QuantizationSimModel``: the simulation of a quantized PyTorch model.

It works on a copy of the user's model, which is made here: compiled parts unwrapped, lazy layers materialized.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from bitwright.compare.saturation import SaturationReport
from bitwright.core.graph.operators import op_row
from bitwright.core.health.report import HealthReport, check_parameters
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.serialize import encoding_from_json, encoding_to_json
from bitwright.core.numerics.spec import NonFinite, Preset, RangeMethod
from bitwright.core.placement.config import bit_widths, make_rules
from bitwright.core.placement.kv_cache import KvCache
from bitwright.core.placement.rules import Rules
from bitwright.core.simulation.calibration import BatchGate, Observer
from bitwright.core.simulation.simulation import all_or_nothing, fed, nothing_ran
from bitwright.core.simulation.sites import Site, derived_biases, place_quantizers
from bitwright.errors import (
    BitwrightError,
    CalibrationError,
    EncodingsError,
    ModelError,
    check_keywords,
    checks_arguments,
    with_article,
)
from bitwright.export.checkpoint import (
    OTHER,
    Checkpoint,
    Setting,
    check_names,
    check_tensor,
    parsed,
    put_statistics,
    read_checkpoint,
    settings_in,
    state_of,
    tensors_of,
    write_checkpoint,
)
from bitwright.methods.options import keyword_options
from bitwright.progress import collector_paused
from bitwright.progress import progress as bar
from bitwright.torch.calls.functions import function_of
from bitwright.torch.calls.inputs import (
    ARRAYS,
    ATOMS,
    as_call,
    evaluation,
    holds_arrays,
    model_device,
    named_state,
    tensors_in,
    to_device,
    trainable_tensors,
    walk_modules,
)
from bitwright.torch.captured import as_module
from bitwright.torch.interception.intercept import Interceptor, interceptions, scripted_functions
from bitwright.torch.interception.record import Recorder, UnseenCalls, generated_calls, generates, record
from bitwright.torch.quantizers.learned_range import RangeEnds
from bitwright.torch.quantizers.quantizer import Quantizer
from bitwright.torch.ranks import Ranks, calibrating_ranks, merged
from bitwright.torch.simulation import ranges
from bitwright.torch.simulation.ranges import (
    learned_from_json,
    learned_ranges,
    learned_to_json,
    refuse_corrections,
    restore_learned,
    share_gradients,
)
from bitwright.torch.simulation.simulate import CallPlan, Simulator, call_plans
from bitwright.torch.simulation.simulated_module import SavesDequantized, SimulatedModule

logger = logging.getLogger("bitwright")

_CONTAINERS = (dict, OrderedDict, list, set)
_TABLES = ("_parameters", "_buffers", "_modules")
_GENERATED_FROM = 8  # batches that calibration generates tokens from, at most
_ORIGINAL = "_orig_mod"  # where torch.compile keeps the module that it was given


def adopt(model: nn.Module, example: Any, *, in_place: bool) -> nn.Module:
    """Check ``model`` and prepare it, or a copy of it, for a simulation.

    - A module from ``torch.compile`` is replaced by the one it was made from: compiled code is not seen.
    - What old ``weight_norm``, ``spectral_norm`` and ``torch.nn.utils.prune`` compute before each forward is a tensor that
      cannot be copied; it is copied as a value.
    - Lazy layers get their parameters from one run on ``example``.

    Raises:
        ModelError: a part is compiled and the model is to be simulated in place; lazy layers cannot be made.
    """
    model = _unwrapped(model)
    compiled = [path for path, module in walk_modules(model) if _compiled(module)]
    if compiled and in_place:
        raise ModelError(
            compiled[0] or type(model).__name__,
            "it is compiled (torch.compile), and compiled code cannot be seen by a simulation in place",
            "leave out in_place=True: the copy that is simulated is not compiled",
        )
    own = model if in_place else copied(model)
    for _, module in list(walk_modules(own)):
        if vars(module).get("_compiled_call_impl") is not None:
            module._compiled_call_impl = None
        for name, child in module._modules.items():
            if child is not None and _unwrapped(child) is not child:
                module._modules[name] = _unwrapped(child)
    _make_lazy(own, example)
    return own


def _unwrapped(module: nn.Module) -> nn.Module:
    """Unwrap a module from ``torch.compile``; a TorchScript module is refused later."""
    while isinstance(module._modules, dict) and isinstance(inner := module._modules.get(_ORIGINAL), nn.Module):
        module = inner
    return module


def _compiled(module: nn.Module) -> bool:
    return _unwrapped(module) is not module or vars(module).get("_compiled_call_impl") is not None


def copied(model: nn.Module) -> nn.Module:
    """Copy a model as ``copy.deepcopy`` does, without recursion and without a memo entry per number.

    Modules are copied one by one, children first, so that the copy of a parent finds them in the memo. A class that has a
    say in how it is copied is left to ``copy.deepcopy``.
    """
    memo = uncopied(model)
    plain: dict[type, bool] = {}
    for _, module in reversed(list(walk_modules(model))):
        kind = type(module)
        if kind not in plain:
            plain[kind] = _is_copied_by_state(kind)
        if plain[kind] and id(module) not in memo:
            new = memo[id(module)] = kind.__new__(kind)
            new.__setstate__(_copied_state(module.__getstate__(), memo))
    return copy.deepcopy(model, memo)


def _copied_state(state: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """Copy the attributes of a module; most are atoms or empty, and tables are copied entry by entry."""
    new = {}
    for name, value in state.items():
        kind = type(value)
        if kind in ATOMS:
            new[name] = value
        elif kind in _CONTAINERS and not value:
            new[name] = memo.setdefault(id(value), kind())
        elif kind is dict and name in _TABLES:
            new[name] = memo[id(value)] = {key: _copied_entry(entry, memo) for key, entry in value.items()}
        else:
            new[name] = copy.deepcopy(value, memo)
    return new


def _copied_entry(entry: Any, memo: dict[int, Any]) -> Any:
    """Copy a parameter, a buffer or a module as ``copy.deepcopy`` does, without its dispatch."""
    if entry is None or id(entry) in memo:
        return memo.get(id(entry))
    if type(entry) is nn.Parameter:
        return entry.__deepcopy__(memo)
    if type(entry) is not torch.Tensor or not _is_storage_alone(entry):
        return copy.deepcopy(entry, memo)
    storage = entry.untyped_storage().__deepcopy__(memo)  # the same for all tensors that share it
    new = memo[id(entry)] = entry.new_empty(())
    return new.set_(storage, entry.storage_offset(), entry.size(), entry.stride())


def _is_storage_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain view of its storage, without further state."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.grad is None
        and not vars(tensor)
    )


def _is_copied_by_state(kind: type) -> bool:
    """Whether ``copy.deepcopy`` of an object of this class copies exactly its attributes."""
    same = ("__reduce_ex__", "__reduce__", "__getstate__")
    hooks = ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__")
    return (
        all(getattr(kind, name) is getattr(nn.Module, name) for name in same)
        and not any(hasattr(kind, name) for name in hooks)
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
    )


def uncopied(model: nn.Module) -> dict[int, Any]:
    """Objects that ``copy.deepcopy`` refuses, by id for its memo: tensors with a history and TorchScript functions.

    Both stand in attributes of modules; of a tensor the value is copied.
    """
    found: dict[int, Any] = {}
    for value in _attributes(model):
        if isinstance(value, torch.jit.ScriptFunction):  # noqa: TID251, which has no state
            found[id(value)] = value
        made = (tensor for tensor in tensors_in(value) if not tensor.is_leaf)
        found.update((id(tensor), tensor.detach().clone()) for tensor in made)
    return found


def _attributes(model: nn.Module) -> Iterator[Any]:
    """Yield attributes of modules other than parameters, buffers, modules, atoms and empty containers."""
    for _, module in walk_modules(model):
        for name, value in vars(module).items():
            empty = type(value) in ATOMS or (type(value) in _CONTAINERS and not value)
            if not empty and name not in _TABLES:
                yield value


def _make_lazy(model: nn.Module, example: Any) -> None:
    lazy = [
        f"{path}.{name}" if path else name
        for path, module in walk_modules(model)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and torch.nn.parameter.is_lazy(tensor)
    ]
    if not lazy:
        return
    args, kwargs = as_call(to_device(example, model_device(model)))
    try:
        with torch.no_grad(), evaluation(model):
            model(*args, **kwargs)
    except Exception as error:
        raise ModelError(
            lazy[0],
            f"this parameter of a lazy module does not exist yet, and the model fails on the example input that would make "
            f"it: {type(error).__name__}: {error}",
            "run the model once on a valid input, and pass that as dummy_input",
        ) from error


def refuse_simulated(model: nn.Module) -> None:
    """Refuse a model that already has a simulation."""
    for path, module in walk_modules(model):
        if any(isinstance(forward.owner.handler, Simulator) for forward in interceptions(module)):
            raise ModelError(
                path or type(model).__name__,
                "it is simulated already: it belongs to a QuantizationSimModel, whose quantizers would count as its own code",
                "pass the float model that the simulation was made from; copy.deepcopy(sim).remove() returns it",
            )


def require_module(model: object) -> None:
    """Refuse objects that are not modules.

    Raises:
        ModelError: with the way to quantize an ONNX file.
    """
    if isinstance(model, ExportedProgram):
        raise ModelError(
            "model",
            "it is an ExportedProgram, and what is changed is the module that was passed",
            "make the module and keep it: model = program.module()",
        )
    if not isinstance(model, nn.Module):
        raise ModelError(
            "model",
            f"it is {with_article(type(model).__name__)}, not a torch.nn.Module",
            "pass the module itself; for an ONNX file use bitwright.onnx.QuantizationSimModel",
        )


class QuantizationSimModel(SimulatedModule):
    """A copy of ``model`` whose forward computes with quantized weights and activations.

    The model is run once on ``dummy_input`` to learn which operator reads what; nothing is traced, rewritten or wrapped.
    ``sim.model`` is an ordinary module of the user's own class, with the user's parameter names.

    Args:
        model: any eager module; left alone unless ``in_place``. Or a program of ``torch.export``, or the path of a ``.pt2``
            file: see :func:`~bitwright.torch.captured.as_module`.
        dummy_input: one input: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        quant_scheme: how ranges are chosen: ``min_max`` (default), ``tf_enhanced``, ``percentile``, ``mse``, ``entropy``, or
            a :class:`RangeMethod`.
        default_output_bw: bits of activations, 2 to 32.
        default_param_bw: bits of weights, 2 to 32.
        in_place: attach to ``model`` itself instead of a copy.
        config_file: rules: path of an AIMET quantsim JSON or of our YAML, TOML or JSON, the name of a shipped
            configuration (``default``, ``htp_v73``, ...), or a dict; ``None`` means ours.
        default_data_type: ``int``, or ``float`` (bit widths 16 or 8: float16, float8_e4m3).
        preset: instead of the bit widths: ``"w8a8"``, ``"w4a8"``, ``"w4a16"``, ... (``PRESETS``).
        examples: more inputs to record, so that every side of a data-dependent branch gets its quantizers. Where ``generate``
            of a model of transformers makes calls that these do not, as on one token and a cache, its calls from
            ``dummy_input`` are recorded too, and calibration generates from its first batches.
        kv_cache: what keys and values of attention are stored as: ``{"key": "int8", "value": "int4", "recent": 32}``, see
            :func:`~bitwright.core.placement.kv_cache.parse_kv_cache`.

    Raises:
        ModelError: the model fails on the example input.
        FormatError: impossible bit width.
        ConfigError: unknown scheme, or a configuration that cannot be read.
    """

    @bit_widths("default_output_bw", "default_param_bw")
    @checks_arguments
    def __init__(
        self,
        model: nn.Module | ExportedProgram,
        dummy_input: Any,
        quant_scheme: str | RangeMethod | None = None,
        default_output_bw: int = 8,
        default_param_bw: int = 8,
        in_place: bool = False,
        config_file: str | Path | dict[str, Any] | Rules | None = None,
        default_data_type: str = "int",
        *,
        preset: str | Preset | None = None,
        examples: Sequence[Any] = (),
        kv_cache: KvCache | Mapping[str, Any] | None = None,
    ) -> None:
        module: nn.Module = as_module(model)
        require_module(module)
        refuse_simulated(module)
        bits: dict[str, Any] = {"param_bw": default_param_bw, "output_bw": default_output_bw}
        self._set_up(
            make_rules(quant_scheme, preset, config_file, **bits, data_type=default_data_type, kv_cache=kv_cache)
        )
        self.examples = [dummy_input, *examples]
        self._generates = False  # whether generate makes calls that the examples given do not
        self._kept: list[Any] = []  # batches that calibration generates from
        self._merged = False  # whether the statistics are those of several ranks
        self._shared = ranges.shared_gradients(self)
        self._simulator = Simulator({})
        self._simulator.blame, self._simulator.prepare_grids = self._name_nan, self._prepare_grids
        with collector_paused(), trainable_tensors():
            self.model = adopt(module, dummy_input, in_place=in_place)
            self._interceptor = Interceptor(self.model, self._simulator)
            self._interceptor.attach()
            try:
                self._place()
                self._place_generated()
            except BaseException:
                self._interceptor.detach()
                raise
        if callable(getattr(type(self.model), "save_pretrained", None)):
            vars(self.model)["save_pretrained"] = SavesDequantized(self)

    @trainable_tensors()
    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizationSimModel:
        memo.update(uncopied(self.model))
        memo[id(self)] = new = object.__new__(type(self))
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # programs of torch.export lose in a copy what was added to them; where the model is what is copied, its
        # interceptor is not made yet
        if vars(self._interceptor).get("attached", False):
            self._interceptor.attach()
            ranges.share_gradients(self)  # hooks stay with the parameters that were copied

    # -- placement

    def _place(self, runs: Sequence[Any] | None = None) -> None:
        device = model_device(self.model)
        given = [to_device(e, device) for e in self.examples] if runs is None else runs
        recorder = record(self.model, given, self._interceptor)
        self.graph = recorder.graph()
        self.plan = self._plan()
        self.quantizers = place_quantizers(self.plan, self.graph, self._values_of, Quantizer)
        self._simulator.say = self.quantizers._say_once
        plans = call_plans(self.graph, self.quantizers)
        calls = {key: plans.get(call.name, CallPlan(call.name)) for key, call in recorder.calls.items()}
        # computed from parameters alone: known, and nothing to quantize
        self._simulator.plans = {**dict.fromkeys(recorder.static, CallPlan("")), **calls}
        held = {plan.op for plan in plans.values() if plan.operands or plan.outputs}
        self._simulator.moving = any(op_row(self.graph.op(op).type).kind == "movement" for op in held)
        self._simulator.unlisted = any(
            call.name in held and function_of(call.func) is None for call in recorder.calls.values()
        )
        biases = derived_biases(self.quantizers, ranges.bias_values(self, recorder.constants()))
        self._simulator.biases = list(biases.values())
        self.output_values = recorder.output_values()
        self._simulator.watch = ranges.TrainingWatch(self.model, self.quantizers)
        self._tell_scripted(recorder)

    def _place_anew(self, runs: Sequence[Any], moved: Mapping[str, str]) -> None:
        """Place quantizers for the present modules; existing places keep their state.

        Args:
            runs: inputs to record, on the device of the model.
            moved: beginning of a name before -> beginning of the same name now, where the name is not there any more.
        """
        kept = self.quantizers
        with self._occupancy.exclusive("quantizers for other modules"):
            self._interceptor.detach()
            self._interceptor.attach()
            self._interceptor.forget_names()
        self._place(runs)
        for name, site in kept.items():
            others = (now + name.removeprefix(old) for old, now in moved.items() if name.startswith(old))
            now = next((each for each in (name, *others) if each in self.quantizers), None)
            if now is not None and self.quantizers[now].role == site.role:
                self.quantizers[now].quantizer.become(site.quantizer)
        self._refresh_biases()

    def _place_left_out(self) -> None:
        """Add switched-off quantizers to the values that the rules leave in float."""
        with self._occupancy.exclusive("a quantizer for what the rules leave out"):
            self._add_left_out(self._values_of, Quantizer, inputs=True)
            plans, simulator = call_plans(self.graph, self.quantizers), self._simulator
            simulator.plans = {key: plans.get(plan.op, plan) for key, plan in simulator.plans.items()}
            simulator.moving = simulator.unlisted = True

    def _place_generated(self) -> None:
        """Place quantizers at calls that only ``generate`` makes, such as those on one token and a cache."""
        if not generates(self.model):
            return
        unseen = UnseenCalls(self._simulator.plans)
        with self._interceptor.handled_by(unseen):
            calls = generated_calls(self.model, to_device(self.examples[0], model_device(self.model)))
        if not unseen.found or not calls:
            return
        self._generates = True
        self.examples += calls
        self._place()

    def _tell_scripted(self, recorder: Recorder) -> None:
        """Report TorchScript functions, which run in float, as do the parameters that only they read."""
        if not recorder.hidden:
            return
        unread = recorder.unread(self.model)
        for path, names in scripted_functions(self.model).items():
            params = [name for name in unread if name.rpartition(".")[0] == path]
            reads = f", with {', '.join(params)}" if params else ""
            for name in (f"{path}.{name}" if path else name for name in names):
                reason = f"a torch.jit.script function, which runs outside Python: in float, without quantizers{reads}"
                self._simulator.unseen[name] = reason
                logger.warning("%s: %s; leave out @torch.jit.script to have it simulated", name, reason)

    # -- calibration

    @checks_arguments
    @trainable_tensors()
    def compute_encodings(
        self,
        data: Callable[..., Any] | Iterable[Any] | None = None,
        args: Any = None,
        *,
        progress: bool = True,
        resume: bool = False,
        allow_unreached: bool = False,
        non_finite: NonFinite = "error",
        distributed: bool = True,
    ) -> None:
        """Compute the encodings: of weights from their values, of activations from data.

        Where no range follows from data, as under a preset that quantizes weights alone, nothing is run, whether data are
        given or not.

        Runs in eval mode without gradients, with weights quantized and activations in float; the modules get their
        training flags back. Statistics merge exactly, so the encodings do not depend on order or batch size.

        Args:
            data: batches (each a tensor, a tuple of positional arguments, or a dict of keyword arguments), or a callback
                that runs ``sim.model`` on them: ``callback(model)``, or ``callback(model, args)`` when ``args`` is given.
                ``None`` calibrates on the example input.
            args: second argument of the callback.
            progress: show a progress bar on a terminal when it takes more than two seconds.
            resume: keep the statistics of the last call and add to them, for example after Ctrl-C.
            allow_unreached: leave sites that no batch reached in float instead of failing when they are used.
            non_finite: what to do with a batch in which a quantizer meets NaN or Inf: ``"error"`` stops and names the
                operator that made them, ``"skip"`` leaves the whole batch out of all statistics, ``"clamp"`` uses the
                finite values only. A spec or rule with ``non_finite`` has its own way.
            distributed: where a process group of several ranks is initialised (``torchrun``), every rank calls this with
                data of its own, which may be none, and all get the encodings of the data of all, bit for bit the same
                however it is spread. ``False`` calibrates on this rank alone.

        Raises (and leaves the earlier encodings in effect):
            CalibrationError: no batch came, a batch does not fit the model, a weight or (under ``"error"``) a batch holds
                values that are not finite.
            ConfigError: there is no such policy.
            BusyError: another thread uses the simulation.
        """
        ranks = calibrating_ranks(distributed)
        if self._without_runs(data):
            with self._calibration(resume, allow_unreached, non_finite, ranks, runs=False):
                return
        with self._calibration(resume, allow_unreached, non_finite, ranks):
            batches = fed(self.examples if data is None else data, args, self.model)
            device = model_device(self.model)
            for i, batch in enumerate(bar(batches, "calibrating", progress)):
                self._run_batch(i, to_device(batch, device))
                if self._generates and i < _GENERATED_FROM:
                    self._kept.append(batch)
            if not self._simulator.runs and ranks is None:
                raise nothing_ran(data, "the callback never ran the model", "its model")

    def _run_batch(self, index: int, batch: Any) -> None:
        args, kwargs = as_call(batch)
        try:
            self.model(*args, **kwargs)
        except BitwrightError:
            raise
        except Exception as error:
            if holds_arrays(args, kwargs):
                raise CalibrationError(f"batch {index}", *ARRAYS) from error
            where = self._interceptor.failed_in
            hint = ""
            if isinstance(batch, (tuple, list)) and len(batch) > 1:
                hint = "; a tuple or list is taken as positional arguments, so leave labels out: (x for x, _ in loader)"
            raise CalibrationError(
                f"batch {index}{f', in {where}' if where else ''}",
                f"the model fails on it: {type(error).__name__}: {error}",
                f"give batches as the model's forward takes them{hint}",
            ) from error

    @checks_arguments
    def calibrating(
        self,
        *,
        resume: bool = False,
        allow_unreached: bool = False,
        non_finite: NonFinite = "error",
        distributed: bool = True,
    ) -> AbstractContextManager[nn.Module]:
        """Observe every run of ``sim.model`` in a block; at its end the encodings are computed and put into effect.

        What :meth:`compute_encodings` does around data of its own, for a loop of yours: the model is in eval mode and without
        gradients, its weights are quantized and its activations are in float. An exception in the block leaves the earlier
        encodings in effect.

        Args:
            resume, allow_unreached, non_finite, distributed: see :meth:`compute_encodings`.

        Yields:
            ``sim.model``.

        Raises:
            CalibrationError: the model did not run in the block, or see :meth:`compute_encodings`; or the block is inside of
                another calibration.

        Example:
            >>> with sim.calibrating() as model:  # doctest: +SKIP
            ...     for images, _ in loader:
            ...         model(images)
        """
        return self._calibration(resume, allow_unreached, non_finite, calibrating_ranks(distributed))

    def _merging(self, ranks: Ranks | None) -> AbstractContextManager[None]:
        return merged(self, self._simulator, ranks)

    def _begin(self, resume: bool, ranks: Ranks | None, runs: bool) -> Simulator:
        check_parameters(self._quantized_parameters())
        self.quantizers.reconsider()
        if not resume:
            self.quantizers.forget()
        elif ranks is not None and ranks.number and self._merged:
            self.quantizers.forget_statistics()  # every rank has those of all, and the first adds them
        self._merged = ranks is not None
        self._simulator.stage, self._simulator.runs = "observe", 0
        return self._simulator

    def _gate(self, observer: Observer, policy: NonFinite) -> BatchGate:
        def blame(batch: Any) -> HealthReport | None:
            from bitwright.torch.nan_doctor import diagnose_batch

            if batch is None:
                return None
            args, kwargs = batch
            return diagnose_batch(self._interceptor, args, kwargs, self._simulator.mended_at)

        watched = [q for q in self.quantizers.unique() if q.enabled and q.role in ("input", "output")]
        watches = [s.channels for s in self.quantizers.values() if s.channels.place is not None]
        return BatchGate(watched, policy, blame, watches)

    @contextmanager
    def _observed(self, observer: Observer) -> Iterator[nn.Module]:
        self._kept = []
        with self._interceptor.handled_by(self._simulator), torch.no_grad(), evaluation(self.model):
            yield self.model
            kept, self._kept = self._kept or self.examples[:1], []
            for batch in kept if self._generates and observer.runs else ():
                generated_calls(self.model, to_device(batch, model_device(self.model)))

    def _find_encodings(self, observer: Observer) -> None:
        self.quantizers.freeze_activations()
        # constants that no batch reached: their ranges follow from their values, or from what the model makes of its parameters
        computed: dict[str, torch.Tensor] | None = None
        for site in self.quantizers.unreached():
            param = self.graph.values[site.value].param
            if site.role in ("weight", "bias", "constant"):
                if param is None and computed is None:
                    computed = self._recorded_constants()
                found = (computed or {}).get(site.value) if param is None else self._interceptor.named_tensor(param)
                if found is not None:
                    site.quantizer.observe_once(found.detach())
        self._simulator.warn_of_ranges()
        self._simulator.warn_of_gaps()

    # -- training

    @checks_arguments
    def learn_ranges(
        self,
        sites: str | Iterable[str] = "*",
        *,
        offsets: bool = True,
        init: ranges.Init = "calibrated",
        distributed: bool = True,
    ) -> ranges.RangeReport:
        """Make ranges trainable (LSQ, LSQ+); see :func:`bitwright.torch.simulation.ranges.learn_ranges`."""
        with self._changing("learn_ranges"):
            return ranges.learn_ranges(self, sites, offsets=offsets, init=init, distributed=distributed)

    def range_parameters(self) -> list[nn.Parameter]:
        """The parameters of all learned ranges, for a separate group of the optimizer.

        They are not in ``sim.model.parameters()``.

        Raises:
            ConfigError: no range trains.
        """
        return ranges.range_parameters(self)

    def named_range_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of learned ranges with their names, ``conv1.weight.log_scale``."""
        return ranges.named_range_parameters(self)

    @checks_arguments
    def report(self, path: str | Path, data: Any = None, **options: Any) -> Path:
        """Write one HTML file that shows the simulation and what it costs; see :func:`bitwright.report.simulation_report`."""
        from bitwright.report import simulation_report

        return simulation_report(self, path, data, **options)

    # -- what methods ask of it

    @property
    def _metric_target(self) -> nn.Module:
        return self.model

    def _float_copy(self) -> nn.Module:
        return copy.deepcopy(self).remove()

    def _again(self, model: nn.Module) -> QuantizationSimModel:
        """In place."""
        first, *others = self.examples
        found = QuantizationSimModel(model, first, in_place=True, config_file=self.rules, examples=others)
        found.quantizers.ask_as(self.quantizers)
        return found

    def _in_integer_kernels(
        self, batches: Sequence[Any], **options: Any
    ) -> tuple[Callable[[], SaturationReport], Callable[[str], AbstractContextManager[nn.Module]]]:
        from bitwright.torch.simulation.export import in_integer_kernels

        return in_integer_kernels(self, batches, **options)

    # -- files

    @checks_arguments
    def export(self, path: str | Path, filename_prefix: str, dummy_input: Any = None, **options: Any) -> Any:
        """Write the artefacts; see :func:`bitwright.torch.simulation.export.export_sim`."""
        from bitwright.torch.simulation.export import export_sim

        check_keywords("sim.export", options, ("dummy_input", *keyword_options(export_sim)))
        return export_sim(
            self, path, filename_prefix, self.examples[0] if dummy_input is None else dummy_input, **options
        )

    @checks_arguments
    def verify(self, batch: Any = None, **options: Any) -> Any:
        """Compare the simulation with ONNX Runtime, layer by layer; see :func:`bitwright.torch.simulation.export.verify_sim`."""
        from bitwright.torch.simulation.export import verify_sim

        return verify_sim(self, self.examples[0] if batch is None else batch, **options)

    @checks_arguments
    def drift(self, a: str = "simulation", b: str = "onnxruntime", batch: Any = None, **options: Any) -> Any:
        """Find the first operator where two of float model, simulation, exported file and runtime differ, and the cause.

        Args:
            a, b: ``"float"``, ``"simulation"``, ``"file"``, or a runtime.
            batch: input to compare on; the example by default.
            options: of :meth:`export` that change the file.

        Returns:
            A :class:`~bitwright.compare.report.DriftReport`; see :func:`bitwright.compare.drift.drift`.

        Raises:
            CalibrationError, ConfigError, ExportError: as :meth:`export`; ``a`` or ``b`` is none of these, or both are the same.
        """
        from bitwright.torch.simulation.export import drift_sim

        return drift_sim(self, a, b, self.examples[0] if batch is None else batch, **options)

    @checks_arguments
    def exported_program(self, batch: Any = None, **options: Any) -> Any:
        """The simulation as an ``ExportedProgram`` of ``torch.export``, which ExecuTorch and inductor lower.

        See :func:`bitwright.torch.simulation.export.decomposed_program`.

        Args:
            batch: an input; the example by default.
            options: ``dynamic_batch``: leave the first axis free.
        """
        from bitwright.torch.simulation.export import decomposed_program

        return decomposed_program(self, self.examples[0] if batch is None else batch, **options)

    @checks_arguments
    def runs_as(self, profile: str | Path, batch: Any = None, **options: Any) -> Any:
        """Run the model that :meth:`export` would write as a target computes it, without the target.

        Args:
            profile: of the target: a name of `bitwright list profiles`, or the path of a TOML file.
            batch: an input of the shape that is to be run; the example by default, with a free batch where the model allows it.
            options: of :meth:`export` that change the file; ``target`` is the profile's by default.

        Returns:
            A :class:`~bitwright.compare.target.TargetSession`: ``session.run(None, {"input": array})``, as a session of ONNX
            Runtime, so that metrics take it. Every integer operator is computed by the executors of the profile.

        Raises:
            CalibrationError, ConfigError, ExportError: as :meth:`export`; there is no such profile.

        Example:
            >>> _ = torch.manual_seed(0)
            >>> sim = QuantizationSimModel(torch.nn.Linear(4, 2), torch.ones(1, 4))
            >>> sim.compute_encodings([torch.ones(1, 4)])
            >>> session = sim.runs_as("ort_x64")
            >>> session.run(None, {session.get_inputs()[0].name: torch.ones(3, 4).numpy()})[0].shape
            (3, 2)
        """
        from bitwright.torch.simulation.export import run_as

        return run_as(self, profile, self.examples[0] if batch is None else batch, **options)

    @checks_arguments
    def saturation(self, batches: Any = None, **options: Any) -> Any:
        """Find layers that saturate or overflow in integer kernels, by their weights and on data.

        Args:
            batches: inputs to count on, of one shape; the example by default.
            options: of :meth:`export` that change the file.

        Returns:
            A :class:`~bitwright.compare.saturation.SaturationReport`.

        Raises:
            CalibrationError, ExportError: as :meth:`export`; there is no batch.
        """
        count, _ = self._in_integer_kernels([self.examples[0]] if batches is None else list(batches), **options)
        return count()

    @checks_arguments
    def benchmark(
        self,
        dummy_input: Any = None,
        *,
        runtime: str = "onnxruntime",
        threads: Sequence[int] | None = None,
        seconds: float = 2.0,
        rounds: int | None = None,
        **options: Any,
    ) -> Any:
        """Measure what :meth:`export` would write beside its float model, on ``dummy_input``, the example by default.

        Args:
            dummy_input: what is run.
            runtime, threads, seconds, rounds: see :func:`bitwright.runtimes.benchmark.benchmark`.
            options: of :meth:`export` that change the file: ``target``, ``recurrent``, ``weight_only``, ...

        Returns:
            A :class:`~bitwright.runtimes.benchmark.BenchmarkReport`.

        Raises:
            CalibrationError, ConfigError, ExportError: as :meth:`export`; the runtime is missing, or refuses the file.
        """
        from bitwright.compare.benchmark import benchmark_sim

        measured = {"runtime": runtime, "threads": threads, "seconds": seconds, "rounds": rounds}
        return benchmark_sim(lambda folder: self.export(folder, "model", dummy_input, **options), measured)

    @checks_arguments
    def save_checkpoint(self, folder: str | Path) -> Path:
        """Write parameters (safetensors) and quantizers (JSON); see :mod:`bitwright.torch.simulation.quantsim`."""
        return save_checkpoint(self, folder)

    @checks_arguments
    def load_checkpoint(self, folder: str | Path) -> None:
        """Read what :meth:`save_checkpoint` wrote into this simulation of the same model."""
        with self._changing("load_checkpoint"):
            load_checkpoint(self, folder)

    def state_dict(self) -> dict[str, Any]:
        """Model, quantizers and learned ranges, for ``torch.save``; ``sim.model.state_dict()`` has the model alone."""
        return state_dict(self)

    @checks_arguments
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; all or nothing."""
        with self._changing("load_state_dict"):
            load_state_dict(self, state)

    def __repr__(self) -> str:
        return f"QuantizationSimModel({type(self.model).__name__}, {self.quantizers!r}, stage={self._simulator.stage})"


Learned = Mapping[str, tuple[Encoding, tuple[tuple[str, tuple[float, ...]], ...]]]


def save_checkpoint(sim: SimulatedModule, folder: str | Path) -> Path:
    """Write the checkpoint into ``folder``, created if missing.

    ``model.safetensors`` holds parameters and buffers, tied ones once, under their first name; ``quantizers.json`` specs and
    encodings; ``statistics.safetensors`` what calibration saw, from which other bits and range methods are chosen without data;
    ``checkpoint.json`` their hashes. An earlier checkpoint there is replaced at once: whatever stops this call,
    :func:`load_checkpoint` finds the earlier one or the new one, whole.

    Raises:
        ExportError: the folder cannot be written; an earlier checkpoint in it is as it was.
        ModelError: the simulation is being calibrated.
    """
    from safetensors.torch import save

    state = _state(sim)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named_state(sim.model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    return write_checkpoint(folder, sim, save(tensors), state)


def _state(sim: SimulatedModule) -> dict[str, Any]:
    """The state of a simulation without the model's tensors, as plain JSON."""
    if sim._simulator.stage not in ("simulate", "uncalibrated"):
        raise ModelError(
            "save_checkpoint", "the simulation is being calibrated", "call it when compute_encodings has returned"
        )
    refuse_corrections(sim, "save_checkpoint")
    return state_of(sim, _learned, lengths=dict(sim._simulator.lengths))


def _learned(site: Site) -> dict[str, Any]:
    """The parameters of a learned range, and the encoding that they are relative to."""
    learned = getattr(site.quantizer, "learned", None)
    if learned is None or site.encoding is None or isinstance(learned, RangeEnds):
        return {}  # ends follow from the encoding
    return {"learned": {"base": encoding_to_json(learned.base), "parameters": learned_to_json(learned)}}


def state_dict(sim: SimulatedModule) -> dict[str, Any]:
    """The simulation as tensors and plain values, for ``torch.save``: ``model`` is ``sim.model.state_dict()``."""
    return {"model": sim.model.state_dict(), "simulation": _state(sim)}


def load_state_dict(sim: SimulatedModule, state: Mapping[str, Any]) -> None:
    """Load what :func:`state_dict` returned for a simulation of the same model under the same rules; all or nothing.

    Raises:
        EncodingsError: it is no such state, or one of another model.
    """
    if set(state) != {"model", "simulation"}:
        raise EncodingsError(
            "load_state_dict",
            f"the state has the keys {sorted(map(str, state))}, not 'model' and 'simulation'",
            "pass what sim.state_dict() returned; sim.model.load_state_dict() takes the weights alone",
        )
    where = Path("load_state_dict")
    try:
        loaded = parsed({}, state["simulation"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EncodingsError("load_state_dict", f"no readable state: {error!r:.300}", OTHER) from error
    remedy = _remedy(sim, state["model"])
    settings = settings_in(sim, where, loaded, remedy)
    learned = _learned_in(loaded)
    with all_or_nothing(sim, parameters=True):
        try:
            sim.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise EncodingsError("load_state_dict", f"the tensors do not fit the model: {error}", remedy) from error
        _put(sim, loaded, settings, learned)


def load_checkpoint(sim: SimulatedModule, folder: str | Path) -> None:
    """Read a checkpoint into ``sim``, which must simulate the same model under the same rules.

    Everything is read and checked before anything changes; a call that fails or is interrupted leaves weights, quantizers
    and stage as they were. What calibration saw is read too: bits, range methods and symmetry can be changed without data.

    Raises:
        EncodingsError: no checkpoint there, a part of it is damaged, missing or of another checkpoint, or it is one of
            another model (which names are missing or extra).
    """
    from safetensors.torch import load

    folder = Path(folder)
    loaded = read_checkpoint(folder, load)
    own = dict(named_state(sim.model))
    first: dict[int, str] = {}
    for name, tensor in own.items():
        first.setdefault(id(tensor), name)
    remedy = _remedy(sim, loaded.tensors)
    check_names(tensors_of(folder), first.values(), loaded.tensors, remedy)
    settings = settings_in(sim, folder, loaded, remedy)
    learned = _learned_in(loaded)
    for name, tensor in loaded.tensors.items():
        check_tensor(folder, name, tensor, own[name])
    with all_or_nothing(sim, parameters=True):
        for name in list(loaded.tensors):
            own[name].detach().copy_(loaded.tensors.pop(name))
        _put(sim, loaded, settings, learned)


def _learned_in(loaded: Checkpoint) -> Learned:
    """Site -> base and parameters of its learned range.

    Raises:
        EncodingsError: naming the site whose range cannot be read.
    """
    found = {}
    for name, saved in loaded.quantizers.items():
        if "learned" not in saved:
            continue
        try:
            base = encoding_from_json(saved["learned"]["base"], name)
            found[name] = (base, learned_from_json(saved["learned"]["parameters"], base))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            problem = f"what is saved of its quantizer cannot be read: {type(error).__name__}: {error}"
            raise EncodingsError(name, problem, OTHER) from error
    return found


def _put(sim: SimulatedModule, loaded: Checkpoint, settings: Mapping[str, Setting], learned: Learned) -> None:
    """Restore the state that a checkpoint holds besides the tensors."""
    for name, setting in settings.items():
        setting.put(sim.quantizers[name])
    for name, (base, parameters) in learned.items():
        sim.quantizers[name].quantizer.encoding = base
        restore_learned(sim.quantizers[name], dict(parameters))
    put_statistics(sim, loaded)
    for _, trained in learned_ranges(sim):
        trained.to(model_device(sim.model))
    share_gradients(sim)
    sim._simulator.repairs = {repair.op: repair for repair in loaded.repairs}
    sim._simulator.lengths, sim._simulator.longer = dict(loaded.lengths), {}
    sim._simulator.stage = "simulate" if loaded.calibrated else "uncalibrated"
    sim.calibration_log = None


def _remedy(sim: SimulatedModule, saved: Iterable[str]) -> str:
    """The remedy where the tensor names ``saved`` differ from the model's; often only one of the two is folded."""
    here, there = (
        {name for name in names if name.endswith(".running_mean")}
        for names in ((name for name, _ in named_state(sim.model)), saved)
    )
    if here != there:
        return (
            "fold the batch norms as before it was saved: fold_all_batch_norms(model, dummy_input=...) before the simulation is "
            "built, or compute_encodings and fold_all_batch_norms_to_scale(sim) after it, or neither"
        )
    return "build the simulation from the same model and rules"
