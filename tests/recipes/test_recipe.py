"""Recipes on a fake model: order, bookkeeping, taking back, interruption; judging by outputs; ranges chosen anew."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import QuantSpec, find_preset
from bitwright.core.numerics.statistics import Histogram, MinMax
from bitwright.core.simulation.output_quality import quality
from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods.activations import activation_ranges, keep_histograms
from bitwright.recipes import attempt
from bitwright.recipes.attempt import Attempt, Job
from bitwright.recipes.default_recipe import EFFORTS, as_recipe, default_recipe
from bitwright.recipes.judge import Judge, Rating
from bitwright.recipes.recipe import KINDS, Step, load_recipe, parse_recipe, run_recipe
from bitwright.torch import QuantizationSimModel, quantize


class Fake:
    """A model whose metric is the sum of what its steps are worth."""

    def __init__(self, **worth):
        self.worth, self.state, self.log, self.simulated = worth, 10.0, [], False
        self.judge, self.changed, self.details, self.expected = None, True, None, 0.0

    def check(self, step):
        for option in step.options:
            if option != "seed":
                raise ConfigError(step.name, f"no option {option!r}", "use seed")

    def apply(self, step):
        self.log.append(step.name)
        value = self.worth.get(step.name, 0.0)
        if value is KeyboardInterrupt:
            self.state = -1000.0  # half done
            raise KeyboardInterrupt
        self.state += value
        return f"{step.name} done"

    def simulate(self):
        self.simulated = True
        self.log.append("simulate")

    def measure(self):
        return self.state

    def keep(self):
        state = self.state
        return lambda: setattr(self, "state", state)


def test_steps_are_names_or_names_with_options():
    assert parse_recipe(["fold", {"adaround": {"iterations": 5}}, Step("bias_correction")]) == (
        Step("fold"),
        Step("adaround", {"iterations": 5}),
        Step("bias_correction"),
    )


@pytest.mark.parametrize(
    "recipe, message",
    [
        ("fold", r"a recipe is a list of steps, not 'fold'. Remedy: write \['fold'\]"),
        ("fold, gptq", r"a recipe is a list of steps, not 'fold, gptq'. Remedy: write \['fold', 'gptq'\]"),
        (["folt"], r"there is no step 'folt'.*fold"),
        ([{"fold": {}, "gptq": {}}], "is not one step"),
        ([{"gptq": 3}], "the options of 'gptq' are 3"),
        (["fold", "fold"], r"step 2 \(fold\) decides again what step 1 \(fold\) decided"),
        (["gptq", "adaround"], r"step 2 \(adaround\) decides again what step 1 \(gptq\) decided"),
        (["adaround", "fold"], r"step 2 \(fold\) comes too late: it changes the float model.*put fold before adaround"),
        (["smooth", "rotate"], r"step 2 \(rotate\) comes too late: smooth relies on it"),
        (["equalize", "fold"], r"step 2 \(fold\) comes too late: equalize relies on it"),
        (["adaround", "seq_mse"], "seq_mse before adaround"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_any_work(recipe, message):
    with pytest.raises(ConfigError, match=message):
        parse_recipe(recipe)


def halve(model, *, by=2.0):
    with torch.no_grad():
        model[0].weight.div_(by)
    return f"divided by {by}"


def freeze(sim, data, names=("0.weight",)):
    for name in names:
        sim.quantizers[name].frozen = True
    return f"{len(data)} batches"


def test_functions_are_steps_on_the_float_model_or_the_simulation():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
    weight = net[0].weight.detach().clone()
    recipe = [{halve: {"by": 4.0}}, halve, lambda sim: None, Step("freeze", {"names": ["0.weight"]}, run=freeze)]
    result = quantize(
        net, [torch.randn(2, 4) for _ in range(3)], recipe=recipe, held_out=[torch.randn(2, 4)], progress=False
    )
    assert [(o.step, o.note, o.on_float) for o in result.report] == [
        ("halve(by=4.0)", "divided by 4.0", True),
        ("halve()", "divided by 2.0", True),
        ("<lambda>()", "", False),
        ("freeze(names=['0.weight'])", "3 batches", False),
    ]
    assert result.sim.quantizers["0.weight"].frozen
    torch.testing.assert_close(result.sim.model[0].weight.detach(), weight / 8)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ([lambda x: x], "step <lambda>: its first parameter is 'x'. Remedy: name it sim"),
        ([lambda: 0], "step <lambda>: it takes nothing"),
        (
            [lambda sim, other: 0],
            "its parameter 'other' has no value. Remedy: give it a default, an option .*calibrate",
        ),
        ([freeze, halve], r"step 2 \(halve\) comes too late: it changes the float model, and freeze has worked"),
        ([freeze, "fold"], r"step 2 \(fold\) comes too late.*put fold before freeze"),
    ],
)
def test_functions_that_cannot_be_steps_are_refused(recipe, message):
    with pytest.raises(ConfigError, match=message):
        parse_recipe(recipe)


def test_every_row_names_known_steps():
    for kind in KINDS.values():
        assert {*kind.after, *kind.instead_of} <= KINDS.keys() and kind.does


def test_the_simulation_is_made_between_the_phases_and_each_step_has_its_line():
    runner = Fake(fold=1.0, adaround=3.0)
    report = run_recipe(parse_recipe(["fold", "adaround"]), runner, float_metric=20.0)
    assert runner.log == ["fold", "simulate", "adaround"]
    assert [(o.step, o.metric, o.change) for o in report] == [
        ("float", 20.0, None),
        ("no step", 10.0, None),
        ("fold()", 11.0, 1.0),
        ("adaround()", 14.0, 3.0),
    ]
    assert "adaround()      14      +3  adaround done" in str(report)


def test_without_a_metric_nothing_is_measured():
    runner = Fake()
    runner.measure = None
    assert [o.metric for o in run_recipe(parse_recipe(["fold"]), runner)] == [None]
    assert runner.simulated


@pytest.mark.parametrize("on_harm, end, kept", [("report", 13.0, True), ("undo", 15.0, False)])
def test_a_step_that_hurts_is_reported_and_taken_back_if_asked(on_harm, end, kept, caplog):
    runner = Fake(fold=2.0, equalize=-2.0, adaround=3.0)
    steps = parse_recipe(["fold", "equalize", "adaround"])
    report = run_recipe(steps, runner, float_metric=20.0, on_harm=on_harm)
    assert runner.state == end
    assert report[3].hurts and report[3].kept is kept
    assert report[4].change == 3.0  # against what is in force
    assert "equalize() made the metric worse by 2;" in caplog.text
    assert ("undone: equalize done" in str(report)) is not kept


def test_lower_may_be_better():
    report = run_recipe(parse_recipe(["fold"]), Fake(fold=-1.0), float_metric=3.0, lower_is_better=True)
    assert report[2].change == 1.0 and not report[2].hurts


@pytest.mark.parametrize("step", ["fold", "adaround", "bias_correction"])
def test_an_interrupted_step_ends_the_recipe(step):
    runner = Fake(**{step: KeyboardInterrupt})
    with pytest.raises(KeyboardInterrupt) as caught:
        run_recipe(parse_recipe(["fold", "adaround", "bias_correction"]), runner, float_metric=20.0)
    assert caught.value.__notes__ == [f"during the step {step}() of the recipe"]
    assert runner.log[-1] == step  # nothing is calibrated or measured after it


def test_a_metric_that_is_nan_stops_with_the_step():
    with pytest.raises(CalibrationError, match=r"fold\(\): the metric is NaN"):
        run_recipe(parse_recipe(["fold"]), Fake(fold=math.nan), float_metric=20.0)


def test_options_are_checked_before_any_work():
    runner = Fake()
    with pytest.raises(ConfigError, match="no option 'sead'"):
        run_recipe(parse_recipe(["fold", {"gptq": {"sead": 1}}]), runner)
    assert not runner.log
    with pytest.raises(ConfigError, match="'revert' is neither 'report' nor 'undo'"):
        run_recipe((), runner, on_harm="revert")


def test_a_recipe_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("recipe:\n  - fold\n  - adaround: {iterations: 10}\n")
    assert load_recipe(path) == (Step("fold"), Step("adaround", {"iterations": 10}))
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"recipes": []}))
    with pytest.raises(ConfigError, match="unknown key 'recipes'.*under the key recipe"):
        load_recipe(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="it holds a list, not keys and values. Remedy: write recipe as key"):
        load_recipe(path)


def add(target, amount=1):
    target["value"] += amount
    return f"{amount} more"


class Simulated(dict):
    """A simulation that is a dictionary."""

    @property
    def _metric_target(self):
        return self

    def remember(self, *, parameters):
        saved = dict(self)
        return lambda: self.update(saved)


class Dictionaries(Attempt):
    """An attempt whose models and simulations are dictionaries; simulating halves the value."""

    def __init__(self):
        given = SimpleNamespace(copy=lambda first: {"value": 8}, copied=dict)
        options = {"lower_is_better": False, "on_harm": "undo", "providers": None, "non_finite": "error"}
        options |= {"allow_unreached": True, "allow_float": True, "progress": False}
        metric = lambda sim: sim["value"]  # noqa: E731
        super().__init__(Job(given, ["fold"], "default", None, None, "ort_cpu", metric, **options), "w8a8")

    def _simulated(self, work):
        return Simulated(value=work["value"] / 2)

    def _function(self, name):
        return add, {}, {"amount": int}


def test_the_runner_measures_trials_until_there_is_a_simulation():
    runner = Dictionaries()
    steps = parse_recipe([{"fold": {"amount": 2}}, {"adaround": {"amount": -1}}])
    report = run_recipe(steps, runner, float_metric=8.0, on_harm="undo")
    assert [o.metric for o in report] == [8.0, 4.0, 5.0, 4.0]
    assert runner.model == {"value": 10} and runner.sim == {"value": 5.0}


def test_a_float_step_that_hurts_gives_the_model_back():
    runner = Dictionaries()
    run_recipe(parse_recipe([{"fold": {"amount": -2}}]), runner, float_metric=8.0, on_harm="undo")
    assert runner.model == {"value": 8} and runner.sim == {"value": 4.0}


def test_the_runner_knows_the_options_of_its_steps():
    with pytest.raises(ConfigError, match="fold: there is no option 'amont'.*amount"):
        run_recipe(parse_recipe([{"fold": {"amont": -2}}]), Dictionaries())


def test_an_optional_step_that_cannot_be_done_is_left_out_and_said():
    class Refusing(Fake):
        def check(self, step):
            if step.name == "smooth":
                raise ConfigError("smooth", "there is no library for it", "install one")

        def apply(self, step):
            if step.name == "gptq":
                self.state = -5.0  # half done
                raise CalibrationError("gptq", "layer 3 is not finite", "look at the data")
            return super().apply(step)

    steps = [Step("fold"), Step("smooth", optional=True), Step("gptq", optional=True), Step("bias_correction")]
    fake = Refusing(bias_correction=1.0)
    report = run_recipe(steps, fake, float_metric=12.0)
    assert [o.kept for o in report] == [True, True, True, False, False, True]
    assert "left out: smooth: there is no library for it" in str(report)
    assert "left out: gptq: layer 3 is not finite" in str(report)
    assert fake.state == report.metric == 11.0
    for step in ("smooth", "gptq"):
        with pytest.raises((ConfigError, CalibrationError), match=f"^{step}"):
            run_recipe([Step(step)], Refusing())


@pytest.mark.parametrize(
    ("preset", "own_rules", "steps"),
    [
        ("w8a8", False, ["fold", "equalize", "smooth", "layer_inputs", "activation_ranges", "widen", "gptq"]),
        ("w8a8", True, ["fold", "equalize", "smooth", "gptq"]),
        ("w8a16", False, ["fold", "gptq"]),
        (
            "w8a8_per_tensor",
            False,
            ["fold", "equalize", "smooth", "layer_inputs", "activation_ranges", "widen", "bias_correction"],
        ),
        ("w4a16", False, ["fold", "seq_mse", "gptq"]),
        ("fp8", False, ["fold"]),
    ],
)
def test_the_default_follows_the_preset(preset, own_rules, steps):
    assert [step.name for step in as_recipe(None, preset, own_rules=own_rules)] == steps
    parse_recipe(as_recipe(None, preset))  # an order that works


def test_a_range_method_of_the_users_is_kept():
    steps = [step.name for step in as_recipe(None, "w8a8", own_scheme=True)]
    assert "activation_ranges" not in steps and "widen" in steps


def rating_of(decibel, units=1, spread=0.0):
    """A rating whose samples differ from each other by ``spread`` times their mean, by turns up and down."""
    noise = 10 ** (-decibel / 10) * (1 + spread * (-1.0) ** np.arange(units))
    return Rating((replace(quality("output", [noise], [np.ones(units)]), sqnr=decibel),))


class Judged(Fake):
    """A fake whose outputs have the signal-to-noise ratio that its state says."""

    def __init__(self, **worth):
        super().__init__(**worth)
        self.judge, self.asked = Judge([0], lambda batch: [np.zeros(1)]), 0

    def rate(self, *, float_weights=False):
        self.asked += 1
        return rating_of(self.state)


def test_a_judge_keeps_what_the_outputs_gain_by(caplog):
    runner = Judged(smooth=-1.0, widen=0.05, seq_mse=2.0, gptq=-0.5)
    steps = parse_recipe(["fold", "smooth", "layer_inputs", "widen", "seq_mse", "gptq"])
    report = run_recipe(steps, runner)
    assert [o.kept for o in report] == [True, False, True, False, True, False]
    assert runner.state == 12.0
    assert [o.sqnr for o in report] == [
        None, (10.0, 9.0), None, (10.0, 10.05), (10.0, 12.0), (12.0, 11.5)
    ]  # fmt: skip
    assert "undone: gptq done; output 12.00 -> 11.50 dB" in str(report)
    assert str(report).endswith("outputs compared with float on 1 batch that neither calibration nor methods had seen")


@pytest.mark.parametrize(
    ("step", "expected", "asked"), [("widen", 0.4, 2), ("widen", 0.6, 0), ("gptq", 0.6, 2), ("equalize", 0.6, 2)]
)
def test_a_step_fitted_to_no_sample_is_not_measured_where_it_expects_much(step, expected, asked):
    runner = Judged(**{step: 1.0})
    runner.expected = expected
    (outcome,) = run_recipe(parse_recipe([step]), runner)
    assert outcome.kept and runner.state == 11.0 and runner.asked == asked
    assert ("0.6 dB less noise by its estimate" in outcome.note) == (asked == 0)


@pytest.mark.parametrize(
    ("step", "spread", "kept"),
    [("gptq", 0.0, True), ("gptq", 0.2, True), ("gptq", 0.9, False), ("widen", 0.9, True), ("smooth", 0.9, False)],
)
def test_a_gain_of_a_fitted_step_must_be_more_than_chance(step, spread, kept):
    """1 dB on eight samples: half of them gain, half lose, the more the larger the spread."""
    runner = Judged(**{step: 1.0})
    runner.rate = lambda *, float_weights=False: rating_of(runner.state, 8, spread if runner.state > 10 else 0.0)
    (outcome,) = run_recipe(parse_recipe([step]), runner)
    assert outcome.kept == kept and runner.state == (11.0 if kept else 10.0)
    assert outcome.gain.decibel == pytest.approx(1.0)
    half = 10 / math.log(10) * 2.365 * spread / math.sqrt(7)  # Student's t of seven degrees of freedom
    assert outcome.gain.high - outcome.gain.low == pytest.approx(2 * half)
    text = f"output 10.00 -> 11.00 dB ({1 - half:+.2f} to {1 + half:+.2f})"
    assert outcome.judged == text
    assert ("a gain that the samples do not tell from none" in outcome.note) == (not kept)


def test_the_report_says_what_the_brackets_are():
    runner = Judged(gptq=1.0)
    runner.rate = lambda *, float_weights=False: rating_of(runner.state, 8)
    assert str(run_recipe(parse_recipe(["gptq"]), runner)).endswith("; in brackets the 95 % interval of the gain")


def test_a_step_that_did_nothing_is_not_put_to_the_judge():
    runner = Judged(smooth=0.0)
    runner.changed = False
    report = run_recipe(parse_recipe(["smooth"]), runner)
    assert not runner.asked and report[0].sqnr is None and report.judged == ""


def test_outputs_without_numbers_judge_nothing():
    runner = Judged(gptq=-5.0)
    runner.judge = Judge([0], lambda batch: [np.zeros(3, np.int64)])
    report = run_recipe(parse_recipe(["gptq"]), runner)
    assert report[0].kept and not runner.asked


@pytest.mark.parametrize(
    ("recipe", "asked"),
    [
        (["widen", "gptq"], [True, True, False, False]),
        (["activation_ranges", "widen", "seq_mse", "gptq"], [True] * 3 + [False] * 3),
        (["widen", "bias_correction"], [False] * 3),
        (["widen"], [False] * 2),
    ],
)
def test_activations_are_judged_with_float_weights_where_these_are_rounded_later(recipe, asked):
    runner, seen = Fake(), []
    runner.judge = Judge([0], lambda batch: [np.float32([1.0])])

    def measured(*, float_weights=False):
        seen.append(float_weights)
        return rating_of(float(len(seen)))

    runner.rate = measured
    report = run_recipe(parse_recipe(recipe), runner)
    assert seen == asked
    assert all(("with float weights" in o.note) == (o.step in ("widen()", "activation_ranges()") and asked[0])
               for o in report)  # fmt: skip


@pytest.mark.parametrize(("bits", "again"), [(4, 1), (8, 0)])
def test_activations_are_calibrated_again_after_coarse_roundings_alone(bits, again, monkeypatch):
    spec = QuantSpec(IntFormat(bits), symmetry="symmetric")
    sites = {"w": SimpleNamespace(role="weight", spec=spec), "x": SimpleNamespace(role="input", spec=None)}
    calls = []
    monkeypatch.setattr(attempt, "apply_reconstruction", lambda sim, data, method, *, progress: method)
    runner = SimpleNamespace(job=SimpleNamespace(chosen=(), progress=False), calibrate=calls.append)
    assert Attempt.choose_weights(runner, SimpleNamespace(quantizers=sites), method="gptq") == "gptq"
    assert len(calls) == again


@pytest.mark.parametrize("preset", ["w8a8", "w4a8", "w4", "w8a8_per_tensor", "w8a16"])
@pytest.mark.parametrize("effort", EFFORTS)
def test_every_effort_is_a_recipe_and_every_choice_in_it_is_judged(preset, effort):
    steps = default_recipe(find_preset(preset), effort=effort)
    assert parse_recipe(steps) == steps
    assert all(KINDS[step.name].gain is not None for step in steps if step.name not in ("fold", "layer_inputs"))


def test_more_effort_reads_more():
    samples = [
        default_recipe(find_preset("w8a8"), effort=effort)[-1].options.get("num_samples", math.inf)
        for effort in ("quick", "default", "thorough")
    ]
    assert samples == sorted(set(samples))
    assert as_recipe(None) == as_recipe(None, effort="default") == default_recipe(find_preset("w8a8"))


@pytest.mark.parametrize(
    ("recipe", "effort", "message"),
    [
        (None, "quik", "there is no effort 'quik'.*quick.*use one of quick, default, thorough"),
        (["fold"], "quik", "there is no effort 'quik'"),
        (["fold"], "quick", "a recipe says what is done, and so does 'quick'. Remedy: leave one of them out"),
    ],
)
def test_an_effort_is_known_and_stands_beside_no_recipe(recipe, effort, message):
    with pytest.raises(ConfigError, match=message):
        as_recipe(recipe, effort=effort)


@pytest.mark.parametrize(
    ("worth", "kept", "numbers"),
    [
        ((-1.0, 3.0), [True, True], [(10.0, 9.0), (10.0, 12.0)]),  # alone it would have been undone
        ((1.0, -0.5), [True, False], [(10.0, 11.0), (11.0, 10.5)]),
        ((-3.0, 1.0), [False, False, True], [(10.0, 7.0), (10.0, 8.0), (10.0, 11.0)]),
        ((-3.0, -1.0), [False, False, False], [(10.0, 7.0), (10.0, 6.0), (10.0, 9.0)]),
    ],
)
def test_ranges_of_weights_may_lose_alone_if_they_gain_with_the_rounding_after_them(worth, kept, numbers):
    runner = Judged(seq_mse=worth[0], gptq=worth[1])
    report = run_recipe(parse_recipe(["seq_mse", "gptq"]), runner)
    assert [o.step for o in report] == ["seq_mse()", "gptq()", "gptq()"][: len(kept)]
    assert [o.kept for o in report] == kept and [o.sqnr for o in report] == numbers
    assert runner.state == max(o.sqnr[1] if o.kept else 10.0 for o in report if o.sqnr)


@pytest.mark.parametrize(("worth", "kept"), [(1.0, True), (-1.0, False)])
def test_ranges_of_weights_that_lose_are_undone_where_the_rounding_cannot_be_done(worth, kept):
    runner = Judged(seq_mse=worth)
    whole = runner.apply

    def apply(step):
        if step.name == "gptq":
            raise CalibrationError("gptq", "no room", "buy some")
        return whole(step)

    runner.apply = apply
    report = run_recipe((Step("seq_mse"), Step("gptq", optional=True)), runner)
    assert [o.kept for o in report] == [kept, False] and "no room" in report[1].note
    assert runner.state == (11.0 if kept else 10.0)


def twice(batch):
    return [np.float32([batch, -batch])]


@pytest.mark.parametrize(
    ("count", "kept", "held"),
    [
        (5, 4, [4]),
        (9, 7, [7, 8]),
        (12, 9, [9, 10, 11]),
        (20, 16, [16, 17, 18, 19]),
        (200, 160, [161 + 5 * i // 2 for i in range(16)]),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["of known length", "of unknown length"])
def test_the_last_fifth_is_held_out_and_batches_spread_over_it_judge(count, kept, held, known):
    data = range(count) if known else Unknown(count)
    judge, rest = Judge.of(data, twice)
    assert judge.batches == held and not judge.seen
    for _ in range(2):  # every method goes through them anew
        assert list(rest) == list(range(kept)) and len(rest) == kept


def test_of_few_batches_of_many_samples_a_fifth_is_enough():
    judge, rest = Judge.of([np.zeros((8, 3))] * 12, twice)
    assert len(judge.batches) == 2 and len(rest) == 10 and "(the last fifth of the data)" in judge.where


class Unknown:
    """Batches of which no one knows how many they are."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


