"""The report in a real browser: it opens without a network, is clicked through, and is used by keyboard and on a phone."""

from __future__ import annotations

import pytest

from bitwright.report import write_report
from tests.support.browser import screenshot, visit
from tests.support.reports import analysis, parts

CLICK_THROUGH = """
  const seen = {};
  seen.nav = $$('#nav a').map(a => a.textContent);
  seen.tiles = $('#tiles').textContent;
  seen.rows = $$('#table tbody tr').length;
  seen.first = $('#table tbody td').textContent;
  seen.panel = $('#panel h3').textContent;
  // a cause and its remedy are with the layer
  $('#filter').value = 'few codes'; $('#filter').dispatchEvent(new Event('input'));
  seen.filtered = $$('#table tbody tr').length;
  $('#table tbody tr').click();
  seen.cause = $('#panel .cause').textContent;
  seen.chips = $$('#panel .chips button').map(b => b.textContent);
  $('#panel .chips button').click();
  seen.bars = $('#panel svg .bars').getAttribute('d').length;
  seen.clipped = $('#panel svg').textContent;
  seen.ranges = $$('#panel svg .span').length;
  $('#filter').value = ''; $('#filter').dispatchEvent(new Event('input'));
  // sorting by name, up and down
  $('[data-key=name]').click();
  seen.up = $('#table tbody td').textContent;
  $('[data-key=name]').click();
  seen.down = $('#table tbody td').textContent;
  seen.aria = $('th[aria-sort=descending]').textContent;
  // the graph by keyboard
  const key = name => $('#canvas').dispatchEvent(new KeyboardEvent('keydown', {key: name, bubbles: true, cancelable: true}));
  $('#fold').click();
  key('ArrowDown'); key('ArrowUp'); key('ArrowUp');
  seen.folded = $('#said').textContent;
  key('Enter');
  seen.unfolded = $('#said').textContent;
  key('Backspace');
  seen.again = $('#said').textContent;
  // a click into the canvas chooses what is drawn there
  $('#unfold').click(); $('#search').value = 'stage0.block0.conv3'; $('#search').dispatchEvent(new Event('change'));
  seen.searched = $('#panel h3').textContent;
  $('#mode').value = '1'; $('#mode').dispatchEvent(new Event('change'));
  seen.mode = $('#said').textContent;
  const box = $('#canvas').getBoundingClientRect();
  for (let y = box.top + 2; y < box.bottom && !seen.clicked; y += 6)
    for (let x = box.left + 2; x < box.right && !seen.clicked; x += 20) {
      $('#said').textContent = '';
      const at = {clientX: x, clientY: y, pointerId: 1, bubbles: true};
      $('#canvas').setPointerCapture = () => {};
      for (const kind of ['pointerdown', 'pointerup']) $('#canvas').dispatchEvent(new PointerEvent(kind, at));
      seen.clicked = $('#said').textContent;
    }
  // what is drawn is coloured
  const colours = new Set();
  for (let tries = 0; tries < 50 && colours.size < 7; tries++) {
    await pause(50);
    const pixels = $('#canvas').getContext('2d').getImageData(0, 0, $('#canvas').width, $('#canvas').height).data;
    for (let i = 0; i < pixels.length; i += 4 * 13) colours.add(pixels[i] + ',' + pixels[i + 1] + ',' + pixels[i + 2]);
  }
  seen.colours = colours.size;
  // parts that are made when they are opened
  seen.before = $$('#coverage td').length;
  $('#coverage details').open = true;
  await pause(50);
  seen.after = $$('#coverage td').length;
  seen.text = $('main').textContent;
  return seen;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    return write_report(analysis(12), folder / "report.html", **parts())


def test_click_through(page):
    seen = visit(page, CLICK_THROUGH)
    assert seen["errors"] == [] and seen["violations"] == []
    assert [r for r in seen["requests"] if not r.startswith("file:")] == []
    assert seen["nav"] == [
        "Network", "Layers", "Coverage", "Recipe", "Remedies tried", "Groups of sites", "Pareto points",
        "Verification against the runtime", "Health", "Files",
    ]  # fmt: skip
    for words in ("0.9 → 0.87", "95 % interval -0.05 to -0.01, n = 400", "24.5 dB", "4.0 kB → 1.0 kB", "24 of 24"):
        assert words in seen["tiles"], words
    worst = analysis(12)["layers"][0]["name"]
    assert (seen["rows"], seen["first"], seen["panel"]) == (12, worst, worst)
    assert seen["filtered"] == 1 and "few codes used at stage0.block0.conv2" in seen["cause"]
    assert "Remedy: widen" in seen["cause"] and seen["chips"][:2] == ["weight", "output[0]"]
    assert seen["bars"] > 100 and "clipped 1 %" in seen["clipped"] and "codes used 40 %" in seen["clipped"]
    assert seen["ranges"] == 1
    assert (seen["up"], seen["down"]) == ("stage0.block0.conv0", "stage0.block1.conv3")
    assert "▼" in seen["aria"]
    assert seen["folded"].startswith("module ") and seen["again"].startswith("module ")
    assert seen["unfolded"].startswith("stage0.block0.conv0, Conv")
    assert seen["searched"] == "stage0.block0.conv3"
    assert "Error made here 33.0 dB" in seen["mode"]
    assert seen["clicked"].startswith("stage0.") and seen["colours"] > 6
    assert seen["before"] < seen["after"]
    for words in ("a logarithm reads it", "gptq", "3 zero channels", "net.onnx", "a note of the report", "a reason"):
        assert words in seen["text"], words


def test_phone_and_dark(page, tmp_path):
    """Nothing is wider than a phone; colours follow the system and the switch; every control has a name."""
    seen = visit(
        page,
        """
        const back = () => getComputedStyle(document.body).backgroundColor;
        const first = back(); $('#theme').click(); const second = back(); $('#theme').click();
        const named = e => e.textContent.trim() || e.labels?.length || e.getAttribute('aria-label');
        const unnamed = $$('button, input, select, canvas').filter(e => !named(e)).length;
        const reach = $$('#table tbody tr, #canvas').every(one => one.tabIndex === 0);
        return {width: document.documentElement.scrollWidth, inner: innerWidth, first, second, third: back(), unnamed, reach};
        """,
        size=(500, 900),
    )
    assert seen["errors"] == [] and seen["width"] <= seen["inner"]
    assert seen["first"] == seen["third"] != seen["second"]
    assert seen["unnamed"] == 0 and seen["reach"]
    assert screenshot(page, tmp_path / "page.png").stat().st_size > 20_000


def test_a_thousand_operators(tmp_path):
    """Everything unfolded, one frame of the graph stays in milliseconds; the page is drawn in columns."""
    path = write_report(analysis(1000), tmp_path / "large.html")
    seen = visit(
        path,
        """
        $('#unfold').click();
        await pause(50);
        const rows = $$('#table tbody tr').length;
        $('#more').click();
        const more = $$('#table tbody tr').length;
        $('#quantized').click();
        return {rows, more, said: $('#count').textContent};
        """,
    )
    assert seen["errors"] == [] and (seen["rows"], seen["more"]) == (200, 600)
    assert seen["said"] == "1000 of 1000 layers"


WHERE_EDGES_RUN = """
  const pen = CanvasRenderingContext2D.prototype, boxes = [], points = [];
  let at = [0, 0];
  const along = to => { points.push(to); at = to; };
  for (const name of ['roundRect', 'rect', 'moveTo', 'lineTo', 'bezierCurveTo']) {
    const before = pen[name];
    pen[name] = function (...n) {
      if (name === 'roundRect' || name === 'rect') boxes.push(n.slice(0, 4));
      else if (name === 'moveTo') at = n;
      else if (name === 'lineTo') for (let i = 1, from = at; i <= 20; i++) along(from.map((v, k) => v + (n[k] - v) * i / 20));
      else for (let i = 1, from = at; i <= 40; i++) {
        const t = i / 40, u = 1 - t;
        along([0, 1].map(k => u ** 3 * from[k] + 3 * u * u * t * n[k] + 3 * u * t * t * n[2 + k] + t ** 3 * n[4 + k]));
      }
      return before.apply(this, n);
    };
  }
  $('#unfold').click();
  for (let tries = 0; tries < 100 && boxes.length < 60; tries++) await pause(50);
  const crossed = points.filter(([x, y]) => boxes.some(([left, top, wide, high]) =>
    x > left + 1 && x < left + wide - 1 && y > top + 1 && y < top + high - 1)).length;
  return {boxes: boxes.length, points: points.length, crossed,
          reading: $('#reading').textContent, panel: $('#panel h3').textContent};
