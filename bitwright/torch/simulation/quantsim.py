"""``QuantizationSimModel``: a PyTorch model that computes what its quantized self will compute.

The copy of a user's model that a simulation works on: compiled parts unwrapped, lazy layers made.

Calibration of a torch simulation: runs of the model are observed, and the encodings of what was seen take effect.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright.core.graph.graph import Graph
from bitwright.core.graph.operators import op_row
from bitwright.core.health.diagnosis import Repair
from bitwright.core.health.report import HealthReport, check_parameters
from bitwright.core.health.site_health import HealthTable
from bitwright.core.numerics.spec import NonFinite, Preset, RangeMethod, check_policy
from bitwright.core.placement.config import bit_widths, make_rules
from bitwright.core.placement.place import place
from bitwright.core.placement.plan import Coverage, Plan
from bitwright.core.placement.rules import Rules
from bitwright.core.simulation.calibration import BatchGate, CalibrationLog, nested_calibration, warn_of_unlike_joins
from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.simulation import all_or_nothing
from bitwright.core.simulation.sites import derived_biases, place_quantizers
from bitwright.errors import BitwrightError, CalibrationError, ModelError, checks_arguments
from bitwright.progress import collector_paused, progress
from bitwright.tables import Tabular
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
from bitwright.torch.interception.intercept import Interceptor, interceptions, scripted_functions
from bitwright.torch.interception.record import Recorder, record
from bitwright.torch.quantizers.quantizer import Quantizer
from bitwright.torch.ranks import Ranks, calibrating_ranks, merged
from bitwright.torch.simulation import ranges
from bitwright.torch.simulation.simulate import CallPlan, Simulator, call_plans

_CONTAINERS = (dict, OrderedDict, list, set)
_TABLES = ("_parameters", "_buffers", "_modules")
_ORIGINAL = "_orig_mod"  # where torch.compile keeps the module that it was given


def adopt(model: nn.Module, example: Any, *, in_place: bool) -> nn.Module:
    """A copy of ``model``, or ``model`` itself, ready to be simulated.

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
    """What ``torch.compile`` was given; a TorchScript module, whose table of modules is another, is refused later."""
    while isinstance(module._modules, dict) and isinstance(inner := module._modules.get(_ORIGINAL), nn.Module):
        module = inner
    return module


def _compiled(module: nn.Module) -> bool:
    return _unwrapped(module) is not module or vars(module).get("_compiled_call_impl") is not None


def copied(model: nn.Module) -> nn.Module:
    """What ``copy.deepcopy`` makes of a model, without its recursion and without its look at every number.

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
    """The attributes of a module, nearly all of which are atoms or empty; of the tables the values are copied one by one."""
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
    """What ``copy.deepcopy`` makes of a parameter, a buffer or a module, found without its search for how to do it."""
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
    """Whether a tensor is its place in a storage, with nothing attached."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.grad is None
        and not vars(tensor)
    )


def _is_copied_by_state(kind: type) -> bool:
    """Whether ``copy.deepcopy`` copies the attributes of an object of this class, and nothing else."""
    same = ("__reduce_ex__", "__reduce__", "__getstate__")
    hooks = ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__")
    return (
        all(getattr(kind, name) is getattr(nn.Module, name) for name in same)
        and not any(hasattr(kind, name) for name in hooks)
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
    )


def uncopied(model: nn.Module) -> dict[int, Any]:
    """For the memo of ``copy.deepcopy``, by id: what it refuses to copy, tensors that autograd made and TorchScript functions.

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
    """What the modules hold beside parameters, buffers and modules, and is neither an atom nor empty."""
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
    """Refuse a model that is simulated already."""
    for path, module in walk_modules(model):
        if any(isinstance(forward.owner.handler, Simulator) for forward in interceptions(module)):
            raise ModelError(
                path or type(model).__name__,
                "it is simulated already: it belongs to a QuantizationSimModel, whose quantizers would count as its own code",
                "pass the float model that the simulation was made from; copy.deepcopy(sim).remove() returns it",
            )


def require_module(model: object) -> None:
    """Refuse what is not a module.

    Raises:
        ModelError: with the way to quantize an ONNX file.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            "model",
            f"it is a {type(model).__name__}, not a torch.nn.Module",
            "pass the module itself; for an ONNX file use bitwright.onnx.QuantizationSimModel",
        )


