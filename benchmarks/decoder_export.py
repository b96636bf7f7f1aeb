"""A decoder file in its engines: does it generate what was simulated? One command, a few minutes.

    python benchmarks/decoder_export.py --markdown benchmarks/results/decoder_export.md

``stories260k`` as a Llama of transformers, weights in int4 blocks of 32, its ``down_proj`` layers (172 inputs, no multiple of
32) in float. Tokens are 32 greedy ones after each of 8 beginnings of stories. Needs the developer data set (see
tests/support/data.py), ``onnxruntime-genai``, ``openvino``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import measure  # first of ours: it puts the repository on the path
import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from bitwright.compare.verify import verify_folder
from bitwright.export.generation import Generated
from bitwright.llm import AS_SIMULATED, export_decoder, export_openvino
from bitwright.torch import QuantizationSimModel
from tests.support import data

COLUMNS = ("engine", "attention", "prompts with all 32 tokens equal", "tokens equal", "file (KiB)")
_PROMPT = 12


def stories() -> LlamaForCausalLM:
    """The checkpoint as a model of transformers, which pairs the halves of a head where the original pairs neighbours."""
    state = data.trained("stories260k").state_dict()
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=172, num_hidden_layers=5, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    names = {
        "self_attn.q_proj": "wq", "self_attn.k_proj": "wk", "self_attn.v_proj": "wv", "self_attn.o_proj": "wo",
        "mlp.gate_proj": "w1", "mlp.down_proj": "w2", "mlp.up_proj": "w3", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    found = {"model.embed_tokens.weight": state["tok_embeddings.weight"], "model.norm.weight": state["norm.weight"]}
    for layer in range(5):
        for new, old in names.items():
            values = state[f"layers.{layer}.{old}.weight"]
            if old in ("wq", "wk"):
                values = values.view(-1, 4, 2, 64).transpose(1, 2).reshape(values.shape)
            found[f"model.layers.{layer}.{new}.weight"] = values
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(found, strict=False)
    return model


def by_genai(folder: Path, generated: Generated) -> list[int]:
    import onnxruntime_genai as genai

    model = genai.Model(str(folder))
    options = genai.GeneratorParams(model)
    options.set_search_options(max_length=len(generated.prompt) + len(generated.tokens), do_sample=False)
    generator = genai.Generator(model, options)
    generator.append_tokens(np.array(generated.prompt, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)[len(generated.prompt) :]]


def by_openvino(folder: Path, generated: Generated) -> list[int]:
    import openvino

    compiled = openvino.compile_model(folder / "openvino_model.xml", "CPU", AS_SIMULATED)
    request, tokens, past, made = compiled.create_infer_request(), list(generated.prompt), 0, []
    while len(made) < len(generated.tokens):
        new = len(tokens)
        feeds = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, past + new), np.int64),
            "position_ids": np.arange(past, past + new)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        tokens, past = [int(np.argmax(request.infer(feeds)["logits"][0, -1]))], past + new
        made += tokens
    return made


def row(
    engine: str, attention: str, folder: Path, generated: Sequence[Generated], run: Callable[[Path, Generated], list[int]],
    weights: str,
) -> list[str]:  # fmt: skip
    equal = whole = 0
    for one in generated:
        made = run(folder, one)
        same = [a == b for a, b in zip(made, one.tokens, strict=False)]
        first = same.index(False) if False in same else len(same)
        equal, whole = equal + first, whole + (first == len(one.tokens))
    count = len(generated) * len(generated[0].tokens)
    size = sum(path.stat().st_size for path in folder.glob(weights)) / 1024
    return [engine, attention, f"{whole} of {len(generated)}", f"{equal} of {count}", f"{size:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--quick", action="store_true", help="GroupQueryAttention and OpenVINO only")
    arguments = parser.parse_args()
    batch = data.stories("calib")[:4, :64]
    prompts = [[int(token) for token in story[:_PROMPT]] for story in data.stories("calib")[:8]]
    rules = {"preset": "w4g32", "rules": [{"match": "*down_proj*", "all": "float"}]}
    sim = QuantizationSimModel(stories(), {"input_ids": batch}, config_file=rules)
    sim.compute_encodings([{"input_ids": batch}], progress=False)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        for attention in ("grouped",) if arguments.quick else ("grouped", "plain"):
            made = export_decoder(sim, room / attention, prompts=prompts, attention=attention)  # type: ignore[arg-type]
            report = verify_folder(room / attention)
            told = [f"{sum(r.equal == r.tokens for r in report.generated)} of {len(report.generated)}"]
            told.append(f"{sum(r.equal for r in report.generated)} of {sum(r.tokens for r in report.generated)}")
            size = f"{(room / attention / 'model.onnx').stat().st_size / 1024:.0f}"
            rows.append(["ONNX Runtime (bitwright verify)", attention, *told, size])
            rows.append(row("onnxruntime-genai", attention, room / attention, made.generated, by_genai, "model.onnx"))
        ov = export_openvino(sim, room / "ov", prompts=prompts)
        rows.append(row("OpenVINO, stateful IR", "plain", ov.folder, ov.generated, by_openvino, "openvino_model.*"))
    title = (
        "A decoder of 260 thousand parameters, weights in int4, in its engines: greedy tokens equal to the simulation"
    )
    measure.show(title, COLUMNS, rows)
    measure.save(None, arguments.markdown, title, COLUMNS, rows, None)


if __name__ == "__main__":
    main()
