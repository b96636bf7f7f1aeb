"""Methods on a float model under AIMET's names: batch-norm folding, equalization, bias correction, rotation, preparation.

Home of ``aimet_torch.batch_norm_fold``, ``cross_layer_equalization``, ``bias_correction``, ``spinquant``, ``model_preparer`` and
``meta.connectedgraph``. Layers are given and returned as modules; our functions name them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright import torch as front
from bitwright.aimet_common import sites
from bitwright.aimet_common.names import absent_names, differs
from bitwright.aimet_common.sites import ClsSetInfo, ClsSetInfos, GraphOp
from bitwright.aimet_torch.module_quantizers import record_of
from bitwright.aimet_torch.quantsim import QuantizationSimModel, QuantParams
from bitwright.aimet_torch.utils import Unlabelled
from bitwright.core.simulation.float_model import SetParam
from bitwright.errors import ModelError, with_article
from bitwright.methods import bias_correction as bias_correct
from bitwright.methods.layers import Layers
from bitwright.methods.scaling import equalize as equalization
from bitwright.methods.scaling.equalize import EqualizeReport, equalize_opened
from bitwright.progress import progress as bar
from bitwright.torch.calls.inputs import smallest_input, walk_modules
from bitwright.torch.modularize import modularized
from bitwright.torch.opened import TorchOpened
from bitwright.torch.training.batch_norm import fold_to_scale
from bitwright.torch.view import BATCH_NORMS, TorchView

__all__ = [
    "BatchNormFold", "ClsSetInfo", "ConnectedGraph", "CrossLayerScaling", "FPTQuant", "FPTQuantConfig", "FoldedPairs",
    "GraphSearchUtils", "HighBiasFold", "QuantParams", "SUPPORTED_MODULE_DICT", "SpinQuant", "SpinQuantConfig",
    "VLMSpinQuantConfig", "apply_spinquant", "correct_bias", "equalize_bn_folded_model", "equalize_model",
    "find_all_batch_norms_to_fold", "find_standalone_batchnorm_ops", "fold_all_batch_norms",
    "fold_all_batch_norms_to_scale", "fold_given_batch_norms", "fptquant_model_config_dict", "prepare_model",
    "prepare_pt_transformer_for_quantsim",
]  # fmt: skip

__getattr__ = absent_names(__name__)

Pair = tuple[nn.Module, nn.Module]


def _names(model: nn.Module) -> dict[int, str]:
    """Identity of a module -> its path."""
    return {id(module): path for path, module in walk_modules(model)}


# ---------------------------------------------------------------------------------------------------- batch norms


class FoldedPairs(list[Pair]):
    """``(layer, batch norm)`` modules that were folded; ``report`` says more, and what was not folded and why."""

    report: Any = None


def fold_all_batch_norms(
    model: nn.Module, input_shapes: Any = None, dummy_input: Any = None, **options: Any
) -> FoldedPairs:
    """:func:`bitwright.torch.fold_all_batch_norms` that returns pairs of modules.

    Returns:
        ``(layer, batch norm)`` of each fold; the batch norms are those the model had before.
    """
    modules = dict(walk_modules(model))
    report = front.fold_all_batch_norms(model, input_shapes, _positional(dummy_input), **options)
    pairs = FoldedPairs(
        (modules[layer], modules[norm]) for layer, norm in report if layer in modules and norm in modules
    )
    pairs.report = report
    return pairs


def fold_all_batch_norms_to_scale(sim: QuantizationSimModel) -> FoldedPairs:
    """:func:`bitwright.torch.fold_all_batch_norms_to_scale`: batch norms into the scales of the weights before them.

    Returns:
        ``(layer, batch norm)`` of each fold, as modules that ``sim.model`` had before.
    """
    modules = dict(walk_modules(sim.model))
    report = front.fold_all_batch_norms_to_scale(sim)
    sim.show_quantizers()
    pairs = FoldedPairs((modules[layer], modules[norm]) for layer, norm in report)
    pairs.report = report
    return pairs


def _positional(dummy_input: Any) -> Any:
    return tuple(dummy_input) if isinstance(dummy_input, list) else dummy_input


def fold_given_batch_norms(
    model: nn.Module, layer_pairs: Iterable[Sequence[nn.Module]], input_shapes: Any = None, dummy_input: Any = None
) -> None:
    """Fold these pairs of a layer and a batch norm, in the order in which they are computed; of a simulation into scales.

    Without an input for the model each pair is taken by itself: that nothing else reads what lies between the two is on the
    caller, as in AIMET.

    Raises:
        ModelError: a pair that cannot be folded, with the reason. With an input for the model the other pairs are folded,
            without one those before it are.
    """
    names, pairs = _names(model), [tuple(pair) for pair in layer_pairs]
    _check_pairs(pairs, names)
    norms, record = {names[id(m)] for pair in pairs for m in pair if isinstance(m, BATCH_NORMS)}, record_of(model)
    if record is None and input_shapes is None and dummy_input is None:
        for pair in pairs:
            _fold_alone(model, pair, names)
        return
    if record is None:
        opened = TorchOpened(model, input_shapes, _positional(dummy_input), "fold_given_batch_norms")
        report = opened.fold_last(True, norms)
    else:
        report = fold_to_scale(record.sim, False, norms)
        record.sim.show_quantizers()
    if report.refused:
        _refuse_fold("; ".join(map(str, report.refused)))


def _fold_alone(model: nn.Module, pair: Sequence[nn.Module], names: Mapping[int, str]) -> None:
    """Fold a pair without the model around it, and put an Identity where its batch norm was."""
    values = torch.randn(smallest_input(pair).shape, generator=torch.Generator().manual_seed(0))
    report = front.fold_all_batch_norms(nn.Sequential(*pair), dummy_input=values.to(smallest_input(pair)))
    if not len(report):
        _refuse_fold("; ".join(str(refusal) for refusal in report.refused))
    parent, _, name = names[id(next(m for m in pair if isinstance(m, BATCH_NORMS)))].rpartition(".")
    setattr(model.get_submodule(parent), name, nn.Identity())


def _check_pairs(pairs: Sequence[Sequence[nn.Module]], names: Mapping[int, str]) -> None:
    """Refuse pairs that are not a layer and a batch norm of the model; ``names``: paths of modules by identity."""
    for pair in pairs:
        unknown = [module for module in pair if id(module) not in names]
        if unknown:
            _refuse_fold(f"{with_article(type(unknown[0]).__name__)} is not a module of the model")
        if sum(isinstance(module, BATCH_NORMS) for module in pair) != 1 or len(pair) != 2:
            _refuse_fold(f"{', '.join(names[id(module)] for module in pair)} is not a layer and its batch norm")


def _refuse_fold(problem: str) -> None:
    raise ModelError(
        "fold_given_batch_norms",
        problem,
        "give pairs of a Conv, ConvTranspose or Linear module and its batch norm; fold_all_batch_norms finds them",
    )


def find_all_batch_norms_to_fold(
    model: nn.Module, input_shapes: Any = None, dummy_input: Any = None
) -> tuple[list[Pair], list[Pair]]:
    """Find the pairs that :func:`fold_all_batch_norms` folds, on a copy.

    Returns:
        ``(layer, batch norm)`` modules of the model: batch norms after their layers, and ``(batch norm, layer)`` of those
        before them.
    """
    report = front.fold_all_batch_norms(copy.deepcopy(model), input_shapes, _positional(dummy_input), progress=False)
    modules = dict(walk_modules(model))
    after: list[Pair] = []
    before: list[Pair] = []
    for fold in report.folded:
        for layer, norm in fold.pairs:
            if fold.direction == "backward":
                after.append((modules[layer], modules[norm]))
            else:
                before.append((modules[norm], modules[layer]))
    return after, before


class ConnectedGraph(sites.ConnectedGraph):
    """The operators of a module, functional calls included.

    Args:
        model: left as it is.
        model_input: one input: a tensor, a tuple of arguments, or a dict of keyword arguments.
    """

    def __init__(self, model: nn.Module, model_input: Any) -> None:
        self.model_input = _positional(model_input)
        sim = front.QuantizationSimModel(model, self.model_input)
        super().__init__(model, sim.graph, dict(walk_modules(model)))

    def get_op_from_module_name(self, name: str) -> GraphOp | None:
        """The operator that the module called ``name`` computes; AIMET's ``Model.name`` is understood too."""
        own = super().get_op_from_module_name(name)
        return own or super().get_op_from_module_name(name.removeprefix(f"{type(self.model).__name__}."))


