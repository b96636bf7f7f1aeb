"""Low-rank adapters of PEFT in a simulation: place, load, switch, merge and export them without calibrating again.

The base stays on its grid. PEFT switches, disables and trains adapters on ``sim.model`` as on the float model; what is here is
what PEFT cannot know: quantizers for adapters that came later, a merge that rounds the sum to the grid of the layer, and an
ONNX file that takes adapters as inputs. Layers are recognised by their parts (``base_layer``, ``lora_A``, ``lora_B``), so that
PEFT is not imported.

Reference: Hu et al. 2021, arXiv:2106.09685, section 4.1.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.sites import Site
from bitwright.errors import ConfigError, checks_arguments, some_of
from bitwright.torch.calls.inputs import model_device, to_device, walk_modules
from bitwright.torch.simulation.simulated_module import on_grid

if TYPE_CHECKING:
    from bitwright.torch.simulation.quantsim import QuantizationSimModel

logger = logging.getLogger("bitwright")

_PARTS = ("base_layer", "lora_A", "lora_B")


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of a model that have adapters of PEFT, by name."""
    found = {}
    for name, module in walk_modules(model):
        if all(isinstance(getattr(module, part, None), nn.Module) for part in _PARTS) and hasattr(module, "lora_alpha"):
            found[name] = module
    return found


def _required_layers(sim: QuantizationSimModel, what: str) -> dict[str, Any]:
    layers = adapter_layers(sim.model)
    if not layers:
        raise ConfigError(
            what, "no layer of the model has an adapter of PEFT",
            "make one before the simulation: model = peft.get_peft_model(model, LoraConfig(...))",
        )  # fmt: skip
    merged = [name for name, layer in layers.items() if layer.merged_adapters]
    if merged:
        raise ConfigError(
            what,
            f"adapters of {some_of(merged)} are merged into their layers",
            "take them out first: undo(), as merge_adapters returned it",
        )
    return layers


class _Runs(Sequence[Any]):
    """The examples, once with the active adapters and once with each adapter; iterating switches them.

    Args:
        layers: that have adapters.
        examples: inputs of the model.
    """

    def __init__(self, layers: Mapping[str, Any], examples: Sequence[Any]) -> None:
        self.layers, self.examples = layers, examples
        self.adapters = list(dict.fromkeys(name for layer in layers.values() for name in layer.lora_A))

    def __len__(self) -> int:
        return len(self.examples) * (1 + len(self.adapters))

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[Any]:
        yield from self.examples
        active = {name: list(layer.active_adapters) for name, layer in self.layers.items()}
        trains = [(p, p.requires_grad) for layer in self.layers.values() for p in layer.parameters()]
        off = [layer for layer in self.layers.values() if layer.disable_adapters]
        try:
            for layer in off:
                layer.enable_adapters(True)
            for adapter in self.adapters:
                for layer in self.layers.values():
                    layer.set_adapter([adapter])
                yield from self.examples
        finally:
            for name, layer in self.layers.items():
                layer.set_adapter(active[name])
            for layer in off:
                layer.enable_adapters(False)
            for parameter, trained in trains:
                parameter.requires_grad_(trained)


@checks_arguments
def place_adapters(sim: QuantizationSimModel, data: Any = None) -> tuple[str, ...]:
    """Give the layers of adapters that were added since a simulation was made the quantizers that its rules ask for.

    Quantizers that were there keep their encodings. Without rules for adapters (``{"match": "*lora_*", "weight":
    {"format": "int8"}}``) the new layers are in float, known to the coverage, and calls of theirs are named no more.

    Args:
        sim: calibrated; its model is one of PEFT.
        data: batches, on which each adapter runs, for new quantizers of activations; the example inputs by default. Weights
            need none.

    Returns:
        Names of the new sites that are quantized.

    Raises:
        ConfigError: no layer has an adapter, or adapters are merged.
    """
    layers = _required_layers(sim, "place_adapters")
    device = model_device(sim.model)
    runs = _Runs(layers, [to_device(example, device) for example in sim.examples])
    sim._place_anew(runs, {f"{name}.": f"{name}.base_layer." for name in layers})
    fresh = [name for name, site in sim.quantizers.items() if site.enabled and site.encoding is None]
    if fresh and sim.calibrated:
        _calibrate(sim, runs if data is None else _Runs(layers, list(data)))
    return tuple(fresh)


