"""The doctor of PyTorch models, and what calibration does about NaN and Inf."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.health.report import HealthReport
from bitwright.errors import CalibrationError, ConfigError, ModelError
from bitwright.torch import QuantizationSimModel, check_model
from tests.support.cost import calls_left, steps
from tests.support.simulations import calibrated

NAN, INF = math.nan, math.inf


class Net(nn.Module):
    """A few layers, and a forward that the test writes."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.out, self.norm = nn.Linear(8, 8), nn.Linear(8, 4), nn.BatchNorm1d(8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def batches(n: int = 2) -> list[Tensor]:
    return [torch.randn(4, 8) for _ in range(n)]


def look(forward: Callable[[Any, Tensor], Any], data: Any = None, change: Any = None) -> HealthReport:
    net = Net(forward)
    if change is not None:
        change(net)
    return check_model(net, batches() if data is None else data, progress=False)


# ---- who is named


def _division(net: Net, x: Tensor) -> Tensor:
    y = net.fc(x)
    y = y / torch.relu(y - 100).sum(-1, keepdim=True)  # the fault
    return net.out(torch.relu(y))


def test_everything_about_the_first_fault_is_told() -> None:
    report = look(_division)
    assert [c.op for c in report.culprits] == ["div"] and not report.ok and report.exit_code == 1
    culprit = report.culprit
    assert culprit is not None
    assert culprit.op_type == "Div" and culprit.cause == "division by zero"
    assert culprit.problem == "the divisor sum.output[0] holds 4 zeros"
    assert culprit.source is not None and culprit.source.startswith("test_nan_doctor.py:")
    assert culprit.source.endswith("y = y / torch.relu(y - 100).sum(-1, keepdim=True)  # the fault")
    assert (culprit.batch, culprit.sample, culprit.batches) == (0, 0, 2)
    assert [t.name for t in culprit.inputs] == ["fc.output[0]", "sum.output[0]"]
    assert culprit.outputs[0].bad == 32 and culprit.reached == ("output",)
    assert culprit.spread == 2 and culprit.spread_names == ("relu_1", "out")
    assert report.batches == 2 and report.calls > 10


def _loop(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = torch.exp(3 * layer(x).abs() + 3)
    return net.out(x)


def _in_place(net: Net, x: Tensor) -> Tensor:
    y = net.fc(x)
    y.sub_(5).sqrt_()
    return net.out(y)


def _read_too_early(net: Net, x: Tensor) -> Tensor:
    rows = torch.empty(4, 8)
    rows[:3] = x[:3]
    return net.fc(rows)


def _dead_row(net: Net, x: Tensor) -> Tensor:
    scores = net.fc(x) @ net.fc(x).T
    return torch.softmax(scores.masked_fill(torch.ones(4, 4).bool().triu(), -INF), -1)


def _hand_norm(net: Net, x: Tensor) -> Tensor:
    y = (1000 * x).half()
    return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-5)).float()


def _view(net: Net, x: Tensor) -> Tensor:
    y = net.fc(x)
    y[1].div_(0)
    return net.out(y)


FAULTS = {
    "loop": (_loop, "exp_1", "exponential overflow"),
    "in-place": (_in_place, "sqrt", "root of a negative number"),
    "uninitialised": (_read_too_early, "empty", "uninitialised memory"),
    "dead-row": (_dead_row, "softmax", "every element of a row is masked"),
    "hidden-half-overflow": (_hand_norm, "mul_1", "half-precision overflow"),
    "through-a-view": (_view, "div", "division by zero"),
    "log": (lambda net, x: net.out(torch.log(net.fc(x))), "log", "logarithm of a non-positive number"),
    "log-method-in-place": (lambda net, x: net.fc(x).log_(), "log", "logarithm of a non-positive number"),
    "power": (lambda net, x: net.fc(x) ** 0.5, "pow", "power out of domain"),
    "cast": (lambda net, x: (1e6 * net.fc(x)).half(), "half", "half-precision overflow"),
    "matmul": (lambda net, x: (1e30 * x) @ (1e30 * x).T, "matmul", "overflow"),
    "argmax": (lambda net, x: (net.fc(x) / 0 * 0).argmax(-1), "div", "division by zero"),
    "variance-of-one": (lambda net, x: net.fc(x)[:, :1].var(-1), "var", "reduction over nothing"),
    "mean-of-nothing": (lambda net, x: net.fc(x)[:, :0].mean(-1), "mean", "reduction over nothing"),
    "mask-times": (lambda net, x: net.fc(x) + net.mask.sum() * 0, "mul", "zero times infinity"),
    "attention": (
        lambda net, x: net.attention(x[None], x[None], x[None], key_padding_mask=torch.ones(1, 4).bool())[0],
        "attention.attention.softmax", "every element of a row is masked",
    ),
}  # fmt: skip


