"""A headless Chromium that opens a page, runs a script in it, and gives back what the script returns."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_AROUND = """<script>
(async () => {
  const violations = [];
  addEventListener('securitypolicyviolation', event => violations.push(event.blockedURI));
  const errors = [];
  addEventListener('error', event => errors.push(String(event.message)));
  addEventListener('unhandledrejection', event => errors.push(String(event.reason)));
  const $ = selector => document.querySelector(selector), $$ = selector => [...document.querySelectorAll(selector)];
  const pause = time => new Promise(done => setTimeout(done, time));
  const result = {};
  try {
    for (let i = 0; i < 400 && !document.documentElement.dataset.ready; i++) await pause(20);
    Object.assign(result, await (async () => { SCRIPT })());
  } catch (error) { errors.push(String(error.stack || error)); }
  result.requests = performance.getEntriesByType('resource').map(entry => entry.name);
  result.violations = violations;
  result.errors = errors;
  const bytes = new TextEncoder().encode(JSON.stringify(result));
  const holder = document.createElement('pre');
  holder.id = 'test-result';
  holder.textContent = btoa(Array.from(bytes, byte => String.fromCharCode(byte)).join(''));
  document.body.append(holder);
})();
</script>"""


def chromium() -> str:
    """Path of the browser; the test is skipped where there is none."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium (Debian's package: chromium)")
    return found


def visit(page: Path, script: str, *, size: tuple[int, int] = (1280, 900), dark: bool = False) -> dict[str, Any]:
    """Open a page and run ``script``, the body of an async function with ``$``, ``$$`` and ``pause``.

    Returns what it returned, with ``requests``, ``violations`` of the page's policy, and ``errors``.
    """
    copy = page.with_name(f"{page.stem}-visited.html")
    copy.write_text(page.read_text().replace("</body>", _AROUND.replace("SCRIPT", script) + "</body>"))
    out = _run(["--dump-dom", "--virtual-time-budget=20000", copy.as_uri()], page.parent, size, dark)
    held = re.search(r'<pre id="test-result">([A-Za-z0-9+/=]*)</pre>', out)
    assert held, "the script in the page did not end"
    found: dict[str, Any] = json.loads(base64.b64decode(held[1]))
    return found


def screenshot(page: Path, image: Path, *, size: tuple[int, int] = (1280, 900), dark: bool = False) -> Path:
    """A picture of a page."""
    _run([f"--screenshot={image}", "--virtual-time-budget=6000", page.as_uri()], page.parent, size, dark)
    return image


def _run(arguments: list[str], folder: Path, size: tuple[int, int], dark: bool) -> str:
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={size[0]},{size[1]}", *(["--blink-settings=preferredColorScheme=0"] if dark else []), *arguments,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