@pytest.mark.parametrize("count", [1, 4])
def test_of_few_batches_none_is_held_out_and_that_is_said(count):
    judge, rest = Judge.of([3.0] * count, twice)
    assert judge.seen and judge.batches == [3.0] * count and list(rest) == [3.0] * count
    many = {1: "1 batch", 4: "4 batches"}[count]
    assert judge.where == f"on {many} that the methods see too: give five or more"


@pytest.mark.parametrize(("rows", "judging"), [(1, 4), (2, 2), (3, 2), (8, 1)])
def test_batches_that_methods_see_are_rated_on_four_samples_at_least(rows, judging):
    batches = [np.full((rows, 3), i) for i in range(20)]
    judge = Judge.of_seen(batches[0], batches, twice)
    assert judge.seen and [int(batch[0, 0]) for batch in judge.batches] == [*range(judging)]


@pytest.mark.parametrize(
    ("rows", "calibrates", "judges"),
    [
        ([5], [4], 1),
        ([8], [6], 2),  # a fifth would be one, without an interval
        ([17], [13], 4),
        ([20, 20], [20, 12], 8),
        ([20, 20, 20, 5], [20, 20, 20], 5),  # the last batch holds fewer than a fifth
    ],
)
def test_samples_of_few_batches_are_held_out(rows, calibrates, judges):
    batches = [np.full((n, 3), i, np.float32) for i, n in enumerate(rows)]
    judge, rest = Judge.of(batches, lambda batch: [2 * batch])
    assert [len(batch) for batch in rest] == calibrates and [len(batch) for batch in judge.batches] == [judges]
    assert not judge.seen and "(the last samples of the data)" in judge.where