logger = logging.getLogger("bitwright")


@contextmanager
def calibrating(
    sim: QuantizationSimModel, resume: bool, allow_unreached: bool, non_finite: NonFinite, distributed: bool
) -> Iterator[nn.Module]:
    """Observe every run of ``sim.model`` in a block; see :meth:`QuantizationSimModel.calibrating`."""
    policy = check_policy(non_finite)
    interrupt: KeyboardInterrupt | None = None
    ranks = calibrating_ranks(distributed)
    with nullcontext() if ranks is None else ranks.together(), sim._interceptor.occupancy.exclusive("calibration"):
        if sim._simulator.gate is not None:
            raise nested_calibration()
        with all_or_nothing(sim):
            gate = _begin(sim, resume, policy, ranks)
            try:
                with sim._interceptor.handled_by(sim._simulator), torch.no_grad(), evaluation(sim.model):
                    yield sim.model
                gate.finish()
            except KeyboardInterrupt as stopped:
                if not sim._simulator.runs:
                    raise
                interrupt = stopped
            finally:
                gate.abandon()
                sim.calibration_log, sim._simulator.gate = gate.log, None
            with merged(sim, ranks):
                _finish(sim, interrupt is not None, allow_unreached)
    if interrupt is not None:
        raise interrupt


def _begin(sim: QuantizationSimModel, resume: bool, policy: NonFinite, ranks: Ranks | None) -> BatchGate:
    check_parameters(sim._quantized_parameters())
    sim.quantizers.reconsider()
    if not resume:
        sim.quantizers.forget()
    elif ranks is not None and ranks.number and sim._merged:
        sim.quantizers.forget_statistics()  # every rank has those of all, and the first adds them
    sim._merged = ranks is not None
    sim._simulator.stage = "observe"
    sim._simulator.runs = 0
    gate = sim._simulator.gate = _gate(sim, policy)
    return gate


def _finish(sim: QuantizationSimModel, interrupted: bool, allow_unreached: bool) -> None:
    """Put the encodings of what was seen into effect."""
    if not sim._simulator.runs:
        raise CalibrationError("calibrating", "the model did not run in the block", "call sim.model inside the block")
    _freeze(sim, allow_unreached or interrupted, quiet=interrupted)
    if interrupted:
        logger.warning(
            "calibration interrupted after %d runs; the statistics so far are in effect, "
            "compute_encodings(rest, resume=True) adds to them",
            sim._simulator.runs,
        )


def _gate(sim: QuantizationSimModel, policy: NonFinite) -> BatchGate:
    def blame(batch: Any) -> HealthReport | None:
        from bitwright.torch.nan_doctor import diagnose_batch

        if batch is None:
            return None
        args, kwargs = batch
        return diagnose_batch(sim._interceptor, args, kwargs, sim._simulator.mended_at)

    watched = [q for q in sim.quantizers.unique() if q.enabled and q.role in ("input", "output")]
    watches = [s.channels for s in sim.quantizers.values() if s.channels.place is not None]
    return BatchGate(watched, policy, blame, watches)


def feed(sim: QuantizationSimModel, data: Any, args: Any, show: bool) -> None:
    """Run the batches of ``data``, or hand ``sim.model`` to the callback; see :meth:`QuantizationSimModel.compute_encodings`."""
    if data is None:
        data = sim.examples
    if callable(data) and not isinstance(data, (torch.Tensor, np.ndarray)):
        data(sim.model) if args is None else data(sim.model, args)
        return
    if isinstance(data, (torch.Tensor, dict)) or not isinstance(data, Iterable):
        raise CalibrationError(
            "compute_encodings",
            f"data is a {type(data).__name__}, not a list of batches",
            "write sim.compute_encodings([batch]) for a single batch",
        )
    device = model_device(sim.model)
    for i, batch in enumerate(progress(data, "calibrating", show)):
        _run_batch(sim, i, to_device(batch, device))


