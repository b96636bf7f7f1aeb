"""What the default recipe saves changes nothing: float models on few samples, comparisons on the first batches."""

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
from bitwright.core.simulation.calibration import fewer_samples
from bitwright.recipes import attempt


class Uneven(nn.Module):
    """Channels of unlike ranges between two layers: equalization gains."""

    def __init__(self, rows: int | None = None) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 5)
        self.rows, self.seen = rows, []
        with torch.no_grad():
            spread = torch.logspace(-1.5, 1.5, 8)
            self.first.weight *= spread[:, None, None, None]
            self.first.bias *= spread
            self.second.weight /= spread[:, None, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        y = torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3))
        if self.rows is not None:
            y = y.reshape(self.rows, 8)
        return self.last(y)


class Loader:
    """Batches in another order in every pass."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches, self.passes = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        self.passes += 1
        turn = self.passes % len(self.batches)
        return iter(self.batches[turn:] + self.batches[:turn])


def batches(rows: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 3, 12, 12, generator=generator) for _ in range(10)]


def quantized(data, rows=None):
    torch.manual_seed(0)
    return bitwright.quantize(Uneven(rows).eval(), data, progress=False)


def encodings(result):
    return {name: site.encoding for name, site in result.sim.quantizers.items() if site.encoding is not None}


def test_ranges_are_those_of_all_calibration_data_however_trials_were_calibrated(monkeypatch):
    few = quantized(batches())
    monkeypatch.setattr(attempt, "_TRIAL", 10**9)
    all_of_them = quantized(batches())
    assert any(o.step.startswith("equalize") and o.kept and o.changed for o in few.report)
    assert [(o.step, o.kept) for o in few.report] == [(o.step, o.kept) for o in all_of_them.report]
    one, other = encodings(few), encodings(all_of_them)
    assert one.keys() == other.keys()
    for name, encoding in one.items():
        assert np.array_equal(encoding.scale, other[name].scale), name
    assert few.sim.calibration_log.batches == 10  # with the two that judged


def test_data_that_come_in_another_order_are_calibrated_on_from_the_beginning():
    in_turn = quantized(Loader(batches()))
    assert in_turn.sim.calibration_log.batches == 10
    assert in_turn.quality.worst.sqnr > 30


def test_float_models_are_opened_on_few_samples_where_they_take_them():
    model, data = Uneven().eval(), batches(rows=64)
    bitwright.quantize(model, data, progress=False)
    assert min(model.seen) == attempt._EXAMPLE  # the copy that is quantized counts for itself
    whole = quantized(batches(rows=16), rows=16)  # a size that is written down in the model
    assert whole.quality.worst.sqnr > 20


@pytest.mark.parametrize("batch", [torch.zeros(3, 2), (torch.zeros(9, 2), torch.zeros(4, 2)), {"x": [torch.zeros(9)]}])
def test_what_cannot_be_divided_is_taken_whole(batch):
    def refuse(part):
        raise AssertionError("it is not run")

    assert fewer_samples(batch, 5, refuse) is batch


def test_a_batch_is_whole_where_the_model_takes_no_fewer():
    batch = torch.zeros(9, 2)

    def fixed(part):
        return part.reshape(9, 2)

    assert fewer_samples(batch, 5, fixed) is batch
    assert len(fewer_samples(batch, 5, len)) == 5


RUNS: list[int] = []


class Bounded(Uneven):
    """With activations that cut, whose inputs equalization measures; counts runs of its copies as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RUNS.append(len(x))
        y = nn.functional.relu6(self.second(nn.functional.relu6(self.first(x)))).mean((2, 3))
        return self.last(y if self.rows is None else y.reshape(self.rows, 8))


@pytest.mark.parametrize("rows, size", [(None, 8), (20, 20)])
def test_equalization_holds_values_of_few_samples_at_once_where_the_model_takes_so_few(rows, size):
    torch.manual_seed(0)
    model = Bounded(rows).eval()
    RUNS.clear()
    bitwright.quantize(model, batches(rows=20), recipe=["fold", {"equalize": {"keep_bounds": True}}], progress=False)
    measured = RUNS[1:] if rows is None else RUNS
    assert measured.count(size) >= (20 if rows is None else 10)
    assert rows is None or set(RUNS) <= {5, 20}  # it is asked once whether it takes five


def test_a_state_is_rated_once_and_the_result_has_the_rating_of_its_state(monkeypatch):
    """Of every rating, what is in float and the state of the simulation that decides it."""
    seen = []
    rated = attempt.Attempt.rated

    def noted(self, sim, without=None):
        off = tuple(site.name for site in sim.quantizers.values() if without is not None and without(site))
        scales = tuple((site.enabled, str(site.encoding)) for site in sim.quantizers.values())
        weights = tuple(float(p.detach().double().sum()) for p in sim.model.parameters())
        seen.append((id(sim), off, scales, weights))
        return rated(self, sim, without)

    monkeypatch.setattr(attempt.Attempt, "rated", noted)
    result = quantized(batches())
    assert len(set(seen)) == len(seen) >= 5
    last = next(o for o in reversed(result.report) if o.kept and o.sqnr is not None)
    assert result.quality.sqnr == pytest.approx(last.sqnr[1])