def find_standalone_batchnorm_ops(connected_graph: ConnectedGraph) -> set[GraphOp]:
    """The batch norms of a graph that cannot be folded.

    Args:
        connected_graph: ``aimet_torch.meta.connectedgraph.ConnectedGraph(model, model_input)``.
    """
    pairs = find_all_batch_norms_to_fold(connected_graph.model, dummy_input=connected_graph.model_input)
    folded = {id(module) for several in pairs for pair in several for module in pair}
    norms = [op for op in connected_graph.ordered_ops if op.type == "BatchNormalization"]
    return {op for op in norms if id(op.get_module()) not in folded}


class BatchNormFold:
    """The functions as methods of a class, as AIMET has them too."""

    find_all_batch_norms_to_fold = staticmethod(find_all_batch_norms_to_fold)
    find_standalone_batchnorm_ops = staticmethod(find_standalone_batchnorm_ops)

    fold_all_batch_norms_to_weight = staticmethod(fold_all_batch_norms)
    fold_given_batch_norms = staticmethod(fold_given_batch_norms)
    fold_all_batch_norms_to_scale = staticmethod(fold_all_batch_norms_to_scale)


# ---------------------------------------------------------------------------------------------------- equalization


def equalize_model(model: nn.Module, input_shapes: Any = None, dummy_input: Any = None, **options: Any) -> Any:
    """:func:`bitwright.torch.equalize_model`, in place; high biases are absorbed, as in AIMET.

    Returns:
        Our report of what was equalized (AIMET returns nothing).
    """
    return front.equalize_model(model, input_shapes, dummy_input, absorb_bias=True, **options)


