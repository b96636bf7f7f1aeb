"""Frames of the network view of a report while it is panned and zoomed, in a headless Chromium."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path

from bitwright.report import write_report
from tests.support.browser import chromium
from tests.support.reports import analysis

HELP = """\
Draw the network of a report with all modules unfolded, moved by the pointer (all in view, then at a size where names are read)
and zoomed by the wheel, 100 frames each, in a headless Chromium that draws without a graphics card.

A row has the time of the page's own drawing per frame (until the pixels are there), and the time between two frames that the
browser showed. 16.7 ms are 60 frames a second.
"""

COLUMNS = [
    "operators", "way", "drawn per frame, median ms", "95 %", "worst", "between frames, median ms", "95 % ",
]  # fmt: skip

# The page draws in requestAnimationFrame: the callback is timed from outside, with one pixel read so that drawing is done.
MEASURE = """
(async () => {
  const $ = selector => document.querySelector(selector), pause = time => new Promise(done => setTimeout(done, time));
  while (!document.documentElement.dataset.ready) await pause(20);
  $('#unfold').click();
  const canvas = $('#canvas'), box = canvas.getBoundingClientRect(), drawn = [];
  canvas.setPointerCapture = () => {};
  const inner = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = run => inner(now => {
    const start = performance.now();
    run(now);
    canvas.getContext('2d').getImageData(0, 0, 1, 1);
    drawn.push(performance.now() - start);
  });
  const send = (kind, x, y) => canvas.dispatchEvent(
    new PointerEvent(kind, {clientX: box.left + x, clientY: box.top + y, pointerId: 1, bubbles: true}));
  const middle = [box.width / 2, box.height / 2];
  const ways = {
    'all in view, moved': i => send('pointermove', middle[0] + 60 * Math.sin(i / 8), middle[1] + 60 * Math.cos(i / 8)),
    'zoomed': i => canvas.dispatchEvent(new WheelEvent('wheel', {deltaY: i < 50 ? -40 : 40, clientX: box.left + middle[0],
      clientY: box.top + middle[1], bubbles: true, cancelable: true})),
    'names read, moved': i => send('pointermove', middle[0] + 200 * Math.sin(i / 16), middle[1] + 200 * Math.cos(i / 16)),
  };
  const found = {};
  for (const [name, move] of Object.entries(ways)) {
    if (name.startsWith('names')) for (let i = 0; i < 20; i++) canvas.dispatchEvent(
      new KeyboardEvent('keydown', {key: '+', bubbles: true, cancelable: true}));
    if (name !== 'zoomed') send('pointerdown', ...middle);
    await new Promise(inner);
    drawn.length = 0;
    const between = [];
    let last = performance.now();
    for (let i = 0; i < 100; i++) {
      move(i);
      await new Promise(inner);
      const now = performance.now();
      between.push(now - last);
      last = now;
    }
    if (name !== 'zoomed') send('pointerup', ...middle);
    found[name] = {drawn: [...drawn], between};
  }
  return JSON.stringify(found);
})()
"""


class Browser:
    """A headless Chromium that is spoken to through a pipe (its DevTools protocol).

    Args:
        folder: for its profile.
    """

    def __init__(self, folder: Path) -> None:
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        command = [
            chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
            "--window-size=1280,900",
        ]  # fmt: skip
        line = f'exec "$@" 3<&{read} 4>&{write}'
        self._process = subprocess.Popen(
            ["sh", "-c", line, "sh", *command], pass_fds=(read, write), stderr=subprocess.DEVNULL
        )
        os.close(read)
        os.close(write)
        self._count, self._held = 0, b""

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The answer to a command; what else the browser says is passed over."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        os.write(self._out, json.dumps({**message, **({"sessionId": session} if session else {})}).encode() + b"\0")
        while True:
            while b"\0" not in self._held:
                chunk = os.read(self._in, 1 << 16)
                if not chunk:
                    raise RuntimeError("the browser ended")
                self._held += chunk
            text, _, self._held = self._held.partition(b"\0")
            found: dict[str, Any] = json.loads(text)
            if found.get("id") == self._count:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return dict(found["result"])

    def evaluate(self, page: Path, script: str) -> Any:
        """What a script returns in a page, as JSON."""
        target = self.call("Target.createTarget", url=page.as_uri())["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        time.sleep(1)  # the page begins to load
        found = self.call("Runtime.evaluate", session, expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return json.loads(found["result"]["value"])

    def close(self) -> None:
        """End it."""
        self.call("Browser.close")
        self._process.wait(30)


def rows(browser: Browser, folder: Path, operators: int) -> list[list[str]]:
    page = write_report(analysis(operators), folder / f"{operators}.html")
    found = browser.evaluate(Path(page), MEASURE)
    return [
        [
            str(operators), way, *(f"{x:.1f}" for x in spread(times["drawn"])),
            *(f"{x:.1f}" for x in spread(times["between"])[:2]),
        ]
        for way, times in found.items()
    ]  # fmt: skip


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 95th percentile and largest."""
    ranked = sorted(values)
    return ranked[len(ranked) // 2], ranked[len(ranked) * 95 // 100], ranked[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", type=int, default=[100, 1000, 3000])
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        browser = Browser(Path(name))
        try:
            found = [row for count in options.operators for row in rows(browser, Path(name), count)]
        finally:
            browser.close()
    title = "Frames of the network view"
    measure.show(title, COLUMNS, found)
    if options.markdown:
        measure.write(options.markdown, measure.markdown(title, COLUMNS, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