"""


def test_no_edge_passes_a_box_and_a_legend_says_what_the_numbers_mean(tmp_path):
    found = analysis(60)
    names = [layer["name"] for layer in found["layers"]]
    for i, layer in enumerate(found["layers"]):  # short and long skips, into other columns too
        layer["inputs"] = [names[j] for j in {i - 1, i - 2 - i % 3, i - 9 - i % 20} if j >= 0]
    page = write_report(found, tmp_path / "edges.html")
    frames = (
        "<head><script>window.requestAnimationFrame = draw => setTimeout(draw, 0)</script>"  # headless may draw none
    )
    page.write_text(page.read_text().replace("<head>", frames))
    seen = visit(page, WHERE_EDGES_RUN)
    assert seen["errors"] == [] and seen["boxes"] >= 60 and seen["points"] > 3000
    assert seen["crossed"] == 0
    for words in ("dB", "40 dB: the noise is 1 %", "made", "arrived", "after", "lost here", "cost at the outputs"):
        assert words in seen["reading"], words
    assert seen["panel"] == names[0]


def test_names_are_text_and_never_markup(tmp_path):
    wicked = "</script><img src=http://example.invalid/x onerror=document.title='out'>"
    found = analysis(3)
    found["layers"][0]["name"] = wicked
    found["model"]["name"] = wicked
    found["notes"] = [wicked]
    path = write_report(
        found, tmp_path / "wicked.html", coverage={"rows": [{"name": wicked, "status": "float", "how": wicked}]}
    )
    seen = visit(
        path,
        "return {images: $$('img').length, title: document.title, text: document.body.textContent.includes('<img')}",
    )
    assert (seen["images"], seen["text"], seen["errors"], seen["violations"]) == (0, True, [], [])
    assert seen["title"] == wicked