def _calibrate(sim: QuantizationSimModel, data: Any) -> None:
    """Calibrate only the sites without an encoding."""
    known = [site for site in sim.quantizers.values() if site.encoding is not None and not site.frozen]
    for site in known:
        site.frozen = True
    try:
        sim.compute_encodings(data, progress=False)
    finally:
        for site in known:
            site.frozen = False


#: what PEFT raises of a folder, of which it checks little
_OF_PEFT = (TypeError, ValueError, KeyError, AttributeError, RuntimeError)


@checks_arguments
def load_adapter(sim: QuantizationSimModel, folder: str | os.PathLike[str], name: str) -> tuple[str, ...]:
    """Read an adapter from PEFT's own folder into the model of a simulation, check it, and place it.

    Args:
        sim: calibrated; its model is one of PEFT.
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``. Nothing is downloaded.
        name: of the adapter from now on; ``sim.model.set_adapter(name)`` switches to it.

    Returns:
        See :func:`place_adapters`.

    Raises:
        ConfigError: a file is missing or damaged, the rank is not positive, the adapter is for another base (it names a layer
            that the model lacks, or one with other sizes), or the model has an adapter of this name.
    """
    _required_layers(sim, "load_adapter")
    place = Path(folder)
    config, shapes = _stored(place)
    taken = {known for layer in adapter_layers(sim.model).values() for known in layer.lora_A}
    if name in taken:
        raise ConfigError(
            name, "the model has an adapter of this name", f"choose another name than {', '.join(sorted(taken))}"
        )
    pattern = config.get("rank_pattern") or {}
    ranks = {"r": config.get("r"), **(pattern if isinstance(pattern, dict) else {"rank_pattern": pattern})}
    for key, rank in ranks.items():
        if not isinstance(rank, int) or rank < 1:
            raise ConfigError(
                str(place / "adapter_config.json"),
                f"the rank {key} is {rank!r}",
                "use a rank of 1 or more, and train the adapter with it",
            )
    _check_base(sim, place, shapes)
    try:
        sim.model.load_adapter(str(place), name)  # type: ignore[operator]
    except _OF_PEFT as error:
        problem = f"PEFT cannot load it: {type(error).__name__}: {error!s:.200}"
        raise ConfigError(str(place), problem, "write it again with model.save_pretrained(folder)") from error
    return place_adapters(sim)