def of_whole_batches(batch):
    if len(batch) != 20:
        raise ValueError("20 rows, please")
    return [batch]


@pytest.mark.parametrize(
    "outputs", [of_whole_batches, lambda batch: [batch - batch.mean(0)], lambda batch: [batch.sum(0)]]
)
def test_samples_are_held_out_only_where_they_are_computed_apart(outputs):
    batches = [np.random.default_rng(i).standard_normal((20, 3)) for i in range(2)]
    judge, rest = Judge.of(batches, outputs)
    assert judge.seen and rest is batches


def test_the_float_model_runs_once_and_only_when_asked():
    calls = []
    judge, _ = Judge.of([1.0, 2.0], lambda batch: calls.append(batch) or twice(batch))
    assert not calls
    assert judge.rate(twice).sqnr == judge.rate(twice).sqnr == math.inf
    assert calls == [1.0, 2.0]


def test_outputs_count_alike_whatever_their_size():
    judge = Judge([0], lambda batch: [np.float32([1000.0] * 50), np.float32([1.0])])
    noisy = judge.rate(lambda batch: [np.float32([990.0] * 50), np.float32([0.9])]).sqnr
    assert noisy == pytest.approx((40 + 20) / 2, abs=1e-4)


def test_an_output_is_not_traded_for_a_noisier_one():
    judge = Judge([0], lambda batch: [np.ones(9), np.ones(9)])
    before = judge.rate(lambda batch: [np.full(9, 1.001), np.full(9, 1.1)]).sqnr  # 60 and 20 dB
    after = judge.rate(lambda batch: [np.full(9, 1.002), np.full(9, 1.09)]).sqnr  # 54 and 21 dB
    assert after < before