def equalize_bn_folded_model(
    model: nn.Module, input_shapes: Any = None, folded_pairs: Any = None, dummy_input: Any = None, **options: Any
) -> Any:
    """Equalize a model whose batch norms are folded; high biases are absorbed where ``folded_pairs`` are given.

    Args:
        model, input_shapes, dummy_input, options: as for :func:`bitwright.torch.equalize_model`.
        folded_pairs: what :func:`fold_all_batch_norms` returned, or ``(layer, batch norm)`` modules.

    Returns:
        Our report of what was equalized (AIMET returns nothing).
    """
    moments = _moments(model, folded_pairs, "folded_pairs")
    shown = options.pop("progress", True)
    opened = TorchOpened(model, input_shapes, dummy_input, "equalize_bn_folded_model")
    return equalize_opened(opened, moments, shown, absorb_bias=bool(moments), **options)


def _moments(model: nn.Module, pairs: Any, argument: str) -> dict[str, tuple[Any, Any]]:
    """Layer -> mean and deviation of its output, from ``(layer, batch norm)`` pairs or a mapping of them.

    Raises:
        ModelError: a layer is not a module of the model, or what stands beside it is not a batch norm.
    """
    if isinstance(pairs, FoldedPairs) and len(pairs) == len(pairs.report or ()):
        return dict(pairs.report.moments)
    names = _names(model)
    found: dict[str, tuple[Any, Any]] = {}
    for layer, norm in pairs.items() if isinstance(pairs, Mapping) else pairs or ():
        if id(layer) not in names:
            raise ModelError(
                argument,
                f"{with_article(type(layer).__name__)} in it is not a module of the model",
                "give the pairs of (layer, batch norm) modules that fold_all_batch_norms returned for this model",
            )
        found[names[id(layer)]] = _moments_of(norm, names[id(layer)], argument)
    return found


