"""LiteRT (TensorFlow Lite) on the CPU: its interpreter, with reference kernels or those that it takes by default."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class LitertSession:
    """A loaded file.

    Attributes:
        interpreter: of ``ai_edge_litert``.
    """

    interpreter: Any

    def run(self, feeds: Mapping[str, Array], outputs: Collection[str] | None = None) -> dict[str, Array]:
        """Outputs by name; inputs that the file does not have are left out.

        Args:
            feeds: by name. Where a shape differs from the file's, its free axes take that length.
            outputs: names of the wanted ones, all by default.
        """
        run = self.interpreter
        details = run.get_input_details()
        for given in details:
            shape = np.shape(feeds[given["name"]])
            if tuple(given["shape"]) != shape:
                run.resize_tensor_input(given["index"], shape, strict=True)
        run.allocate_tensors()
        run.reset_all_variables()  # states of recurrent layers, which stay from call to call
        for given in details:
            run.set_tensor(given["index"], np.ascontiguousarray(feeds[given["name"]], given["dtype"]))
        run.invoke()
        return {
            made["name"]: run.get_tensor(made["index"])
            for made in run.get_output_details()
            if outputs is None or made["name"] in outputs
        }


def session_of(content: bytes, *, threads: int = 1, reference: bool = False, keeps: bool = False) -> LitertSession:
    """A session of a file in memory.

    Args:
        content: of the file.
        threads: number of threads.
        reference: kernels that compute as the format's specification says, instead of XNNPACK's and the optimised ones. A file
            with an operator that has no such kernel (ELU, ROUND, CEIL) runs without delegates instead.
        keeps: every tensor can be read after a run.
    """
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    plain = (OpResolverType.BUILTIN_REF, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    kinds = plain if reference else (OpResolverType.AUTO,)
    for kind in kinds:
        try:
            found = Interpreter(
                model_content=content,
                num_threads=threads,
                experimental_op_resolver_type=kind,
                experimental_preserve_all_tensors=keeps,
            )
        except ValueError as error:
            if kind is kinds[-1] or "Didn't find op" not in str(error):
                raise
        else:
            return LitertSession(found)
    raise AssertionError("the last kind of kernels returns or raises")
