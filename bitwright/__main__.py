"""``python -m bitwright``."""

from bitwright.cli import main

main()
