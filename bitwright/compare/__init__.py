"""Two executions of one model side by side: ``verify``, ``drift`` and ``saturation``, their causes and reports."""
