"""What pytest does not collect of the layer of AIMET's names: some of its modules refuse to be imported, and say why."""

from pathlib import Path

_LAYER = Path(__file__).parent / "bitwright"


def _has_no_examples(path: Path) -> bool:
    return ">>> " not in path.read_text(encoding="utf-8")


#: of the layer of AIMET's names only examples are collected here; tests/aimet imports every module
collect_ignore = [str(path) for path in sorted(_LAYER.glob("aimet_*/**/*.py")) if _has_no_examples(path)]
