"""Tables, printed and in notebooks, and the progress bar."""

from __future__ import annotations

import gc
import html.parser
import importlib.machinery
import io
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
from bitwright.core.health.report import HealthTable
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.progress import collector_paused, in_notebook, progress
from bitwright.recipes.recipe import Outcome, RecipeReport
from bitwright.tables import Table, Tabular, html_table, html_text, plain, text_table
from bitwright.torch import QuantizationSimModel as TorchSim
from bitwright.torch import check_model
from tests.support.simulations import calibrated


class Shape(html.parser.HTMLParser):
    """Counts rows and the cells of each; refuses tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[int] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert not attrs and tag in ("table", "caption", "thead", "tbody", "tr", "th", "td", "p", "pre")
        self.open.append(tag)
        if tag == "tr":
            self.rows.append(0)
        if tag in ("th", "td"):
            self.rows[-1] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def sims(tmp_path_factory):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval(), torch.randn(4, 8)
    path = tmp_path_factory.mktemp("tables")
    sim = calibrated(TorchSim(model, x), [x])
    files = sim.export(path, "net", x)
    onnx = OnnxSim(files.float_model)
    onnx.compute_encodings([{onnx.graph.inputs[0]: x.numpy()}])
    return sim, onnx


@pytest.mark.parametrize("which", [0, 1], ids=["torch", "onnx"])
def test_a_simulation_and_its_reports_are_tables_in_a_notebook(sims, which):
    sim = sims[which]
    for shown, rows in ((sim, len(sim.quantizers)), (sim.quantizers, len(sim.quantizers)),
                        (sim.coverage(), len(sim.coverage())), (sim.health(), len(sim.health()))):  # fmt: skip
        found = Shape(shown._repr_html_())
        assert len(found.rows) == rows + 1 and len(set(found.rows)) == 1
    assert "&gt;" not in repr(sim) and repr(sim).split("(")[0] in sim._repr_html_()


def test_the_comparison_with_the_runtime_is_a_table(sims):
    report = sims[0].verify()
    assert len(Shape(report._repr_html_()).rows) == len(report.rows) + 1


@pytest.mark.parametrize("which", [0, 1], ids=["torch", "onnx"])
def test_health_prints_as_a_table_and_stays_a_list(sims, which):
    health = sims[which].health()
    assert isinstance(health, list) and isinstance(health, HealthTable)
    lines = str(health).splitlines()
    assert lines[0].split() == ["site", "dtype", "range", "notes"] and "SiteHealth(" not in str(health)
    assert len(lines) == len(health) + 3 and lines[-1] == f"{len(health)} sites, 0 with notes"
    assert health[0].site in lines[2]


def test_the_health_of_a_model_and_a_recipe_are_escaped():
    class Divides(nn.Module):
        def forward(self, x):
            return x / (x - x)

    text = check_model(Divides(), [torch.ones(2, 2)])._repr_html_()
    assert Shape(text) and text.startswith("<pre>") and "Div" in text
    report = RecipeReport((Outcome("<script>", None, None, note="a & b"),), "on <held out>")
    assert Shape(report._repr_html_()).rows == [2, 2], "no column of a metric that no step was measured by"
    assert "<script>" not in report._repr_html_() and "&lt;script&gt;" in report._repr_html_()


def test_every_cell_is_escaped_and_long_tables_say_what_they_leave_out():
    bad = "<img src=x onerror=alert(1)>"
    text = html_table((bad, bad), [(bad, bad)], bad, [bad])
    assert "<img" not in text and Shape(text).rows == [2, 2] and "<img" not in html_text(bad)
    long = html_table(("n",), [(i,) for i in range(1005)])
    assert len(Shape(long).rows) == 1001 and "and 5 more rows" in long


def test_columns_of_a_metric_are_there_where_a_step_was_measured_by_it():
    report = RecipeReport((Outcome("float", 0.9, None), Outcome("fold()", 0.875, -0.025)))
    assert Shape(report._repr_html_()).rows == [4, 4, 4]
    head, _, first, second = str(report).splitlines()
    assert head.split() == ["step", "metric", "change", "note"]
    assert first.split() == ["float", "0.9"] and second.split() == ["fold()", "0.875", "-0.025"]
    assert head.index("metric") + 6 == first.index("0.9") + 3 == second.index("0.875") + 5, "numbers align at the right"


def test_a_terminal_folds_cells_that_do_not_fit():
    from rich.console import Console

    shown = Table(("name", "why"), [("conv1.weight", "word " * 30), ("[red]x[/]", "b")], title="Sites")
    terminal = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)
    terminal.print(shown)
    lines = terminal.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 60 and "".join(lines).count("word") == 30
    assert any("conv1.weight" in line for line in lines) and any("[red]x[/]" in line for line in lines)
    assert str(shown).splitlines()[0] == "Sites" and ("word " * 30).strip() in str(shown)


def test_text_tables_align_and_do_not_cut():
    text = text_table(("name", "how"), [("a" * 60, "x"), ("b", "y")]).splitlines()
    assert text[2] == "a" * 60 + "  x" and text[3] == "b".ljust(48) + "  y"


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_bit_widths_by_position_are_warned_of_when_they_differ(front, sims, tmp_path, recwarn):
    x = torch.randn(4, 8)
    if front == "torch":
        model, make, order = nn.Linear(8, 4), TorchSim, "default_output_bw=16, default_param_bw=4"
    else:
        files = sims[0].export(tmp_path, "net", x)
        model, make, order = files.float_model, OnnxSim, "default_param_bw=16, default_activation_bw=4"
    make(model, x if front == "torch" else {"input": x.numpy()}, "min_max", 8, 8)
    named = {part.split("=")[0]: int(part.split("=")[1]) for part in order.split(", ")}
    make(model, x if front == "torch" else {"input": x.numpy()}, **named)
    assert not [w for w in recwarn if "bit widths" in str(w.message)]
    with pytest.warns(UserWarning, match=f"read as {order}") as caught:
        make(model, x if front == "torch" else {"input": x.numpy()}, "min_max", 16, 4)
    assert [w.filename for w in caught if "bit widths" in str(w.message)] == [__file__]


def test_the_name_of_a_format_serves_and_what_is_no_granularity_or_method_is_refused():
    spec = bitwright.QuantSpec("int4", bitwright.PerChannel())
    assert spec == bitwright.QuantSpec(bitwright.IntFormat(4), bitwright.PerChannel())
    for wrong in ("per_channel", bitwright.PerTensor, 32, None):
        with pytest.raises(bitwright.ConfigError, match=r"QuantSpec.granularity: .* is not a granularity.*PerBlock"):
            bitwright.QuantSpec(granularity=wrong)
    with pytest.raises(bitwright.ConfigError, match=r"'mse' is not a RangeMethod.*RangeMethod\('mse'\)"):
        bitwright.QuantSpec(method="mse")
    with pytest.raises(bitwright.FormatError, match="there is no number format of this name"):
        bitwright.QuantSpec("int")
    assert np.isfinite(bitwright.core.numerics.formats.largest_code(spec.format))


def reports_of(sim) -> list[object]:
    return [sim, sim.quantizers, sim.coverage(), sim.health(), sim.verify(), sim.calibration_log]


@pytest.mark.parametrize("which", [0, 1], ids=["torch", "onnx"])
def test_reports_are_plain_data_too(sims, which):
    sim = sims[which]
    for report in reports_of(sim):
        text = report.to_json()
        assert json.loads(text) == report.to_dict()
        assert "object at 0x" not in text, type(report)
        assert all(isinstance(record, dict) for record in report.records())
        assert report._repr_html_().startswith(("<table>", "<pre>"))
    assert [r["name"] for r in sim.records()] == list(sim.quantizers)
    assert {r["name"] for r in sim.coverage().records()} == {row.name for row in sim.coverage()}
    assert sim.verify().to_dict()["rows"][0]["verdict"] in ("agrees", "within", "fails")


def test_every_method_has_a_report_that_is_plain_data(sims):
    """A class of reports without the shared part would have no JSON."""
    import importlib
    import pkgutil

    import bitwright.compare
    import bitwright.core
    import bitwright.methods
    import bitwright.recipes

    found = []
    for package in (bitwright.methods, bitwright.recipes, bitwright.compare, bitwright.core):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            found += [c for n, c in vars(module).items() if n.endswith("Report") and isinstance(c, type)]
    assert len(set(found)) > 12
    assert [c for c in set(found) if not issubclass(c, Tabular)] == []
    assert [c for c in set(found) if not c._rows] == []


def test_methods_reports_are_plain_data():
    from bitwright.torch import equalize_model, fold_all_batch_norms

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    folds = fold_all_batch_norms(net, dummy_input=x)
    assert folds.to_dict()["folded"][0]["layers"] == [["0", ["1"]]]
    equalized = equalize_model(net, dummy_input=x)
    assert isinstance(equalized.records()[0]["row"], str)  # a group reads as a sentence
    result = bitwright.quantize(net, [x, x], recipe=["fold", "equalize", {"adaround": {"iterations": 5}}])
    for report in (folds, equalized, result.report, result.folds):
        assert json.loads(report.to_json()) == report.to_dict()


def test_numbers_that_json_lacks_are_texts():
    report = RecipeReport((Outcome("fold", float("inf"), float("nan"), sqnr=(1.0, float("-inf"))),))
    (step,) = report.to_dict()["outcomes"]
    assert (step["metric"], step["change"], step["sqnr"]) == ("inf", "nan", [1.0, "-inf"])


def test_deep_data_need_no_deep_stack():
    tree: list = []
    for _ in range(10_000):
        tree = [tree]
    flat = plain(tree)
    while flat:
        (flat,) = flat
    assert flat == []


def test_a_pandas_table_has_a_row_per_site(sims, monkeypatch):
    made = types.SimpleNamespace(DataFrame=lambda records: ("frame", records))
    monkeypatch.setitem(sys.modules, "pandas", made)
    assert sims[0].to_pandas() == ("frame", sims[0].records())


def test_without_pandas_the_error_says_what_to_use(sims, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(bitwright.ConfigError, match="pandas is not installed.*records"):
        sims[0].to_pandas()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "enabled", "delay", "shown"),
    [(True, True, 0.0, True), (True, True, 60.0, False), (True, False, 0.0, False), (False, True, 0.0, False)],
    ids=["long", "short", "switched off", "no terminal"],
)
def test_when_a_bar_is_shown(monkeypatch, terminal, enabled, delay, shown):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress([1, 2, 3], "calibrating", enabled, delay)) == [1, 2, 3]
    assert ("calibrating" in stream.getvalue()) == shown


def test_the_bar_ends_when_the_work_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(KeyboardInterrupt):
        for item in progress(range(5), "calibrating", delay=0.0):
            if item == 3:
                raise KeyboardInterrupt
    assert stream.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in stream.getvalue()  # the cursor is back


def test_the_collector_is_paused_and_comes_back() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError), collector_paused():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


class Kernel:
    """What ``ipykernel.zmqshell`` is to ``in_notebook``."""

    class ZMQInteractiveShell:
        running = True

        @classmethod
        def initialized(cls) -> bool:
            return cls.running


@pytest.mark.parametrize(("running", "widgets"), [(True, True), (False, True), (True, False)])
def test_a_notebook_that_has_widgets_shows_a_bar(monkeypatch: pytest.MonkeyPatch, running: bool, widgets: bool) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", Kernel)  # type: ignore[arg-type]
    monkeypatch.setattr(Kernel.ZMQInteractiveShell, "running", running)
    spec = importlib.machinery.ModuleSpec("ipywidgets", None)
    widget = types.ModuleType("ipywidgets")
    widget.__spec__ = spec
    monkeypatch.setitem(sys.modules, "ipywidgets", widget if widgets else None)  # type: ignore[arg-type]
    assert in_notebook() == (running and widgets)
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # no terminal
    assert list(progress([1, 2], "calibrating", delay=0.0)) == [1, 2]
    # rich draws with the widgets of a real kernel; here it finds neither kernel nor terminal, and ends a line
    assert bool(sys.stderr.getvalue()) == (running and widgets)  # type: ignore[attr-defined]


def test_all_tables_have_one_style():
    """Text tables are aligned, and tables of rich are made, in one module."""
    root = Path(bitwright.__file__).parent
    files = [path for path in root.rglob("*.py") if path.name != "tables.py"]
    assert [path for path in files if "rich.table" in path.read_text()] == []