def _stored(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Configuration and shapes of an adapter's folder."""
    from safetensors import SafetensorError, safe_open

    remedy = "name the folder that model.save_pretrained(folder) of PEFT wrote"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise ConfigError(str(folder), f"it has no {name}", remedy)
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (ValueError, RecursionError, SafetensorError) as error:
        raise ConfigError(str(folder), f"it is damaged: {error}", "copy the folder once more") from error
    if not isinstance(config, dict):
        raise ConfigError(str(folder), "adapter_config.json holds no object", remedy)
    return config, shapes


def _check_base(sim: QuantizationSimModel, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse an adapter whose layers are missing in the model or have other sizes.

    Raises:
        ConfigError: with the first such layer.
    """
    modules = dict(walk_modules(sim.model))
    ops = [site.op for site in sim.quantizers.values() if site.role == "weight" and site.enabled]
    read = {*ops, *(op.rpartition(".")[0] for op in ops)}  # products that a layer computes itself are named within it
    in_float = set()
    for key, shape in shapes.items():
        path, found, part = key.partition(".lora_")
        if not found or part[:1] not in "AB":
            continue
        problem = _misfit(modules.get(path), path, key, shape)
        if problem:
            problem = f"the adapter is for another base: {problem}"
            raise ConfigError(str(folder), problem, "load it into the model that it was trained beside")
        if path not in read and f"{path}.base_layer" not in read:
            in_float.add(path)
    if in_float:
        logger.warning("%s: it changes layers that are not quantized: %s", folder, some_of(sorted(in_float)))


def _misfit(layer: Any, path: str, key: str, shape: tuple[int, ...]) -> str:
    """The reason why a factor of this name and shape does not fit a layer; empty where it does."""
    weight = getattr(getattr(layer, "base_layer", layer), "weight", None)
    if weight is None:
        return f"it changes {path}, which the model does not have"
    axis = 1 if ".lora_A" in key else 0
    if len(shape) < 2:
        return f"{key} has shape {shape}, and a factor has two axes"
    sizes = tuple(weight.t().shape if hasattr(layer, "nf") or getattr(layer, "fan_in_fan_out", False) else weight.shape)
    if len(sizes) == 2 and shape[axis] != sizes[axis]:
        return f"{key} has shape {shape}, and {path} {sizes}"
    return ""


@checks_arguments
def merge_adapters(sim: QuantizationSimModel) -> Undo:
    """Add the active adapters to the weights of their layers, and round each sum to a grid of the layer's spec.

    An adapter was trained beside the weight on its grid; that is what it is added to. The sum keeps the scales of the layer
    where these give the smaller squared error, and gets scales of its own otherwise. Where outputs are quantized, that of the
    layer is quantized as the sum of layer and adapters was. Nothing is calibrated.

    Args:
        sim: calibrated; its model is one of PEFT.

    Returns:
        A function that takes the adapters out again: weights and encodings are then those of before, bit for bit.

    Raises:
        ConfigError: no layer has an active adapter, or adapters are merged.
    """
    layers = {
        name: layer for name, layer in _required_layers(sim, "merge_adapters").items()
        if any(active in layer.lora_A for active in layer.active_adapters) and not layer.disable_adapters
    }  # fmt: skip
    if not layers:
        raise ConfigError("merge_adapters", "no adapter is active", "switch one on first: sim.model.set_adapter(name)")
    back = sim.quantizers.remember()
    weights = {name: layer.base_layer.weight.detach().clone() for name, layer in layers.items()}

    def undo() -> None:
        with torch.no_grad():
            for name, layer in layers.items():
                layer.unmerge()
                layer.base_layer.weight.copy_(weights[name])
        back()

    with sim._changing("merging adapters"), torch.no_grad():
        sites = _sites_of_weights(sim)
        for name, layer in layers.items():
            weight = layer.base_layer.weight
            site, axes = sites.get(id(weight), (None, ()))
            if site is not None:
                weight.copy_(on_grid(cast("Any", site.quantizer), weight.detach(), axes))
            layer.merge()
            if site is not None:
                _fit(site, weight.detach().permute(axes))
                _take_range_of_sum(sim, name, site.op)
        sim._refresh_biases()
    return undo


def _sites_of_weights(sim: QuantizationSimModel) -> dict[int, tuple[Site, tuple[int, ...]]]:
    """Parameter -> its site, and the order of the parameter's axes there."""
    weights = [name for name, site in sim.quantizers.items() if site.role == "weight" and site.enabled]
    reads = sim._read_parameters(weights)
    return {
        id(sim._interceptor.named_tensor(param)): (sim.quantizers[name], axes) for name, (param, axes) in reads.items()
    }


def _fit(site: Site, weight: Tensor) -> None:
    """Choose between the present scales of a weight's site and those of its new values."""
    quantizer: Any = site.quantizer
    old = quantizer.required
    lost = float((quantizer(weight) - weight).square().sum())
    quantizer.encoding = None
    quantizer.observe_once(weight)
    if lost <= float((quantizer(weight) - weight).square().sum()):
        quantizer.encoding = old


def _take_range_of_sum(sim: QuantizationSimModel, layer: str, op: str) -> None:
    """Give a merged layer's output the encoding of the sum of layer and adapters; float where the sum had none.

    A sum has none where an activation that follows has it.
    """
    outputs = [s for s in sim.quantizers.values() if s.role == "output" and s.enabled and s.encoding is not None]
    sums = [s.encoding for s in outputs if s.op.rpartition(".")[0] == layer and sim.graph.op(s.op).type == "Add"]
    own = next((s for s in outputs if s.op == op), None)
    if own is None:
        return
    if sums and sums[-1] is not None:
        own.quantizer.take(sums[-1])
    else:
        own.enabled = False


@checks_arguments
def export_adapters(
    sim: QuantizationSimModel, model: str | os.PathLike[str], out: str | os.PathLike[str]
) -> dict[str, Path]:
    """Write an ONNX file that takes adapters as inputs, and every adapter as a file of its own.

    The factors of the adapter that was active when ``model`` was written become inputs ``<layer>.lora_A`` and
    ``<layer>.lora_B`` with a free rank, whose defaults are these factors. Adapter files are those of ONNX Runtime
    (``RunOptions.add_active_adapter``); a scale ``alpha / r`` unlike that of the defaults is multiplied into ``lora_B``. An
    adapter that leaves a layer alone has zeros for it. Configuration and tokenizer beside a file of
    ``bitwright.llm.export_decoder`` are copied, so that onnxruntime-genai opens ``out`` and ``onnxruntime_genai.Adapters``
    reads the adapters.

    Args:
        sim: whose adapters are written.
        model: path of the file that ``sim.export`` or ``export_decoder`` wrote.
        out: another folder, of ``model.onnx`` and ``<adapter>.onnx_adapter``; created if missing.

    Returns:
        Name of an adapter -> its file.

    Raises:
        ConfigError: no layer has an adapter, or not exactly one active; the file does not hold the factors in float, or two
            layers have equal ones; another adapter changes a layer that the one in the file leaves alone.
    """
    import onnx_ir as ir

    layers = _required_layers(sim, "export_adapters")
    folder, source = Path(out), Path(model)
    if folder.resolve() == source.parent.resolve():
        raise ConfigError(
            "out", f"{folder} is the folder of the model, whose file would be lost", "name another folder"
        )
    in_file = _only_active(layers)
    loaded = ir.load(model)
    stored = _by_numbers(loaded.graph)
    turned: dict[str, bool] = {}
    for name, adapter in in_file.items():
        for part, weight in _factors(layers[name], adapter).items():
            key = f"{name}.{part}"
            value, turned[key] = _stored_factor(stored, key, weight)
            _open(loaded.graph, value, key, rank_axis=int(turned[key] == (part == "lora_A")))
    folder.mkdir(parents=True, exist_ok=True)
    apart = any(isinstance(value.const_value, ir.ExternalTensor) for value in loaded.graph.initializers.values())
    ir.save(loaded, folder / "model.onnx", external_data="model.onnx.data" if apart else None)
    if (source.parent / "genai_config.json").is_file():
        _copy_settings(source, folder)
    names = dict.fromkeys(each for layer in layers.values() for each in layer.lora_A)
    return {each: _write_adapter(folder, each, layers, in_file, turned) for each in names}


def _copy_settings(model: Path, folder: Path) -> None:
    """Copy the configurations and tokenizer files beside a decoder, without what describes the file itself."""
    for path in model.parent.iterdir():
        if path.suffix in (".json", ".model", ".jinja", ".txt") and not path.name.startswith(f"{model.stem}_"):
            shutil.copyfile(path, folder / path.name)
    settings = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    settings["model"]["decoder"]["filename"] = "model.onnx"
    (folder / "genai_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def _only_active(layers: Mapping[str, Any]) -> dict[str, str]:
    """Layer -> its active adapter; without the layers that have none.

    Raises:
        ConfigError: several are active at once, or they are switched off.
    """
    found = {}
    for name, layer in layers.items():
        active = [each for each in layer.active_adapters if each in layer.lora_A]
        if len(active) > 1 or layer.disable_adapters:
            problem = (
                "its adapters are switched off" if layer.disable_adapters else f"{len(active)} adapters are active"
            )
            raise ConfigError(name, problem, "switch to one: sim.model.set_adapter(name), and export again")
        if active:
            found[name] = active[0]
    return found


def _by_numbers(graph: Any) -> dict[tuple[tuple[int, ...], bytes], list[Any]]:
    """The float matrices of a graph by shape and values."""
    found: dict[tuple[tuple[int, ...], bytes], list[Any]] = {}
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and len(tensor.shape) == 2 and tensor.dtype.is_floating_point():
            array = tensor.numpy()
            found.setdefault((array.shape, array.tobytes()), []).append(value)
    return found


def _factors(layer: Any, adapter: str) -> dict[str, Tensor]:
    return {part: getattr(layer, part)[adapter].weight.detach() for part in ("lora_A", "lora_B")}


def _stored_factor(stored: Mapping[Any, list[Any]], name: str, weight: Tensor) -> tuple[Any, bool]:
    """The initializer that holds a factor, and whether it holds the transpose.

    Raises:
        ConfigError: there is not exactly one.
    """
    for turned, array in ((True, weight.t().contiguous().cpu().numpy()), (False, weight.cpu().numpy())):
        found = stored.get((array.shape, array.tobytes()), [])
        if len(found) == 1 and not found[0].is_graph_input():
            return found[0], turned
    raise ConfigError(
        name, "the file does not hold the numbers of this factor in float, or holds them more than once",
        "export with the adapter active, trained (B of a new one is zero) and in float",
    )  # fmt: skip


def _open(graph: Any, value: Any, name: str, *, rank_axis: int) -> None:
    """Make an initializer an input called ``name``, whose default it is, with a free rank."""
    import onnx_ir as ir

    del graph.initializers[value.name]
    value.name = name
    value.shape = ir.Shape(
        [f"{name}.rank" if i == rank_axis else size for i, size in enumerate(value.const_value.shape)]
    )
    graph.initializers[name] = value
    graph.inputs.append(value)
    for node, _ in value.uses():
        node.outputs[0].shape = None  # of the rank that was recorded


def _write_adapter(
    folder: Path, adapter: str, layers: Mapping[str, Any], in_file: Mapping[str, str], turned: Mapping[str, bool]
) -> Path:
    import onnxruntime

    parameters = {}
    for name, layer in layers.items():
        if adapter in layer.lora_A and name not in in_file:
            raise ConfigError(
                name, f"adapter {adapter} changes this layer, and the one in the file leaves it alone",
                "export with an adapter active that changes all of these layers",
            )  # fmt: skip
        if name not in in_file:
            continue
        known = in_file[name]
        if adapter in layer.lora_A:
            factors = _factors(layer, adapter)
            factors["lora_B"] = factors["lora_B"] * (layer.scaling[adapter] / layer.scaling[known])
        else:
            factors = {part: torch.zeros_like(w) for part, w in _factors(layer, known).items()}
        for part, weight in factors.items():
            array = (weight.t() if turned[f"{name}.{part}"] else weight).contiguous().cpu().numpy()
            parameters[f"{name}.{part}"] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
    made = onnxruntime.AdapterFormat()
    made.set_adapter_version(1)
    made.set_model_version(1)
    made.set_parameters(parameters)
    path = folder / f"{adapter}.onnx_adapter"
    made.export_adapter(str(path))
    return path
