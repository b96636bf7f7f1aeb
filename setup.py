"""The long description: README.md, with links into the checkout as paths, because a package page has no checkout."""

from __future__ import annotations

import re
from pathlib import Path


def package_page(readme: str) -> str:
    """``readme`` in which a link to a file of the checkout is its text and the file's path.

    >>> package_page("[Install](docs/install.md), [docs/a.md](docs/a.md#b), [ONNX](https://onnx.ai), [below](#below)")
    'Install (`docs/install.md`), `docs/a.md`, [ONNX](https://onnx.ai), [below](#below)'
    """

    def without_link(match: re.Match[str]) -> str:
        text, path = match[1], match[2]
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return re.sub(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(?:#[^)\s]*)?\)", without_link, readme)


if __name__ == "__main__":
    from setuptools import setup

    setup(
        long_description=package_page((Path(__file__).parent / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