def _moments_of(norm: Any, layer: str, argument: str) -> tuple[Any, Any]:
    if not isinstance(norm, BATCH_NORMS):
        raise ModelError(
            argument,
            f"{layer} has {with_article(type(norm).__name__)}, which tells no mean and deviation",
            "give what fold_all_batch_norms returned, or the batch norm as it was before it was folded",
        )
    beta, gamma = (None if p is None else p.detach().double().cpu().numpy() for p in (norm.bias, norm.weight))
    channels = norm.num_features
    return np.zeros(channels) if beta is None else beta, np.ones(channels) if gamma is None else np.abs(gamma)


class CrossLayerScaling:
    """Equalization without anything before or after it."""

    def __init__(self, model: Any = None) -> None:
        self._model = model

    @staticmethod
    def scale_model(
        model: nn.Module, input_shapes: Any = None, dummy_input: Any = None, *, progress: bool = True
    ) -> ClsSetInfos:
        """Equalize a model whose batch norms are folded.

        Returns:
            The equalized sets, for :meth:`HighBiasFold.bias_fold`.
        """
        report = equalize_opened(TorchOpened(model, input_shapes, dummy_input, "scale_model"), None, progress)
        assert report.view is not None
        modules, graph = dict(walk_modules(model)), report.view.graph()
        return ClsSetInfos.of(report, lambda op: modules.get(graph.op(op).module))

    @staticmethod
    def scale_cls_sets(cls_sets: Sequence[Sequence[nn.Module]], *, progress: bool = True) -> list[Any]:
        """Equalize sets of layers that follow one another, in place.

        Nothing but a piecewise-linear activation may stand between the layers of a set, and nothing else may read what
        is between: these layers alone do not show it, so that :meth:`scale_model` is the safer call.

        Args:
            cls_sets: tuples of two or more Conv, ConvTranspose or Linear modules; the middle one of three is depthwise.
            progress: show a progress bar on a terminal.

        Returns:
            Per set what the channels were divided by, shape [channels]; for a set of n layers a tuple of n - 1 of them.

        Raises:
            ModelError: channels of neighbours do not fit.
        """
        factors = []
        for cls_set in bar(cls_sets, "equalize: sets", progress):
            report = _equalize_chain(cls_set)
            if len(cls_set) < 2 or len(report.groups) != len(cls_set) - 1:
                report.undo()
                raise ModelError(
                    "scale_cls_sets",
                    "; ".join(str(line) for line in report.refused[:-1]) or "a set of one layer",
                    "give two or more layers with parameters of their own that follow one another",
                )
            factors.append(report.factors[0] if len(report.factors) == 1 else report.factors)
        return factors

    @staticmethod
    def scale_cls_set(cls_set: Sequence[nn.Module]) -> Any:
        """:meth:`scale_cls_sets` of one set."""
        return CrossLayerScaling.scale_cls_sets([cls_set], progress=False)[0]

    def scale_cls_set_with_conv_layers(self: Any, cls_set: Any = None) -> Any:
        """Equalize two layers; returns what the channels between them were divided by.

        Raises:
            ModelError: it is not a set of two.
        """
        return _scale(self if cls_set is None else cls_set, 2)

    def scale_cls_set_with_depthwise_layers(self: Any, cls_set: Any = None) -> Any:
        """Equalize three layers, the middle one depthwise; returns what the channels between them were divided by.

        Raises:
            ModelError: it is not a set of three.
        """
        return _scale(self if cls_set is None else cls_set, 3)


def _equalize_chain(layers: Sequence[nn.Module]) -> EqualizeReport:
    """Equalize layers as if they were all of a model, in inference mode; their training modes stay.

    Raises:
        ModelError: channels of neighbours do not fit.
    """
    training = [module.training for module in layers]
    try:
        chain = nn.Sequential(*layers).eval()
        return equalization.equalize(TorchView(chain, [smallest_input(layers)]))
    except RuntimeError as error:
        names = " -> ".join(str(module) for module in layers)
        raise ModelError("scale_cls_sets", f"the layers do not fit together: {error}", f"check {names}") from error
    finally:
        for module, mode in zip(layers, training, strict=True):
            module.training = mode


