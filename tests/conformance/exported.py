"""The zoo as ``torch.onnx.export`` writes it, and what it does not write."""

from __future__ import annotations

import logging
import warnings
from functools import cache

import onnx
import torch

from tests.support.zoo import ZOO

#: models that the exporter refuses -> its reason
NOT_EXPORTED = {
    "conv3d-net": "_adaptive_avg_pool3d",
    "gru-packed": "must be tuple of ints,but got FakeTensor",
    "branch": "Could not guard on data-dependent expression",
    "dataclass-io": "Unsupported input type <class 'tests.support.zoo.Sample'>",
    "dataclass-io-optional": "Unsupported input type <class 'tests.support.zoo.Sample'>",
    "dict-io": "Error when translating node return",
}
#: models that it writes with two values of one name -> what loading says
NOT_LOADED = {"arithmetic": "two values of one graph bear the name 'mean'"}
#: models that ONNX Runtime refuses in float, as they were written -> its reason
NOT_RUN = {
    "rnn-projected-lstm": "Input initial_c must have shape",
    "data-movement": "Dimension of input 0 must be 1 instead of 2",
    "siamese-double": "Could not find an implementation for Conv",
}
#: ONNX Runtime 1.31 ends with a segmentation fault when it optimises what is written for an empty sequence of bags
CRASHES_THE_RUNTIME = {"embedding-bag"}
#: models whose inputs or parameters ONNX Runtime and numpy share no type for
NO_NUMPY_TYPE = {"resnet18-bfloat16", "vit-bfloat16"}
#: what the exporter writes in other operators, so that the plans differ in activations
REWRITTEN = {
    "activations": "SiLU, Softsign and others as several operators",
    "audio-net": "GLU as Split, Sigmoid, Mul",
    "cell-loop": "a recurrent cell as its operators, and the loop over time unrolled",
    "encoder-post-norm": "attention with factors on queries and on keys",
    "encoder-pre-norm": "attention with factors on queries and on keys",
    "layer-loop": "the loop over a layer unrolled",
    "llama": "rotary angles as constants, normalisation as several operators",
    "llama-cached": "rotary angles as constants, normalisation as several operators",
    "masked-lm": "the lookup of positions as a constant",
    "masked-lm-sdpa": "the lookup of positions as a constant, attention with factors on queries and on keys",
    "rnn-projected-lstm": "an LSTM without its projection",
    "siamese": "a module that is called twice as two nodes",
    "siamese-double": "a module that is called twice as two nodes",
    "tuple-io": "a bilinear layer as two products",
    "vit-half": "attention with factors on queries and on keys",
    "vit-sdpa": "attention with factors on queries and on keys",
}
#: all that both front ends can plan, and all that both can run
PLANNED = [name for name in ZOO if name not in {*NOT_EXPORTED, *NOT_LOADED, *NO_NUMPY_TYPE}]
RUN = [name for name in PLANNED if name not in {*NOT_RUN, *CRASHES_THE_RUNTIME}]


def exported(name: str) -> onnx.ModelProto:
    """The model ``name`` in the form nearest to what its code says: a copy of the caller's own."""
    proto = onnx.ModelProto()
    proto.CopyFrom(_exported_once(name))
    return proto


@cache
def _exported_once(name: str) -> onnx.ModelProto:
    case = ZOO[name]
    call = case.example()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            case.build(), call.args, kwargs=call.kwargs or None, dynamo=True, verbose=False, optimize=False
        )
    assert program is not None
    return program.model_proto