def test_one_number_a_sample_is_a_sample_each():
    judge = Judge([np.zeros((6, 3))], lambda batch: [np.arange(1.0, 7.0)])
    (part,) = judge.rate(lambda batch: [np.arange(1.0, 7.0) + 0.1]).parts
    assert part.units == 6 and part.low < part.sqnr < part.high
    judge = Judge([np.zeros((2, 3))], lambda batch: [np.arange(1.0, 7.0)])  # six numbers of two samples
    assert judge.rate(lambda batch: [np.arange(1.0, 7.0) + 0.1]).parts[0].units == 1


def test_a_gain_is_that_of_the_mean_over_parts_whose_samples_are_the_same():
    """What one part loses at a sample another gains there, so that their mean does not vary."""
    judge = Judge([np.zeros((8, 2))], lambda batch: [np.ones((8, 50)), np.ones((8, 50))], names=lambda: ["a", "b"])
    up = np.sqrt(1 + 0.5 * (-1.0) ** np.arange(8))[:, None]
    down = np.sqrt(1 - 0.5 * (-1.0) ** np.arange(8))[:, None]
    before = judge.rate(lambda batch: [np.full((8, 50), 1.1), np.full((8, 50), 1.1)])
    mixed = judge.rate(lambda batch: [1 + 0.05 * up * np.ones((8, 50)), 1 + 0.05 * down * np.ones((8, 50))])
    alike = judge.rate(lambda batch: [1 + 0.05 * up * np.ones((8, 50)), 1 + 0.05 * up * np.ones((8, 50))])
    for rating, half in ((mixed, 0.0), (alike, 10 / math.log(10) * 2.365 * 0.5 / math.sqrt(7))):
        found = rating.gain_over(before)
        assert found.decibel == pytest.approx(20 * math.log10(2)) and found.half_width == pytest.approx(half, abs=1e-9)
    assert before.gain_over(before).decibel == 0 and not before.gain_over(before).is_doubtful