def _scale(cls_set: Any, count: int) -> Any:
    if not isinstance(cls_set, (tuple, list)) or len(cls_set) != count:
        raise ModelError("cls_set", f"it is not a tuple of {count} layers", "give the modules in their order")
    return CrossLayerScaling.scale_cls_set(cls_set)


class GraphSearchUtils:
    """The chains of layers that equalization scales together, for :meth:`CrossLayerScaling.scale_cls_sets`.

    Args:
        model: its batch norms are folded; it is left as it is.
        input_shapes, dummy_input: one of them: the shapes of its inputs, or an example.
    """

    def __init__(self, model: nn.Module, input_shapes: Any = None, dummy_input: Any = None) -> None:
        view = TorchOpened(model, input_shapes, dummy_input, "GraphSearchUtils").view
        modules, graph = dict(walk_modules(model)), view.graph()
        self._after: dict[nn.Module, nn.Module] = {}
        self._relu: dict[nn.Module, bool] = {}
        for group in equalization.equalizable(view, Layers(graph))[0]:
            first, second = (modules.get(graph.op(layer.op).module) for layer in group.layers[:2])
            if len(group.layers) == 2 and first is not None and second is not None:
                self._after[first] = second
                self._relu[first] = sites.is_before_relu(graph, group.producers[0].op)

    def find_layer_groups_to_scale(self) -> list[list[nn.Module]]:
        """Chains of layers of which each reads the one before it alone, in execution order."""
        after, followers = dict(self._after), set(self._after.values())
        chains = [[layer] for layer in self._after if layer not in followers]
        for chain in chains:
            while (following := after.pop(chain[-1], None)) is not None:
                chain.append(following)
        return chains

    @staticmethod
    def convert_layer_group_to_cls_sets(layer_group: Sequence[nn.Module]) -> list[tuple[nn.Module, ...]]:
        """The sets of a chain: neighbours, and three layers where the middle one is depthwise."""
        found: list[tuple[nn.Module, ...]] = []
        first = 0
        while first + 1 < len(layer_group):
            middle: Any = layer_group[first + 1]
            depthwise = getattr(middle, "groups", 1) == getattr(middle, "out_channels", 0) > 1
            found.append(tuple(layer_group[first : first + 3 if depthwise else first + 2]))
            first += len(found[-1]) - 1
        return found

    def is_relu_activation_present_in_cls_sets(self, cls_sets: Iterable[Sequence[nn.Module]]) -> list[Any]:
        """Per set whether a ReLU follows its first layer; of a set of three also its second, as a tuple."""
        relus = [tuple(self._relu.get(layer, False) for layer in cls_set[:-1]) for cls_set in cls_sets]
        return [relu[0] if len(relu) == 1 else relu for relu in relus]


class HighBiasFold:
    """High-bias absorption after equalization."""

    @staticmethod
    def bias_fold(cls_set_info_list: Any, bn_layers: Any) -> Any:
        """Move what lies three standard deviations above zero into the next layer, in place.

        Args:
            cls_set_info_list: what :meth:`CrossLayerScaling.scale_model` returned, or a list of :class:`ClsSetInfo`.
            bn_layers: what :func:`fold_all_batch_norms` returned; or layer -> its batch norm as it was before it was folded,
                both modules.

        Returns:
            Our report, whose ``absorbed`` has the layers; ``None`` for a list that :meth:`CrossLayerScaling.scale_model` did
            not make.

        Raises:
            ModelError: a layer is not a module of the model, or what stands beside it is not a batch norm.
        """
        report = getattr(cls_set_info_list, "report", None)
        if report is not None:
            equalization.absorb_biases(report, _moments(report.view.model, bn_layers, "bn_layers"))
            return report
        norms = dict(bn_layers)
        for info in cls_set_info_list:
            for pair in info.cls_pair_info_list:
                if pair.layer1 not in norms or not pair.relu_activation_between_layers:
                    continue
                chain = nn.Sequential(pair.layer1, nn.ReLU(), pair.layer2)
                opened = TorchOpened(chain, None, smallest_input((pair.layer1, pair.layer2)), "bias_fold")
                factor = np.asarray(pair.scale_factor, np.float64)
                mean, deviation = _moments_of(norms[pair.layer1], type(pair.layer1).__name__, "bn_layers")
                equalization.absorb_biases(
                    equalize_opened(opened, None, False), {"0": (mean / factor, deviation / factor)}
                )
        return None