@pytest.mark.parametrize("forward, op, cause", FAULTS.values(), ids=FAULTS)
def test_the_operator_and_the_cause_are_named(forward: Any, op: str, cause: str) -> None:
    report = look(forward)
    assert report.culprit is not None, report.text()
    assert (report.culprit.op, report.culprit.cause) == (op, cause), report.text()
    assert report.culprit.source is not None and "test_nan_doctor.py" in report.culprit.source


def test_names_are_those_of_the_simulation() -> None:
    """So that what the doctor says can be written into a rule."""
    sim = QuantizationSimModel(Net(_loop), batches()[0])
    assert {op.name for op in sim.graph.ops} >= {"exp_1", "layers.0", "out"}


def test_half_precision_tells_the_magnitude_that_was_needed() -> None:
    report = look(lambda net, x: net.fc(x) @ net.fc(x).T, [torch.full((4, 8), 300).half()], lambda net: net.half())
    culprit = report.culprit
    assert culprit is not None and culprit.cause == "half-precision overflow"
    reached = float(culprit.problem.split()[3].rstrip(","))
    assert reached > 65504 and culprit.problem.endswith("float16 ends at 65504")


def test_bad_data_is_named_with_batch_and_sample() -> None:
    data = batches(3)
    data[1][2, 5] = NAN
    report = look(lambda net, x: net.out(net.fc(x)), data)
    culprit = report.culprit
    assert culprit is not None and (culprit.op, culprit.op_type, culprit.cause) == ("x", "input", "bad input data")
    assert (culprit.batch, culprit.sample, culprit.batches) == (1, 2, 1)
    assert [t.name for t in report.bad_inputs] == ["x, batch 1"] and report.bad_inputs[0].first_bad == (2, 5)


def _spoil(name: str, index: tuple[int, ...], value: float) -> Callable[[nn.Module], None]:
    def change(net: nn.Module) -> None:
        tensor = dict([*net.named_parameters(), *net.named_buffers()])[name]
        with torch.no_grad():
            tensor[index] = value

    return change


@pytest.mark.parametrize(
    "name, index, value, problem",
    [
        ("fc.weight", (2, 3), INF, "it holds 0 NaN and 1 Inf, the first at [2, 3]"),
        ("rnn.weight_hh_l0", (10, 2), NAN, "the first at [10, 2], in the rows of gate f"),
        ("rnn.bias_ih_l0", (25,), NAN, "the first at [25], in the rows of gate o"),
        ("norm.running_mean", (0,), NAN, "the first at [0]"),
    ],
)
def test_bad_parameters_are_named_before_anything_runs(name: str, index: Any, value: float, problem: str) -> None:
    report = look(lambda net, x: net.rnn(x[None])[0], change=_spoil(name, index, value))
    assert report.batches == 0 and [t.name for t in report.bad_params] == [name]
    assert report.culprit is not None and report.culprit.cause == "bad parameter"
    assert report.culprit.problem.endswith(problem)
    assert report.culprit.where == name.rpartition(".")[0]


def test_batch_norm_with_negative_variance() -> None:
    report = look(lambda net, x: net.norm(net.fc(x)), change=_spoil("norm.running_var", (3,), -1.0))
    assert report.culprit is not None
    assert (report.culprit.op, report.culprit.cause) == ("norm", "negative variance")
    assert "norm.running_var comes down to -1" in report.culprit.problem
    assert [t.name for t in report.culprit.params][-1] == "norm.running_var"


