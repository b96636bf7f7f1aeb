"""Commands for language models: ``llm quantize``, ``llm convert``, ``llm perplexity`` and ``llm generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.app import command, data_option, export_option, group, methods_option, output_option
from bitwright.cli.options import JsonFile, write_json
from bitwright.errors import ConfigError
from bitwright.terminal import answer, details

llm = group("llm", "Quantize language models, measure and run them. Local folders only; nothing is downloaded.")

Folder = Annotated[Path, typer.Argument(help="Folder with config.json, tokenizer files and safetensors shards.")]
Written = Annotated[Path, typer.Argument(help="Folder of a float or quantized model; one that `llm quantize` wrote.")]
Context = Annotated[int, data_option(help="Tokens of a row of text.")]


@command("quantize", under=llm)
def quantize_folder(
    folder: Folder,
    preset: Annotated[
        str, methods_option(help="Format of the matrices: w4g128, w4g32_asym, w8, nvfp4, mxfp4, ...")
    ] = "w4g128",
    recipe: Annotated[
        str, methods_option(help="Methods before rounding, in their order: awq,gptq; seq_mse. None needs no data.")
    ] = "",
    group_size: Annotated[int | None, methods_option(help="Groups of this size; 0 for one scale per channel.")] = None,
    rule: Annotated[
        list[str] | None,
        methods_option(help="Format of some parameters: role:down=w8, 'model.layers.0.*=float'. May be repeated."),
    ] = None,
    embedding: Annotated[str | None, methods_option(help="Format of the table of tokens; float by default.")] = None,
    lm_head: Annotated[str | None, methods_option(help="Format of the output layer; float by default.")] = None,
    data: Annotated[
        Path | None, data_option(help="Text file for the methods; its last tenth measures the perplexity.")
    ] = None,
    context: Context = 512,
    samples: Annotated[int, data_option(help="Rows of text for the methods at most.")] = 128,
    to: Annotated[str | None, export_option(help="Kind of files: compressed-tensors, gguf, ... With --out.")] = None,
    out: Annotated[Path | None, output_option(help="Folder for the files; created if missing.")] = None,
    work_dir: Annotated[
        Path | None,
        output_option(help="Folder for hidden states and finished blocks; a later call goes on from there."),
    ] = None,
    seed: Annotated[int, methods_option(help="Of methods that draw rows.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Quantize the weights of a language model and write the files that an engine loads.

    The folder is read tensor by tensor; methods work block by block, so that a
    model may be larger than the memory. With --work-dir, a run that was ended
    goes on at the block where it was.

    \b
    Examples:
      bitwright llm quantize model --preset w4g128 --to gguf --out model-w4
      bitwright llm quantize model --recipe awq,gptq --data text.txt --to compressed-tensors --out model-w4
      bitwright llm quantize model --rule role:down=w8 --rule 'model.layers.0.*=float'
    """
    from bitwright.llm.quantized import quantize

    result = quantize(
        folder, preset, recipe=recipe, data=data, to=to, out=out, group_size=group_size, rules=_rules(rule or []),
        embedding=embedding, lm_head=lm_head, context=context, samples=samples, work_dir=work_dir, seed=seed,
    )  # fmt: skip
    lines = str(result).splitlines()
    answer(lines[0])
    details(*lines[1:])
    write_json(json_file, result)


@command("convert", under=llm)
def convert_folder(
    folder: Annotated[
        Path, typer.Argument(help="Folder that is quantized already: gptq, awq, compressed-tensors, ...")
    ],
    to: Annotated[str, export_option(help="Kind of files: compressed-tensors, gguf, genai, ...")],
    out: Annotated[Path, output_option(help="Folder for the files; created if missing.")],
) -> None:
    """Write a folder that is quantized already as files of another kind, with the same codes and scales.

    \b
    Examples:
      bitwright llm convert model-gptq --to compressed-tensors --out model-w4
    """
    from bitwright.llm.opened import convert

    convert(folder, to, out)
    answer(f"written to {out}")


@command("perplexity", under=llm)
def measure_perplexity(
    folder: Written,
    text: Annotated[Path, data_option(help="Text file.")],
    context: Context = 512,
    stride: Annotated[int | None, data_option(help="Tokens between two rows; --context by default.")] = None,
    tokens: Annotated[int | None, data_option(help="Tokens of the text at most.")] = None,
    reference: Annotated[
        Path | None, data_option(help="Another folder, from whose distributions the divergence is measured.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        data_option(help="Folder with the tokenizer, where the first one has none that transformers reads."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure the perplexity of a language model on a text, with a 95 % interval, in the engine of its files.

    \b
    Examples:
      bitwright llm perplexity model --text test.txt
      bitwright llm perplexity model-w4 --text test.txt --reference model
    """
    from bitwright.llm.checkpoint import open_tokenizer
    from bitwright.llm.engines import open_engine
    from bitwright.llm.likelihood import perplexity, text_tokens

    row = text_tokens(open_tokenizer(tokenizer or folder), text.read_text(encoding="utf-8"))[:tokens]
    other = None if reference is None else open_engine(reference).logits
    result = perplexity(open_engine(folder).logits, row, context=context, stride=stride, reference=other)
    answer(str(result))
    write_json(json_file, result)


@command("generate", under=llm)
def generate_text(
    folder: Written,
    prompt: Annotated[str, data_option(help="Text to go on from.")],
    tokens: Annotated[int, data_option(min=1, help="How many tokens.")] = 32,
    tokenizer: Annotated[
        Path | None, data_option(help="Folder with the tokenizer, where the first one has none.")
    ] = None,
) -> None:
    """Go on with a text, by the likeliest token at each step, in the engine of the files.

    \b
    Examples:
      bitwright llm generate model-w4 --prompt "Once upon a time" --tokens 32
    """
    from bitwright.llm.checkpoint import open_tokenizer
    from bitwright.llm.engines import open_engine

    opened = open_tokenizer(tokenizer or folder)
    start = opened(prompt)["input_ids"]
    if not start:
        raise ConfigError("--prompt", "it has no token", "give a text")
    made = open_engine(folder).generate(start, tokens)
    answer(prompt + opened.decode(made, skip_special_tokens=True))


def _rules(texts: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for text in texts:
        pattern, sign, preset = text.rpartition("=")
        if not sign:
            raise ConfigError("--rule", f"{text!r} has no '='", "write pattern=preset: role:down=w8, or pattern=float")
        found[pattern] = None if preset == "float" else preset
    return found
