"""Markers of quantizer sites, as the ONNX exporter sees them."""

from __future__ import annotations

import torch


def mark(x: torch.Tensor, site: str) -> torch.Tensor:
    """``x`` as the exporter sees it: a node ``bitwright::Site`` in the ONNX graph, an identity that carries a name."""
    out: torch.Tensor = torch.ops.bitwright.site(x, site)
    return out


def _copied(x: torch.Tensor, site: str) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


# an operator with two arguments: each of those of ``torch.onnx.ops.symbolic``, which has eight, costs the exporter half as
# much again
_OPERATORS = torch.library.Library("bitwright", "FRAGMENT")
_OPERATORS.define("site(Tensor x, str site) -> Tensor")
_OPERATORS.impl("site", _copied, "CompositeExplicitAutograd")