def _run_batch(sim: QuantizationSimModel, index: int, batch: Any) -> None:
    args, kwargs = as_call(batch)
    try:
        sim.model(*args, **kwargs)
    except BitwrightError:
        raise
    except Exception as error:
        if holds_arrays(args, kwargs):
            raise CalibrationError(f"batch {index}", *ARRAYS) from error
        where = sim._interceptor.failed_in
        hint = ""
        if isinstance(batch, (tuple, list)) and len(batch) > 1:
            hint = "; a tuple or list is taken as positional arguments, so leave labels out: (x for x, _ in loader)"
        raise CalibrationError(
            f"batch {index}{f', in {where}' if where else ''}",
            f"the model fails on it: {type(error).__name__}: {error}",
            f"give batches as the model's forward takes them{hint}",
        ) from error


def _freeze(sim: QuantizationSimModel, allow_unreached: bool, quiet: bool = False) -> None:
    sim.quantizers.freeze_activations()
    _calibrate_unreached_weights(sim)
    sim._simulator.stage = "simulate"
    sim._simulator.refresh_biases()
    sim.quantizers.settle_unreached(allow=allow_unreached, quiet=quiet)
    sim._simulator.warn_of_ranges()
    if not quiet:
        warn_of_unlike_joins(sim.graph, sim.quantizers, sim.plan.shared)


def _calibrate_unreached_weights(sim: QuantizationSimModel) -> None:
    """Weights that no batch reached need none: their ranges follow from their values."""
    computed: dict[str, torch.Tensor] | None = None  # what the model makes of its parameters
    for site in sim.quantizers.unreached():
        if site.role != "weight":
            continue
        param = sim.graph.values[site.value].param
        if param is None and computed is None:
            computed = sim._recorded_constants()
        found = (computed or {}).get(site.value) if param is None else sim._interceptor.named_tensor(param)
        if found is not None:
            site.quantizer.observe_once(found.detach())