def test_stock_modules_alone_have_no_line_to_show() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.BatchNorm1d(8))
    _spoil("2.running_var", (0,), -2.0)(net)
    culprit = check_model(net, batches()).culprit
    assert culprit is not None and culprit.op == "2" and culprit.source is None


def test_a_recurrent_layer_tells_the_step() -> None:
    net = nn.RNN(8, 8, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        net.weight_hh_l0.copy_(1e6 * torch.eye(8))
        net.weight_ih_l0.copy_(torch.eye(8))
    report = check_model(net, [torch.ones(2, 12, 8)])
    culprit = report.culprit
    assert culprit is not None and "overflow" in culprit.cause
    assert culprit.spread >= 0 and culprit.op


# ---- who is not


def _filled(net: Net, x: Tensor) -> Tensor:
    rows = torch.empty(4, 8)
    for i in range(4):
        rows[i] = x[i]
    return net.fc(rows)


def _causal(net: Net, x: Tensor) -> Tensor:
    q = net.fc(x)
    return F.scaled_dot_product_attention(q[None], q[None], q[None], is_causal=True)


def _dead_rows_replaced(net: Net, x: Tensor) -> Tensor:
    y = net.attention(x[None], x[None], x[None], key_padding_mask=torch.ones(1, 4).bool())[0]
    return torch.where(torch.isnan(y), torch.zeros_like(y), y)


HARMLESS = {
    "mask-of-infinities": lambda net, x: torch.softmax(net.fc(x) @ net.fc(x).T + net.mask, -1),
    "mask-by-fill": lambda net, x: torch.softmax((x @ x.T).masked_fill(net.mask < 0, -INF), -1),
    "mask-by-where": lambda net, x: torch.softmax(torch.where(net.mask < 0, -INF, x @ x.T), -1),
    "mask-by-logarithm": lambda net, x: torch.softmax(x @ x.T + torch.log((net.mask == 0).float()), -1),
    "smallest-number-in-half": lambda net, x: torch.softmax(
        (x @ x.T).half() + torch.full((4, 4), -65504.0).triu(1).half() - 1, -1
    ).float(),
    "causal-attention": _causal,
    "buffer-filled-row-by-row": _filled,
    "buffer-overwritten": lambda net, x: torch.empty(4, 8).copy_(x) + torch.empty(8).zero_(),
    "out-argument": lambda net, x: torch.add(x, 1, out=torch.empty(4, 8)),
    "log-masked-out": lambda net, x: torch.where(x > 0, torch.log(x), torch.zeros_like(x)),
    "nan-to-num": lambda net, x: torch.nan_to_num(x / 0),
    "sliced-off": lambda net, x: torch.log(x.abs() * torch.tensor([1.0] * 7 + [0.0]))[:, :7],
    "sigmoid-by-hand": lambda net, x: 1 / (1 + torch.exp(-200 * x)),
    "running-maximum": lambda net, x: torch.maximum(torch.full((4, 8), -INF), x),
    "clamped": lambda net, x: torch.exp(200 * x).clamp(max=1e4),
    "dead-rows-replaced": _dead_rows_replaced,
    "mask-is-returned": lambda net, x: (net.fc(x), (x @ x.T).masked_fill(net.mask < 0, -INF)),
    "large-but-finite": lambda net, x: torch.full((4, 8), 3e38) + x,
}  # fmt: skip


@pytest.mark.parametrize("forward", HARMLESS.values(), ids=HARMLESS)
def test_look_alikes_are_not_accused(forward: Any) -> None:
    report = look(forward)
    assert report.ok and report.exit_code == 0, report.text()


def test_padding_of_nan_that_is_masked_out_is_noted() -> None:
    data = torch.randn(4, 8)
    data[3] = NAN
    report = look(lambda net, x: net.out(torch.where(x.isnan(), torch.zeros_like(x), x)), [data])
    assert report.ok and len(report.bad_inputs) == 1


# ---- how it is used


def test_the_model_is_left_as_it_was() -> None:
    net = Net(_division).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    check_model(net, batches())
    assert net.training and not net._forward_hooks and "forward" not in vars(net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_callback_may_call_other_methods() -> None:
    net = Net(lambda net, x: x)
    report = check_model(net, lambda model: model.fc(torch.full((1, 8), 1e38)).exp())
    assert report.culprit is not None and report.culprit.op_type in ("Gemm", "Exp")
    assert check_model(net, lambda model: [model(x) for x in batches()]).ok

    def silent(model: nn.Module) -> None:
        model(torch.zeros(4, 8))

    culprit = check_model(Net(lambda net, x: x / x), silent).culprit
    assert culprit is not None and culprit.op == "div" and culprit.reached == ("output",)


def test_a_model_that_fails_after_a_fault_is_explained_by_it() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.fc(x) / 0
        if not y.isfinite().all():
            raise FloatingPointError("diverged")
        return y

    report = look(forward)
    assert report.culprit is not None and report.culprit.op == "div"
    assert report.notes[0] == "the model fails on batch 0: FloatingPointError: diverged"
    with pytest.raises(ModelError, match="the model fails on the example input"):
        look(lambda net, x: net.fc(x[:, :3]))


def test_data_that_is_no_list_of_batches() -> None:
    with pytest.raises(CalibrationError, match="data is a Tensor, not a list of batches"):
        check_model(Net(_division), torch.zeros(4, 8))
    with pytest.raises(CalibrationError, match="the data held no batch"):
        check_model(Net(_division), [])
    empty = torch.zeros(0, 8)
    for data in ([torch.ones(4, 8), empty], lambda model: [model(torch.ones(4, 8)), model(empty)]):
        with pytest.raises(CalibrationError, match="it holds no sample: input 0 is 0x8. Remedy: leave empty batches"):
            check_model(Net(_division), data)


def test_ctrl_c_leaves_the_report_so_far() -> None:
    def data() -> Any:
        yield batches()[0]
        raise KeyboardInterrupt

    report = check_model(Net(_division), data())
    assert report.batches == 1 and not report.ok and "interrupted after 1 batches" in report.notes


def test_a_loop_of_many_steps_is_followed_in_linear_time() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        for _ in range(450):
            x = torch.where(x > 0, x / 0 * 0, x) if x.isnan().any() else torch.nan_to_num(x / 0, 1, 1, 1)
        return x

    with calls_left(300):
        report = look(forward, batches(1))
    assert report.ok and report.calls > 900 and len(report.notes) < 20


def test_a_simulated_model_can_be_checked() -> None:
    sim = calibrated(QuantizationSimModel(Net(lambda net, x: net.out(torch.relu(net.fc(x)))), batches()[0]), batches())
    before = sim.model(torch.ones(1, 8))
    assert check_model(sim.model, batches()).ok
    assert torch.equal(sim.model(torch.ones(1, 8)), before)


# ---- calibration


def _plain(net: Net, x: Tensor) -> Tensor:
    return net.out(torch.relu(net.fc(x)))


def _spoilt() -> list[Tensor]:
    data = batches(3)
    data[1][2, 5] = NAN
    return data


def _simulation(forward: Any = _plain, **options: Any) -> QuantizationSimModel:
    torch.manual_seed(1)
    return QuantizationSimModel(Net(forward), torch.randn(4, 8), **options)


def _encodings(sim: QuantizationSimModel) -> dict[str, Any]:
    return {name: site.encoding for name, site in sim.quantizers.items()}


def test_error_is_the_default_and_names_the_input() -> None:
    sim = _simulation()
    with pytest.raises(CalibrationError, match=r"batch 1, x: the input is not finite of sample 2: it holds 1 NaN and"):
        sim.compute_encodings(_spoilt())
    assert not sim.calibrated


def test_error_names_the_operator_and_the_line() -> None:
    sim = _simulation(lambda net, x: net.out(net.fc(x) / (x.sum() - x.sum())))
    with pytest.raises(CalibrationError) as caught:
        sim.compute_encodings(batches())
    message = str(caught.value)
    assert message.startswith(
        "batch 0, div: Div made values that are not finite of sample 0: the divisor sub.output[0] holds 1"
    )
    assert "test_nan_doctor.py:" in message and "add a small epsilon to the divisor" in message
    assert "non_finite='skip'" in message


@pytest.mark.parametrize("scheme", ["min_max", "tf_enhanced"])
@pytest.mark.parametrize("how", ["batches", "callback"])
def test_skip_equals_calibration_without_the_batch(scheme: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    data = _spoilt()
    sim, clean = _simulation(quant_scheme=scheme), _simulation(quant_scheme=scheme)
    given: Any = data if how == "batches" else lambda model: [model(x) for x in data]
    with caplog.at_level(logging.WARNING, "bitwright"):
        sim.compute_encodings(given, non_finite="skip")
    clean.compute_encodings([data[0], data[2]])
    assert _encodings(sim) == _encodings(clean)
    assert sim.calibration_log is not None and sim.calibration_log.skipped == [1]
    assert "1 of 3 batches left out" in caplog.text and "batch 1, first at fc.input[0] (1 NaN)" in caplog.text


def test_clamp_takes_what_is_finite() -> None:
    data = _spoilt()
    sim = calibrated(_simulation(), data, non_finite="clamp")
    assert sim.calibration_log is not None and sim.calibration_log.clamped == [1]
    finite = torch.cat([x.flatten() for x in data]).nan_to_num()
    step = float(sim.quantizers["fc.input[0]"].encoding.scale)
    assert float(sim.quantizers["fc.input[0]"].encoding.max) == pytest.approx(float(finite.max()), abs=step)
    assert all(np.isfinite(e.scale).all() and (e.scale > 0).all() for e in _encodings(sim).values() if e is not None)


@pytest.mark.parametrize("policy", ["skip", "clamp"])
def test_the_order_of_batches_does_not_matter(policy: Any) -> None:
    data = _spoilt()
    found = []
    for order in ([0, 1, 2], [1, 0, 2], [2, 0, 1]):
        sim = calibrated(_simulation(), [data[i] for i in order], non_finite=policy)
        found.append(_encodings(sim))
    assert found[0] == found[1] == found[2]


def test_harmless_values_do_not_stop_calibration() -> None:
    sim = calibrated(_simulation(lambda net, x: net.out(torch.where(x > 0, net.fc(x) + torch.log(x), x))), batches())
    assert sim.calibration_log is not None and sim.calibration_log.clamped == [0, 1]
    assert torch.isfinite(sim.model(batches()[0])).all()


def test_a_bad_weight_is_refused_before_calibration() -> None:
    def never(model: Any) -> None:
        raise AssertionError("nothing may run")

    sim = _simulation()
    _spoil("fc.weight", (2, 3), NAN)(sim.model)
    with pytest.raises(CalibrationError, match=r"fc\.weight: the parameter holds .*the first nan at index \[2, 3\]"):
        sim.compute_encodings(never)


def test_policies_have_names() -> None:
    with pytest.raises(ConfigError, match=r"'ignore' is not a policy for NaN and Inf"):
        _simulation().compute_encodings(batches(), non_finite="ignore")  # type: ignore[arg-type]


class _Chain(nn.Module):
    """Blocks of two calls each; the first makes NaN, which all others carry on."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.log(-x.abs())
        for layer in self.layers:
            x = torch.relu(layer(x)) + 1
        return x


def test_the_cost_is_linear_in_the_model() -> None:
    def cost(blocks: int) -> int:
        net = _Chain(blocks)
        return steps(lambda: check_model(net, [torch.ones(1, 2)]))

    small, large = cost(30), cost(120)
    assert large < 4.6 * small
    report = check_model(_Chain(40), [torch.ones(1, 2)])
    assert report.culprit is not None and report.culprit.op == "log" and report.culprit.spread == 120


class Repeated(nn.Module):
    """One layer on two lines, one after the other; what the second one reads overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x).abs() + 1
        return self.c(y * 3e38)


def test_a_callback_names_layers_that_are_used_several_times_as_batches_do() -> None:
    torch.manual_seed(0)
    model, x = Repeated(), torch.randn(2, 4) / 9
    with torch.no_grad():
        model.c.weight.fill_(2.0)
        model.c.bias.fill_(-3.0)
    for report in (check_model(model, [x]), check_model(model, lambda m: m(x))):
        assert report.culprit is not None and report.culprit.op == "mul" and report.calls == 5
        assert report.culprit.spread_names == ("c_1",)  # the second use, not the first


def test_a_model_that_fails_in_a_callback_raises_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        check_model(Repeated(), lambda m: m(torch.randn(2, 3)))
