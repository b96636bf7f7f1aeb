"""Export language models as OpenVINO's stateful IR with an internal cache, as OpenVINO GenAI needs."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from bitwright.compare.generation import Generated, Generation, read_generation
from bitwright.errors import ConfigError, ExportError
from bitwright.export.files.atomic import atomic_files
from bitwright.llm.checkpoint import open_tokenizer
from bitwright.llm.decoder_export import DecoderExport, export_decoder
from bitwright.torch import QuantizationSimModel

#: without these OpenVINO quantizes activations and caches to 8 bits, and may compute in bfloat16, as no simulation does
AS_SIMULATED = {
    "EXECUTION_MODE_HINT": "ACCURACY",
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}
_MOST = 600  # characters of what OpenVINO says, which names the operator after some lines
_STEM = "openvino_model"  # what OpenVINO GenAI looks for
_OF_ONNX = ("genai_config.json", "model.onnx")


@dataclass(frozen=True)
class OpenVinoDecoder:
    """Result of :func:`export_openvino`.

    Attributes:
        folder: what ``openvino_genai.LLMPipeline`` opens.
        model: the IR; its weights lie beside it.
        generated: prompts, and the tokens that the simulation continues them with.
        notes: what is otherwise than asked for, with reasons.
    """

    folder: Path
    model: Path
    generated: tuple[Generated, ...]
    notes: tuple[str, ...]


def export_openvino(sim: QuantizationSimModel | nn.Module, folder: str | Path, **options: Any) -> OpenVinoDecoder:
    """Write a causal language model of transformers as stateful IR, with integer weights, for OpenVINO and OpenVINO GenAI.

    ``openvino_model.xml`` takes ``input_ids``, ``attention_mask``, ``position_ids`` and ``beam_idx`` and returns ``logits``;
    keys and values are states. Compile it with :data:`AS_SIMULATED` for the numbers of the simulation: OpenVINO's defaults
    quantize activations and caches to 8 bits. ``openvino_tokenizer.xml`` is written where ``openvino_tokenizers`` is installed
    and converts the tokenizer; a note says so where it does not.

    Args:
        sim: a calibrated simulation; a module is written as it is, in float.
        folder: created if missing.
        options: of :func:`export_decoder`; attention is in plain operators.

    Raises:
        ConfigError: OpenVINO is not installed.
        ExportError: OpenVINO cannot read the model; and as :func:`export_decoder`.
    """
    try:
        import openvino
    except ImportError as error:
        problem = "it is not installed, and writes the IR"
        raise ConfigError("openvino", problem, "install it: pip install 'bitwright[openvino]'") from error
    tokenizer = options.get("tokenizer")
    with tempfile.TemporaryDirectory() as room:
        options = {"target": "openvino_cpu", "samples": False, **options, "attention": "plain", "prefix": "model"}
        made = export_decoder(sim, room, **options, external=True)
        generation = read_generation(Path(room, "model_generation.json"))
        try:
            # maps its weights from the second file and folds none, so that half-precision ones are written as they are
            model = openvino.Core().read_model(str(made.exported.qdq))
        except Exception as error:
            raise ExportError(
                str(folder),
                f"OpenVINO cannot read the model: {' '.join(str(error).split())[:_MOST]}",
                "leave the layer that it names in float, or export for ONNX Runtime (export_decoder)",
            ) from error
        make_stateful(model, generation)
        with atomic_files(folder, name=f"{_STEM}.xml", create=True) as staging:
            openvino.save_model(model, staging / f"{_STEM}.xml", compress_to_fp16=False)
            shutil.copyfile(Path(room, "model_generation.json"), staging / f"{_STEM}_generation.json")
            for file in Path(room).iterdir():
                if file.is_file() and not file.name.startswith("model") and file.name not in _OF_ONNX:
                    shutil.copyfile(file, staging / file.name)
            notes = [*made.notes, *_write_tokenizer(tokenizer, staging)]
            settings = _generation_config(made)
            (staging / "generation_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")
    return OpenVinoDecoder(Path(folder), Path(folder, f"{_STEM}.xml"), made.generated, tuple(notes))


def make_stateful(model: Any, generation: Generation) -> None:
    """Turn the cache into states, in place, by OpenVINO's own pass; they start empty, and ``beam_idx`` selects rows.

    Args:
        model: of ``openvino.Core().read_model``.
        generation: names the inputs and outputs of the cache.
    """
    from openvino import PartialShape, Type, opset13, passes

    rows = opset13.parameter(PartialShape([-1]), dtype=Type.i32, name="beam_idx")
    rows.output(0).get_tensor().add_names({"beam_idx"})
    model.add_parameters([rows])
    pairs = []
    for past, present in zip(generation.past, generation.present, strict=True):
        port = model.input(past)
        readers = port.get_target_inputs()
        chosen = opset13.gather(port, rows, opset13.constant(0))
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
        pairs.append((port.get_node(), model.output(present).get_node()))
    manager = passes.Manager()
    manager.register_pass(passes.MakeStateful(pairs))
    manager.run_passes(model)
    batch = opset13.gather(
        opset13.shape_of(model.input("input_ids"), output_type="i64"), opset13.constant([0]), opset13.constant(0)
    )
    for node in model.get_ops():
        if node.get_type_name() != "ReadValue":
            continue
        shape = node.get_output_partial_shape(0)
        lengths = [
            batch,
            *(opset13.constant(np.array([n], np.int64)) for n in (shape[1].get_length(), 0, shape[3].get_length())),
        ]
        zero = opset13.constant(0.0, dtype=node.get_output_element_type(0))
        node.set_arguments([opset13.broadcast(zero, opset13.concat(lengths, axis=0))])
    model.validate_nodes_and_infer_types()


def _generation_config(made: DecoderExport) -> dict[str, Any]:
    config = json.loads((made.folder / "genai_config.json").read_text(encoding="utf-8"))["model"]
    return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _write_tokenizer(tokenizer: Any, folder: Path) -> Sequence[str]:
    """Convert the tokenizer into OpenVINO's tokenizer and detokenizer; returns notes on what was not written."""
    if tokenizer is None:
        return ["tokenizer: not written as openvino_tokenizer.xml, because there is none"]
    try:
        import openvino
        from openvino_tokenizers import convert_tokenizer
    except ImportError:
        return ["tokenizer: not written as openvino_tokenizer.xml, because openvino_tokenizers is not installed"]
    if isinstance(tokenizer, (str, Path)):
        tokenizer = open_tokenizer(Path(tokenizer))
    try:
        one, other = convert_tokenizer(tokenizer, with_detokenizer=True)
    except Exception as error:  # of any of its steps; the model beside it takes token ids all the same
        why = " ".join(str(error).split())[:_MOST]
        return [f"tokenizer: not written as openvino_tokenizer.xml, because its converter fails: {why}"]
    openvino.save_model(one, folder / "openvino_tokenizer.xml")
    openvino.save_model(other, folder / "openvino_detokenizer.xml")
    return []