def test_an_output_without_noise_counts_as_80_db():
    judge = Judge([0], lambda batch: [np.ones(9), np.ones(9)])
    assert judge.rate(lambda batch: [np.ones(9), np.full(9, 1.1)]).sqnr == pytest.approx((80 + 20) / 2)
    assert judge.rate(lambda batch: [np.ones(9), np.ones(9)]).sqnr == math.inf


def test_what_is_not_finite_in_float_is_left_out_and_new_nan_is_the_worst():
    judge = Judge([0], lambda batch: [np.float32([1.0, np.inf])])
    assert judge.rate(lambda batch: [np.float32([1.0, 5.0])]).sqnr == math.inf
    assert judge.rate(lambda batch: [np.float32([np.nan, np.inf])]).sqnr == -math.inf


def test_integers_and_lengths_that_depend_on_values_are_left_out():
    judge = Judge([0], lambda batch: [np.arange(3), np.float32([1, 2]), np.float32([4.0])])
    assert judge.possible
    assert judge.rate(lambda batch: [np.arange(3)[::-1], np.float32([1]), np.float32([4.0])]).sqnr == math.inf


def test_few_are_held_out_where_few_are_wanted():
    judge, rest = Judge.of(list(range(20)), lambda batch: [np.zeros(1)], 1)
    assert judge.batches == [18] and list(rest) == list(range(16))


