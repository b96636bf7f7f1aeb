"""What an export notes on operators of a QDQ model, as text: read without loading more than the standard library."""

from __future__ import annotations

import json
from typing import Any

from bitwright.errors import ExportError

METADATA = "bitwright"  # key of the node metadata that tells what a quantizer is, and of the model's: who wrote it
TABLE = "bitwright.table"  # key on the operator that looks rows of codes up: the DequantizeLinear that it stands for
#: facts that are left out where they are so
USUAL: dict[str, Any] = {"role": None, "scale": None, "entry": None, "axis": None, "perm": [], "pooled": 0}


def told_facts(text: str, operator: str) -> dict[str, Any]:
    """The facts in the metadata of an operator, without those that are as usual.

    Args:
        text: the metadata.
        operator: its name, for the error.

    Raises:
        ExportError: it was changed since.
    """
    try:
        facts: dict[str, Any] = json.loads(text)
        places = [[str(site), int(run)] for site, run in facts["places"]]
        pooled = int(facts.get("pooled", 0))
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(operator) from error
    return {**facts, "places": places, "pooled": pooled}


def damaged(operator: str) -> ExportError:
    """For what an export wrote on ``operator`` and cannot be read any more."""
    return ExportError(
        operator, "what the export wrote on this operator is damaged", "export again, or copy the folder anew"
    )
