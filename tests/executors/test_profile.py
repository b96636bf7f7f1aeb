"""Profiles: each names its sources; a wrong key, value or operator is named with close matches."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitwright.errors import ConfigError
from bitwright.executors.profile import find_profile, profile_names
from bitwright.export.targets import TARGETS

GOOD = 'about = "a"\nreads = "onnx"\ntarget = "ort_cpu"\nsources = ["s"]\nproof = "none"\n'


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_names_its_sources_and_a_target(name: str) -> None:
    found = find_profile(name)
    assert found.name == name and found.sources and found.proof and found.kernels and found.target in TARGETS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "acumulator = 16", "'acumulator' is not a key of a profile (did you mean 'accumulator'"),
        (GOOD + "accumulator = 20", "accumulator is 20. Remedy: use one of 16, 24, 32"),
        (GOOD + '[kernels]\nConvv = "float32"', "there is no executor for 'Convv' (did you mean 'Conv'"),
        (GOOD + '[kernels]\nConv = "float16"', "kernels.Conv is 'float16' (did you mean 'float32'"),
        (GOOD.replace('proof = "none"\n', ""), "it has no 'proof'. Remedy: say it: a profile without its source proves nothing"),
        ("about = ", "mine.toml"),
    ],
)  # fmt: skip
def test_wrong_profiles_say_what_to_change(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        find_profile(file)
    assert message in str(caught.value)


def test_a_profile_of_ones_own_and_an_unknown_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD + '[kernels]\nConv = "q31_single"')
    assert find_profile(str(file)).kernels == {"Conv": "q31_single"} and find_profile(file).name == "mine"
    with pytest.raises(ConfigError, match=r"'ort_x46' is not a profile \(did you mean 'ort_x64'"):
        find_profile("ort_x46")