class QuantizationSimModel(Tabular):
    """A copy of ``model`` whose forward computes with quantized weights and activations.

    The model is run once on ``dummy_input`` to learn which operator reads what; nothing is traced, rewritten or wrapped.
    ``sim.model`` is an ordinary module of the user's own class, with the user's parameter names.

    Args:
        model: any eager module; left alone unless ``in_place``.
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
        examples: more inputs to record, so that every side of a data-dependent branch gets its quantizers.

    Raises:
        ModelError: the model fails on the example input.
        FormatError: impossible bit width.
        ConfigError: unknown scheme, or a configuration that cannot be read.
    """

    _also = ("calibrated", "quantizers")

    @bit_widths("default_output_bw", "default_param_bw")
    @checks_arguments
    def __init__(
        self,
        model: nn.Module,
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
    ) -> None:
        require_module(model)
        refuse_simulated(model)
        self.rules: Rules = make_rules(
            quant_scheme,
            preset,
            config_file,
            param_bw=default_param_bw,
            output_bw=default_output_bw,
            data_type=default_data_type,
        )
        self.examples = [dummy_input, *examples]
        self.calibration_log: CalibrationLog | None = None
        self.origin: dict[str, str] = {}  # what the file is to tell of how this simulation was made
        self._merged = False  # whether the statistics are those of several ranks
        self._shared = ranges.shared_gradients(self)
        self._simulator = Simulator({})
        self._simulator.blame, self._simulator.prepare_grids = self._name_nan, self._prepare_grids
        self.graph: Graph
        self.plan: Plan
        with collector_paused(), trainable_tensors():
            self.model = adopt(model, dummy_input, in_place=in_place)
            self._interceptor = Interceptor(self.model, self._simulator)
            self._interceptor.attach()
            try:
                self._place()
            except BaseException:
                self._interceptor.detach()
                raise

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

    def _place(self) -> None:
        device = model_device(self.model)
        recorder = record(self.model, [to_device(e, device) for e in self.examples], self._interceptor)
        self.graph = recorder.graph()
        self.plan = place(self.graph, self.rules)
        for line in self.plan.unused:
            logger.warning(line)
        self.quantizers = place_quantizers(self.plan, self.graph, self._values_of, Quantizer)
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

    def _tell_scripted(self, recorder: Recorder) -> None:
        """Name what TorchScript functions compute: it is in float, and so are the parameters that only they read."""
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
        """Find the encodings: weights from their values, activations from the data that passes them.

        Runs in eval mode without gradients, with weights quantized and activations in float; the modules get their
        training flags back. Statistics merge exactly, so the encodings do not depend on order or batch size.

        Args:
            data: batches (each a tensor, a tuple of positional arguments, or a dict of keyword arguments), or a callback
                that runs ``sim.model`` on them: ``callback(model)``, or ``callback(model, args)`` when ``args`` is given.
                ``None`` calibrates the weights alone, on the example input.
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
        with self.calibrating(
            resume=resume, allow_unreached=allow_unreached, non_finite=non_finite, distributed=distributed
        ):
            feed(self, data, args, progress)
            if not self._simulator.runs and calibrating_ranks(distributed) is None:
                raise CalibrationError(
                    "compute_encodings",
                    "the data held no batch, so the model never ran"
                    if not callable(data)
                    else "the callback never ran the model",
                    "pass a non-empty list or DataLoader (a generator can be used only once), or a callback that calls "
                    "its model",
                )

    @checks_arguments
    def calibrating(
        self,
        *,
        resume: bool = False,
        allow_unreached: bool = False,
        non_finite: NonFinite = "error",
        distributed: bool = True,
    ) -> AbstractContextManager[nn.Module]:
        """Observe every run of ``sim.model`` in a block; at its end the encodings are found and put into effect.

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
        return calibrating(self, resume, allow_unreached, non_finite, distributed)

    def _name_nan(self, args: Any, kwargs: Any) -> None:
        """Tell which operator makes NaN in the simulation of a batch that float computes without."""
        from bitwright.torch.nan_doctor import diagnose_batch

        try:
            float_report = diagnose_batch(self._interceptor, args, kwargs, self._simulator.mended_at)
            if not float_report.ok or float_report.bad_inputs:
                return  # the model does so itself
            report = diagnose_batch(self._interceptor, args, kwargs, self._simulator.simulated_at)
        except Exception as error:  # a model that cannot be run twice on one input
            report = HealthReport(f"running it again ended in {type(error).__name__}: {error}")
        logger.warning("%s", self.quantizers.describe_nan(report, self.graph))

    def _prepare_grids(self) -> None:
        """Make the grid of every quantizer for the shape that was recorded."""
        device = model_device(self.model) or torch.device("cpu")
        for site in self.quantizers.values():
            assert isinstance(site.quantizer, Quantizer)
            site.quantizer.prepare(self.graph.values[site.value].shape, device)

    def _quantized_parameters(self) -> dict[str, torch.Tensor]:
        """Parameter name -> the parameter, of every enabled weight and bias."""
        found = {}
        for site in self.quantizers.values():
            param = self.graph.values[site.value].param
            if param is not None and site.enabled and site.role in ("weight", "bias"):
                found[param] = self._interceptor.named_tensor(param)
        return found

    def _values_of(self, site: str) -> torch.Tensor | None:
        """The weight or constant at a site; what the model computes of its parameters takes a run of the model."""
        value = self.graph.values[self.plan.sites[site].value]
        found = (
            self._recorded_constants().get(value.name)
            if value.param is None
            else self._interceptor.named_tensor(value.param)
        )
        return None if found is None else found.detach()

    def _recorded_constants(self) -> dict[str, torch.Tensor]:
        """Tensors that the model computes from its parameters alone, by value name, for its present parameters."""
        device = model_device(self.model)
        recorder = record(self.model, [to_device(e, device) for e in self.examples], self._interceptor)
        recorder.graph()
        return recorder.constants()

    # -- its state

    @checks_arguments
    def remember(self, *, parameters: bool = False) -> Undo:
        """Keep the state of the simulation: every quantizer, the stage, the repairs, what calibration noted.

        Args:
            parameters: keep a copy of all parameters and buffers too.

        Returns:
            A function that brings the state back, as often as it is called.
        """
        quantizers, simulator, log = (self.quantizers.remember(), self._simulator.remember(), self.calibration_log)
        tensors = {n: t.detach().clone() for n, t in named_state(self.model)} if parameters else {}

        def restore() -> None:
            with torch.no_grad():
                for name, tensor in named_state(self.model) if tensors else ():
                    tensor.copy_(tensors[name])
            quantizers()
            simulator()
            self.calibration_log = log

        return restore

    # -- training

    @checks_arguments
    @trainable_tensors()
    def learn_ranges(
        self,
        sites: str | Iterable[str] = "*",
        *,
        offsets: bool = True,
        init: ranges.Init = "calibrated",
        distributed: bool = True,
    ) -> ranges.RangeReport:
        """Make ranges trainable (LSQ, LSQ+); see :func:`bitwright.torch.simulation.ranges.learn_ranges`."""
        with self._interceptor.occupancy.exclusive("learn_ranges"):
            return ranges.learn_ranges(self, sites, offsets=offsets, init=init, distributed=distributed)

    def range_parameters(self) -> list[nn.Parameter]:
        """The parameters of every range that trains: give them to the optimizer, as a group of their own.

        They are not in ``sim.model.parameters()``.

        Raises:
            ConfigError: no range trains.
        """
        return ranges.range_parameters(self)

    def named_range_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their names, ``conv1.weight.log_scale``; nothing where no range trains."""
        return ranges.named_range_parameters(self)

    # -- use

    @contextmanager
    def active(self) -> Iterator[None]:
        """Simulate whatever is called inside the block: other methods of the model, or parts of it."""
        with self._interceptor.active():
            self._handler.begin((), {})
            yield

    @contextmanager
    def in_float(self) -> Iterator[None]:
        """Let ``sim.model`` compute in float inside the block, in this thread (as ``torch.no_grad`` does)."""
        with self._interceptor.handled_by(self._handler.variant("float")):
            yield

    @property
    def _handler(self) -> Simulator:
        """The simulator of the calling thread."""
        own = self._interceptor.here.handler
        return own if isinstance(own, Simulator) else self._simulator

    @contextmanager
    def _evaluation(self, what: str) -> Iterator[None]:
        """No gradients, and every module in eval mode; where that changes modes, no other thread may run."""
        training = any(module.training for _, module in walk_modules(self.model))
        alone = self._interceptor.occupancy.exclusive(what) if training else nullcontext()
        with alone, torch.no_grad(), evaluation(self.model):
            yield

    def health(self) -> HealthTable:
        """What calibration saw at every site, and what the weights hold: NaN, Inf, zero and constant channels, saturation."""
        found = self._quantized_parameters()
        sites = {n: self.graph.values[s.value].param for n, s in self.quantizers.items()}
        return self.quantizers.health({n: found[p] for n, p in sites.items() if p in found})

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """What :func:`~bitwright.torch.stabilize` put into effect, in order."""
        return tuple(self._simulator.repairs.values())

    @property
    def calibrated(self) -> bool:
        """Whether the simulation can run."""
        return self._simulator.stage == "simulate"

    @checks_arguments
    def capture(self, names: Sequence[str], batch: Any) -> dict[str, list[torch.Tensor]]:
        """Values at sites or op outputs while ``sim.model`` runs ``batch``; one tensor per run of the place."""
        return self._captured(names, batch)[0]

    def _captured(self, names: Sequence[str], batch: Any, make: Callable[[], Any] = list) -> tuple[dict[str, Any], Any]:
        """The same, in what ``make`` makes for each of the names, and what ``sim.model`` returned."""
        taps = {name: make() for name in names}
        args, kwargs = as_call(to_device(batch, model_device(self.model)))
        with self._interceptor.handled_by(self._handler.variant(taps=taps)), self._evaluation("capture"):
            output = self.model(*args, **kwargs)
        return taps, output

    def example(self) -> Any:
        """The first of the inputs that the model was recorded on."""
        return self.examples[0]

    @checks_arguments
    def report(self, path: str | Path, data: Any = None, **options: Any) -> Path:
        """Write one HTML file that shows the simulation and what it costs; see :func:`bitwright.report.simulation_report`."""
        from bitwright.report import simulation_report

        return simulation_report(self, path, data, **options)

    def coverage(self) -> Coverage:
        """Every value and parameter: quantized how, shared with whom, or not and why. Print it."""
        return Coverage.of(self.plan, self.graph, self.quantizers.changes(self.plan), self._simulator.unseen)

    def remove(self) -> nn.Module:
        """Take the simulation off again and return the model; useful with ``in_place``."""
        self._interceptor.detach()
        return self.model

    # -- files

    @checks_arguments
    def export(self, path: str | Path, filename_prefix: str, dummy_input: Any = None, **options: Any) -> Any:
        """Write the artefacts; see :func:`bitwright.torch.simulation.export.export_sim`."""
        from bitwright.torch.simulation.export import export_sim

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
        """Where two of float model, simulation, exported file and runtime part, and why.

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
    def saturation(self, batches: Any = None, **options: Any) -> Any:
        """Which layers saturate or overflow in integer kernels, by their weights and on data.

        Args:
            batches: inputs to count on, of one shape; the example by default.
            options: of :meth:`export` that change the file.

        Returns:
            A :class:`~bitwright.compare.saturation.SaturationReport`.

        Raises:
            CalibrationError, ExportError: as :meth:`export`; there is no batch.
        """
        from bitwright.torch.simulation.export import saturation_count

        return saturation_count(self, [self.examples[0]] if batches is None else list(batches), **options)()

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
    def save_encodings(self, path: str | Path, version: str = "2.0.0") -> Path:
        """Write every encoding under its site's name; see :mod:`bitwright.export.encodings.write`."""
        from bitwright.export.encodings.of_simulation import save_encodings

        return save_encodings(self, path, version)

    @checks_arguments
    @trainable_tensors()
    def load_encodings(
        self, path: str | Path | dict[str, Any], strict: bool = True, *, partial: bool = False
    ) -> tuple[str, ...]:
        """Take the encodings of a file; sites without one are disabled, names that match nothing are errors if ``strict``.

        With ``partial``, sites without one stay as they are. Returns the sites that got one.
        """
        from bitwright.export.encodings.of_simulation import load_encodings

        with self._interceptor.occupancy.exclusive("load_encodings"):
            found = load_encodings(self, path, strict, partial)
            self._simulator.stage = "simulate"
            return found

    @checks_arguments
    def set_and_freeze_param_encodings(self, path: str | Path | dict[str, Any]) -> None:
        """Take the parameter encodings of a file and keep them through calibration."""
        from bitwright.export.encodings.of_simulation import set_and_freeze_param_encodings

        with self._interceptor.occupancy.exclusive("set_and_freeze_param_encodings"):
            set_and_freeze_param_encodings(self, path)

    @checks_arguments
    def save_checkpoint(self, folder: str | Path) -> Path:
        """Write parameters (safetensors) and quantizers (JSON); see :mod:`bitwright.torch.simulation.checkpoint`."""
        from bitwright.torch.simulation.checkpoint import save_checkpoint

        return save_checkpoint(self, folder)

    @checks_arguments
    @trainable_tensors()
    def load_checkpoint(self, folder: str | Path) -> None:
        """Read what :meth:`save_checkpoint` wrote into this simulation of the same model."""
        from bitwright.torch.simulation.checkpoint import load_checkpoint

        with self._interceptor.occupancy.exclusive("load_checkpoint"):
            load_checkpoint(self, folder)

    def state_dict(self) -> dict[str, Any]:
        """Model, quantizers and learned ranges, for ``torch.save``; ``sim.model.state_dict()`` has the model alone."""
        from bitwright.torch.simulation.checkpoint import state_dict

        return state_dict(self)

    @checks_arguments
    @trainable_tensors()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` returned, all of it or nothing."""
        from bitwright.torch.simulation.checkpoint import load_state_dict

        with self._interceptor.occupancy.exclusive("load_state_dict"):
            load_state_dict(self, state)

    def __repr__(self) -> str:
        return f"QuantizationSimModel({type(self.model).__name__}, {self.quantizers!r}, stage={self._simulator.stage})"

    def records(self) -> list[dict[str, Any]]:
        """One mapping per quantizer site."""
        return self.quantizers.rows

    def _repr_html_(self) -> str:
        return self.quantizers._repr_html_(repr(self))