def boxes_and_scores(noise_of_boxes=0.0, noise_of_scores=0.0):
    boxes, scores = np.full((1, 4, 50), 300.0), np.full((1, 3, 50), 0.5)
    return [np.concatenate([boxes + noise_of_boxes, scores + noise_of_scores], 1)]


def test_probabilities_are_not_hidden_behind_pixels_in_one_tensor():
    judge = Judge([0, 1], lambda batch: boxes_and_scores(), names=lambda: ["detections"])
    rating = judge.rate(lambda batch: boxes_and_scores(1.0, 0.5))
    assert [part.name for part in rating.parts] == ["detections[:, 0:4]", "detections[:, 4:7]"]
    assert rating.worst.name == "detections[:, 4:7]" and rating.worst.sqnr == pytest.approx(0, abs=1e-9)
    assert rating.sqnr == pytest.approx(20 * math.log10(300) / 2)


def test_a_step_that_kills_the_probabilities_loses():
    judge = Judge([0], lambda batch: boxes_and_scores())
    assert (
        judge.rate(lambda batch: boxes_and_scores(1.0, 0.01)).sqnr
        > judge.rate(lambda batch: boxes_and_scores(0.9, 0.5)).sqnr
    )


def test_the_worst_of_several_outputs_has_its_name():
    judge = Judge([0], lambda batch: [np.ones(9), np.ones(9)], names=lambda: ["boxes", "scores"])
    rating = judge.rate(lambda batch: [np.full(9, 1.001), np.full(9, 1.1)])
    assert str(rating.worst) == "scores 20.0 dB (one sample: no interval)"