# ---------------------------------------------------------------------------------------------------- biases


def correct_bias(
    model: nn.Module,
    quant_params: QuantParams,
    num_quant_samples: int | None,
    data_loader: Iterable[Any],
    num_bias_correct_samples: int | None,
    conv_bn_dict: Mapping[Any, Any] | None = None,
    perform_only_empirical_bias_corr: bool = True,
    layers_to_ignore: Iterable[Any] | None = None,
    *,
    progress: bool = True,
) -> Any:
    """Change the biases of a float model so that its quantized self makes no error in the mean.

    A simulation of the model is made and calibrated for it; layers without a bias get one. AIMET removed the function in 2.31;
    :func:`bitwright.torch.apply_bias_correction` corrects a simulation.

    Args:
        model: batch norms folded; changed in place.
        quant_params: what is simulated.
        num_quant_samples: calibrate on so many samples; all with ``None``.
        data_loader: batches, gone through twice; the second element of a batch of two is dropped as its labels.
        num_bias_correct_samples: measure means on so many samples; all with ``None``.
        conv_bn_dict: layer -> its batch norm as it was before it was folded; or name of a layer -> mean and deviation of its
            output. Only the analytic form needs it.
        perform_only_empirical_bias_corr: ``False`` corrects the layers analytically whose input's mean follows from
            ``conv_bn_dict``, and only the others from data.
        layers_to_ignore: modules, or names of layers.
        progress: show a progress bar on a terminal.

    Returns:
        Our report (AIMET returns nothing).

    Raises:
        CalibrationError: no batch, or a mean that is NaN or infinite; the model is left as it was.
        ConfigError: one of ``layers_to_ignore`` is not a layer.

    Reference: Nagel et al. 2019, arXiv:1906.04721, section 4.2.
    """
    batches, names = list(Unlabelled(data_loader)), _names(model)
    if not batches:
        bias_correct.refuse_no_data()
    norms = {layer: getattr(found, "bn", found) for layer, found in (conv_bn_dict or {}).items()}
    by_name = all(isinstance(layer, str) for layer in norms)
    moments = norms if by_name else _moments(model, norms, "conv_bn_dict")
    opened = TorchOpened(model, None, batches[0], "correct_bias")
    undo = opened.view.edit(bias_correct.missing_biases(opened.view))
    try:
        sim = front.QuantizationSimModel(
            model, opened.example, quant_params.quant_scheme, default_output_bw=quant_params.act_bw,
            default_param_bw=quant_params.weight_bw, config_file=quant_params.config_file,
        )  # fmt: skip
        wanted = [batch for batch, _ in bias_correct.first_samples(batches, num_quant_samples)]
        sim.compute_encodings(wanted, progress=progress)
        report = front.apply_bias_correction(
            sim,
            batches,
            num_samples=num_bias_correct_samples,
            moments={} if perform_only_empirical_bias_corr else moments,
            layers_to_ignore=[x if isinstance(x, str) else names.get(id(x), str(x)) for x in layers_to_ignore or ()],
            progress=progress,
        )
    except BaseException:
        undo()
        raise
    opened.view.refresh()
    before = dict(model.named_parameters())
    changed = [(name, p) for name, p in sim.model.named_parameters() if not torch.equal(p, before[name])]
    opened.view.edit([SetParam(name, p.detach().float().cpu().numpy()) for name, p in changed])
    return report


# ---------------------------------------------------------------------------------------------------- rotation


