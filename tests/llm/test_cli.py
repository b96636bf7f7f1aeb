"""The commands for language models: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner, Result

from bitwright.cli import app
from tests.llm.models import saved, text


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["llm", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    saved(made, LlamaConfig)
    (made / "text.txt").write_text(text())
    return made


def test_quantize_prints_the_result_first_and_writes_files(folder: Path, tmp_path: Path):
    made, report = tmp_path / "w4", tmp_path / "report.json"
    options = (
        "--preset",
        "w4g32",
        "--data",
        folder / "text.txt",
        "--context",
        24,
        "--samples",
        4,
        "--rule",
        "role:v=float",
    )
    result = run("quantize", folder, *options, "--to", "compressed-tensors", "--out", made, "--json", report)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("perplexity ") and "->" in lines[0] and "bits per weight; 12 parameters" in result.output
    assert json.loads((made / "config.json").read_text())["quantization_config"] and (made / "tokenizer.json").exists()
    written = json.loads(report.read_text())
    assert len(written["rows"]) == 12 and written["after"]["value"] > 1 and "weights" not in written


def test_groups_ends_and_windows_are_options(folder: Path, tmp_path: Path):
    report = tmp_path / "report.json"
    ends = ("--embedding", "w8", "--lm-head", "w4g16", "--rule", "role:v=float")
    result = run("quantize", folder, "--preset", "w4g128", "--group-size", 32, *ends, "--json", report)
    assert result.exit_code == 0, result.output
    assert "time " in result.output and "peak memory " in result.output
    rows = {row["role"]: row["stored"] for row in json.loads(report.read_text())["rows"]}
    blocks = "int4 symmetric per block of"
    assert rows.pop("embedding").startswith("int8 symmetric per channel") and rows.pop("lm_head").startswith(
        f"{blocks} 16"
    )
    assert sorted(rows) == ["down", "gate", "k", "o", "q", "up"]
    assert all(stored.startswith(f"{blocks} 32") for stored in rows.values())
    measured = []
    for stride in ((), ("--stride", 8)):
        shown = run("perplexity", folder, "--text", folder / "text.txt", "--context", 16, *stride, "--tokens", 64)
        assert " of 63 tokens" in shown.stdout or " of 60 tokens" in shown.stdout, shown.output
        measured.append(shown.stdout)
    assert measured[0] != measured[1]


def test_perplexity_and_generate_run_a_folder(folder: Path):
    result = run(
        "perplexity", folder, "--text", folder / "text.txt", "--context", 32, "--tokens", 200, "--reference", folder
    )
    assert result.exit_code == 0 and result.stdout.startswith("perplexity ") and "KL " in result.output
    result = run("generate", folder, "--prompt", "abc", "--tokens", 5)
    assert result.exit_code == 0 and result.stdout.startswith("abc") and len(result.stdout) > len("abc") + 5


def test_convert_writes_the_codes_as_other_files(folder: Path, tmp_path: Path):
    first, second = tmp_path / "w4", tmp_path / "gptq"
    assert run("quantize", folder, "--preset", "w4g32", "--to", "torchao", "--out", first).exit_code == 0
    result = run("convert", first, "--to", "gptq", "--out", second)
    assert result.exit_code == 0 and "written to" in result.output
    text_file = folder / "text.txt"
    answers = [
        run("perplexity", place, "--text", text_file, "--tokens", 99).stdout.split()[1] for place in (first, second)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        pytest.param(("quantize", "nowhere"), "it is not a folder; nothing is downloaded", id="folder"),
        pytest.param(
            ("quantize", "MODEL", "--to", "compressed", "--out", "x"), "did you mean 'compressed-tensors'", id="kind"
        ),
        pytest.param(("quantize", "MODEL", "--rule", "role:v"), "has no '='", id="rule"),
        pytest.param(("generate", "MODEL", "--prompt", ""), "it has no token", id="prompt"),
        pytest.param(("generate", "MODEL", "--prompt", "a", "--tokens", 0), "equal to 1", id="tokens"),
        pytest.param(("perplexity", "EMPTY", "--text", "TEXT"), "it has no tokenizer", id="tokenizer"),
        pytest.param(
            ("perplexity", "EMPTY", "--text", "TEXT", "--tokenizer", "MODEL"),
            "it holds no language model",
            id="no-model",
        ),
    ],
)
def test_what_is_wrong_is_said(arguments: tuple[str, ...], message: str, folder: Path, tmp_path: Path):
    places = {"MODEL": folder, "EMPTY": tmp_path, "TEXT": folder / "text.txt"}
    result = run(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2 and message in " ".join(result.output.split())