def simulated(keep: bool, but=()):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    data = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    sim = QuantizationSimModel(model, data[0], preset="w8a8")
    if keep:
        keep_histograms(sim, but)
    calls = []

    def calibrate(sim):
        calls.append(1)
        sim.compute_encodings(data, progress=False)

    calibrate(sim)
    return sim, calibrate, calls


def encodings(sim):
    sim.model(torch.zeros(1, 3, 8, 8))  # biases follow from the others when they are next used
    return {name: site.encoding for name, site in sim.quantizers.items()}


@pytest.mark.parametrize("method", ["mse", "sqnr", "percentile", "entropy"])
def test_kept_histograms_tell_what_another_calibration_tells(method):
    once, calibrate, calls = simulated(keep=True)
    plain, again, twice = simulated(keep=False)
    assert encodings(once) == encodings(plain)
    reports = [activation_ranges(once, calibrate, method=method), activation_ranges(plain, again, method=method)]
    assert reports[0] == reports[1] and reports[0].changed
    assert (len(calls), len(twice)) == (1, 2)
    assert encodings(once) == encodings(plain)


def test_sites_that_will_be_in_float_keep_their_bounds_alone():
    plain, _, _ = simulated(keep=False)
    (first, *_) = [s.quantizer.name for s in plain.quantizers.values() if s.role == "input"]
    sim, _, _ = simulated(keep=True, but=(first,))
    kinds = {
        s.quantizer.name: type(s.quantizer.statistics) for s in sim.quantizers.values() if s.role in ("input", "output")
    }
    assert kinds.pop(first) is MinMax and set(kinds.values()) == {Histogram}