def apply_spinquant(
    model: nn.Module, dummy_input: Any = None, *, enable_r1: bool = True, enable_r2: bool = False, **options: Any
) -> Any:
    """:func:`bitwright.torch.apply_spinquant`; language models need no ``dummy_input``, eight tokens are used.

    Returns:
        Our report of what was rotated (AIMET returns nothing).

    Raises:
        ModelError: no ``dummy_input`` and no embedding of tokens in the model.
    """
    dummy_input = _tokens(model, "apply_spinquant") if dummy_input is None else dummy_input
    return front.apply_spinquant(model, dummy_input, enable_r1=enable_r1, enable_r2=enable_r2, **options)


def _tokens(model: nn.Module, call: str) -> torch.Tensor:
    """Eight tokens, shape [1, 8].

    Raises:
        ModelError: no embedding of tokens in the model.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not embeddings:
        raise ModelError(
            call, "the model has no embedding of tokens, so that it is not a language model",
            f"pass an example: {call}(model, dummy_input=...)",
        )  # fmt: skip
    largest = max(embeddings, key=lambda module: module.num_embeddings)
    return torch.arange(8, device=largest.weight.device).remainder(largest.num_embeddings).unsqueeze(0)


class SpinQuant:
    """The function as a method, as AIMET has it too."""

    apply_spinquant = staticmethod(apply_spinquant)


class SpinQuantConfig(SimpleNamespace):
    """Where the parts of a model are, by keywords; accepted, and not read: they are found in the graph."""


VLMSpinQuantConfig = FPTQuantConfig = SpinQuantConfig
#: AIMET's registries of models; entries of scripts are accepted and not needed
SUPPORTED_MODULE_DICT: dict[Any, Any] = {}
fptquant_model_config_dict: dict[Any, Any] = {}


class FPTQuant:
    """Rotations of a language model that its weights take in, and one in front of each down projection."""

    @staticmethod
    def insert_fpt_quant_transforms(model: nn.Module, config: Any = None, *, dummy_input: Any = None) -> Any:
        """:func:`bitwright.torch.rotate_model` with ``online=True``, in place: merged at once.

        AIMET also scales queries, keys and up projections, and fits all transforms to the weights;
        :func:`bitwright.torch.transform_model` fits such scales to data. ``config`` is not read; eight tokens are used without
        a ``dummy_input``.

        Returns:
            Our report of what was rotated (AIMET returns nothing).

        Raises:
            ModelError: no ``dummy_input`` and no embedding of tokens in the model.
        """
        differs(
            "insert_fpt_quant_transforms",
            "rotates the residual stream, values and inputs of down projections by Hadamard matrices, merged at once; "
            "scales fitted to data are those of bitwright.torch.transform_model(model, data)",
        )
        example = _tokens(model, "insert_fpt_quant_transforms") if dummy_input is None else dummy_input
        return front.rotate_model(model, None, example, online=True)

    @staticmethod
    def merge_fpt_quant_transforms(model: nn.Module) -> None:
        """Nothing is left to be merged."""

    @staticmethod
    def insert_nonmergeable_down_project_transform(
        model: nn.Module, config: Any = None, *, dummy_input: Any = None
    ) -> Any:
        """Rotate what down projections read, at run time, and the residual stream, by which they are found; not values."""
        example = _tokens(model, "insert_nonmergeable_down_project_transform") if dummy_input is None else dummy_input
        return front.rotate_model(model, None, example, heads=False, online=True)


# ---------------------------------------------------------------------------------------------------- preparation


def prepare_model(
    model: nn.Module,
    modules_to_exclude: Sequence[nn.Module] | None = None,
    module_classes_to_exclude: Sequence[Any] | None = None,
    concrete_args: dict[str, Any] | None = None,
) -> nn.Module:
    """:func:`bitwright.torch.modularize.modularized`, under AIMET's names of the modules.

    A model that cannot be traced is copied as it is, with a warning: its functional calls are quantized too.
    ``concrete_args`` has no effect.
    """
    return modularized(model, modules_to_exclude or (), module_classes_to_exclude or ())


def prepare_pt_transformer_for_quantsim(transformer_model: nn.Module) -> None:
    """Nothing is to be prepared."""
