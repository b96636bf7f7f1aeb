"""Reports as a single HTML file, and comparison of two runs.

A report is written from a *document*: a plain dictionary (:mod:`bitwright.report.document`) made of the dictionaries of
analyses, recipes, verifications and coverage. Quantization errors are measured elsewhere, in ``bitwright.analysis``.
"""

from bitwright.report.diff import RunDiff, diff_runs
from bitwright.report.document import folder_document, read_run, report_document, simulation_document
from bitwright.report.page import simulation_report, write_report

__all__ = [
    "RunDiff",
    "diff_runs",
    "folder_document",
    "read_run",
    "report_document",
    "simulation_document",
    "simulation_report",
    "write_report",
]
