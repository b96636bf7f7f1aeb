"""Several networks quantized together from runs of the program that calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import bitwright
from bitwright import CalibrationError, ConfigError
from bitwright.recipes.pipeline import _Calls

OPTIONS = {"recipe": [], "measure_speed": False}


class Denoiser(nn.Module):
    """Takes positional and keyword arguments, as the networks of diffusion pipelines do."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.mix(torch.cat([x, text + time], -1))


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x)


def diffusion() -> tuple[dict[str, nn.Module], Any]:
    torch.manual_seed(0)
    text, denoiser, vae = nn.Embedding(20, 8), Denoiser(), Vae()

    def run(networks: Any, prompt: list[int]) -> dict[str, torch.Tensor]:
        words = text(torch.tensor([prompt])).mean(1)
        x = torch.randn(1, 8)  # every run begins at the same seed
        for step in range(4):
            x = x - 0.3 * denoiser(x, torch.tensor(step / 4), text=words)
        return {"image": vae.decode(x)}

    return {"text": text, "denoiser": denoiser, "vae.decoder": vae.decoder}, run


def product(rows: int, columns: int, path: Path) -> Path:
    weight = np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", rows])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", columns])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_modules_are_calibrated_with_every_step_of_the_program_and_the_whole_is_rated() -> None:
    networks, run = diffusion()
    prompts = [[i, i + 1, i + 2] for i in range(10)]
    before = run(networks, prompts[0])["image"].shape
    options = {name: OPTIONS for name in networks}
    result = bitwright.quantize_pipeline(networks, run, prompts, options=options, calls=10, progress=False)
    assert [(row.name, row.calls, row.kept) for row in result.networks] == [
        ("text", 8, 8), ("denoiser", 32, 10), ("vae.decoder", 8, 8)
    ]  # fmt: skip
    assert "on 2 of 10 inputs" in result.headline
    assert [row.name for row in result.whole] == ["output.image"]
    assert all(row.whole_alone is not None for row in result.networks)
    assert run(networks, prompts[0])["image"].shape == before and not networks["denoiser"]._forward_hooks

    def in_float(prompt: list[int]) -> torch.Tensor:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            return run(networks, prompt)["image"]

    wanted = torch.cat([in_float(prompt) for prompt in prompts[-2:]])
    found = torch.cat([result.run(prompt)["image"] for prompt in prompts[-2:]])
    noise = float((wanted - found).square().sum() / wanted.square().sum())
    assert result.sqnr == pytest.approx(-10 * np.log10(noise), abs=0.01) and 10 < result.sqnr < 60


def test_two_onnx_files_in_a_row(tmp_path: Path) -> None:
    """A detector chooses rows, of which another number may be left after quantization, and a recogniser reads them."""
    files = {"detector": product(6, 5, tmp_path / "d.onnx"), "recogniser": product(6, 4, tmp_path / "r.onnx")}

    def run(networks: Any, page: np.ndarray) -> dict[str, Any]:
        (scores,) = networks["detector"].run(None, {networks["detector"].get_inputs()[0].name: page})
        chosen = page[np.argsort(-scores[:, 0], kind="stable")[:3]]
        (letters,) = networks["recogniser"].run(None, {"x": chosen})
        return {"letters": letters, "text": "".join(map(str, letters.argmax(-1)))}

    pages = list(np.random.default_rng(0).normal(size=(10, 40, 6)).astype(np.float32))
    result = bitwright.quantize_pipeline(
        files,
        run,
        pages,
        {"recogniser": "w8a16"},
        options=dict.fromkeys(files, OPTIONS),
        path=tmp_path / "out",
        progress=False,
    )
    assert {row.name: row.calls for row in result.networks} == {"detector": 8, "recogniser": 8}
    assert [(row.name, row.sqnr is None) for row in result.whole] == [("output.letters", False), ("output.text", True)]
    bits = {n: {s.spec.format.bits for s in result[n].sim.quantizers.values() if s.role != "weight"} for n in files}
    assert bits == {"detector": {8}, "recogniser": {16}}
    written = json.loads((tmp_path / "out" / "pipeline.json").read_text())
    assert written["headline"] == result.headline and [n["files"] for n in written["networks"]] == list(files)
    sessions = {n: ort.InferenceSession(tmp_path / "out" / n / f"{n}.onnx") for n in files}
    np.testing.assert_allclose(
        run(sessions, pages[-1])["letters"], result.run(pages[-1])["letters"], rtol=1e-3, atol=1e-2
    )


def test_a_sample_of_calls_is_spread_over_all_of_them() -> None:
    calls = _Calls(50)
    for i in range(5000):
        calls.add(i)
    kept = calls.batches()
    assert len(kept) == 50 and kept == sorted(kept) and calls.count == 5000
    assert 2000 < np.mean(kept) < 3000


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"networks": {}}, ConfigError, "networks: there is none"),
        ({"add": "vae"}, ConfigError, r"networks\['vae.decoder'\]: it is the network 'vae', or inside it"),
        (
            {"add": "unused"},
            ConfigError,
            r"networks\['unused'\]: the program did not call it.*vae.decoder where it calls",
        ),
        ({"preset": {"unet": "w8a8"}}, ConfigError, "preset: there is no network 'unet'.*text, denoiser"),
        ({"options": {"text": {"path": "x"}}}, ConfigError, "'path' is set by the pipeline"),
        ({"calls": 0}, ConfigError, "calls: 0 is below 1"),
        ({"inputs": []}, CalibrationError, "there is no input"),
        ({"drawn": True}, CalibrationError, "two answers for one input.*manual_seed"),
    ],
)
def test_a_pipeline_that_cannot_be_quantized_is_refused(change: dict[str, Any], error: type, message: str) -> None:
    networks, run = diffusion()
    given: dict[str, Any] = {"networks": networks, "run": run, "inputs": [[1, 2], [3, 4]], "progress": False}
    if change.get("add") == "vae":
        vae = Vae()
        given["networks"] = {"vae": vae, "vae.decoder": vae.decoder}
    elif "add" in change:
        given["networks"] = {**networks, "unused": nn.Linear(2, 2)}
    elif "drawn" in change:
        random = np.random.default_rng()
        given["run"] = lambda networks, item: {"image": run(networks, item)["image"] + random.normal()}
    else:
        given |= change
    with pytest.raises(error, match=message):
        bitwright.quantize_pipeline(**given)
