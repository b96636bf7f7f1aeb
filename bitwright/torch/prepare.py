"""``prepare_model``, for code that moves from a tool that needs it."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from bitwright.errors import checks_arguments
from bitwright.torch.simulation.adopt import copied

logger = logging.getLogger("bitwright")


@checks_arguments
def prepare_model(
    model: nn.Module, modules_to_exclude: Any = None, module_classes_to_exclude: Any = None, concrete_args: Any = None
) -> nn.Module:
    """A copy of ``model`` with the same function, class, methods and control flow.

    Functional calls, reused modules and Python control flow need no preparation here: the simulation intercepts the calls
    themselves. The function exists so that scripts which call it keep working; nothing is traced, so it never raises a
    trace error. The other arguments are accepted and have no effect, which is logged when they are given.
    """
    ignored = {
        "modules_to_exclude": modules_to_exclude,
        "module_classes_to_exclude": module_classes_to_exclude,
        "concrete_args": concrete_args,
    }
    given = [name for name, value in ignored.items() if value is not None]
    if given:
        logger.info(
            "prepare_model: %s has no effect, because no tracing takes place; to keep modules in float write a rule or set "
            "sim.quantizers['name*'].enabled = False",
            ", ".join(given),
        )
    return copied(model)
