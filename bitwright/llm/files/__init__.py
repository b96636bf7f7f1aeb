"""Files that engines load: one module per kind, one row per kind in ``table.py``."""
