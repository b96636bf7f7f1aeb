"""Small graphs by hand: the nets that the tests of patterns, rules and placement share."""

from __future__ import annotations

from typing import Any

from bitwright.core.graph.graph import Graph, Op, Value


class Build:
    """Collects values and ops; ``graph()`` freezes them."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {}
        self.inputs: list[str] = []

    def input(self, name: str = "x", shape: tuple[int, ...] = (1, 3, 8, 8), dtype: str = "float32") -> str:
        self.inputs.append(name)
        return self._value(Value(name, "input", shape, dtype))

    def param(self, name: str, shape: tuple[int, ...]) -> str:
        return self._value(Value(name, "param", shape, param=name))

    def const(self, name: str, shape: tuple[int, ...] = (), dtype: str = "float32") -> str:
        return self._value(Value(name, "constant", shape, dtype))

    def op(
        self,
        op_type: str,
        *inputs: str | None,
        name: str,
        shape: tuple[int, ...] = (1, 8, 8, 8),
        outputs: int = 1,
        dtype: str = "float32",
        also: tuple[tuple[int, str], ...] = (),
        module: str = "",
        **attrs: Any,
    ) -> str:
        made = tuple(f"{name}.output[{i}]" for i in range(outputs))
        for value in made:
            self._value(Value(value, "activation", shape, dtype))
        self.ops.append(Op(name, op_type, inputs, made, attrs, also=also, module=module))
        return made[0]

    def conv(
        self,
        x: str,
        name: str,
        channels: int = 8,
        *,
        inputs: int = 8,
        group: int = 1,
        bias: bool = True,
        kernel: tuple[int, ...] = (3, 3),
    ) -> str:
        weight = self.param(f"{name}.weight", (channels, inputs // group, *kernel))
        b = self.param(f"{name}.bias", (channels,)) if bias else None
        return self.op("Conv", x, weight, b, name=name, shape=(1, channels, 8, 8), group=group)

    def bn(self, x: str, name: str, channels: int = 8, *, training: bool = False) -> str:
        params = [self.param(f"{name}.{p}", (channels,)) for p in ("weight", "bias", "running_mean", "running_var")]
        return self.op("BatchNormalization", x, *params, name=name, training=training)

    def linear(self, x: str, name: str, out: int = 4, inputs: int = 8, *, rank: int = 2) -> str:
        weight, bias = self.param(f"{name}.weight", (out, inputs)), self.param(f"{name}.bias", (out,))
        shape = (*(1,) * (rank - 1), out)
        return self.op("Gemm", x, weight, bias, name=name, shape=shape, transB=1)

    def graph(self, *outputs: str) -> Graph:
        return Graph(self.ops, self.values, self.inputs, outputs)

    def _value(self, value: Value) -> str:
        self.values[value.name] = value
        return value.name


def worked_example() -> Graph:
    """A bit of everything: conv-bn-relu, residual, depthwise, SiLU, concat, pools, norm, linear, softmax."""
    b = Build()
    r1 = b.op("Relu", b.bn(b.conv(b.input(), "c1", inputs=3), "b1"), name="r1")
    r2 = b.op("Relu", b.op("Add", b.conv(r1, "c2"), r1, name="add"), name="r2")
    silu = b.op("Silu", b.conv(r2, "dw", group=8), name="silu")
    pooled = b.op("MaxPool", b.op("Concat", silu, r2, name="cat", shape=(1, 16, 8, 8)), name="maxpool")
    flat = b.op("Flatten", b.op("GlobalAveragePool", pooled, name="avgpool"), name="flatten", shape=(1, 16))
    scale, shift = b.param("norm.weight", (16,)), b.param("norm.bias", (16,))
    normed = b.op("LayerNormalization", flat, scale, shift, name="norm", shape=(1, 16))
    y = b.op("Softmax", b.linear(normed, "fc", 10, 16), name="softmax", shape=(1, 10))
    return b.graph(y)


def conv_chain(n: int) -> Graph:
    """``n`` blocks of conv, batch normalisation and ReLU."""
    b = Build()
    x = b.input()
    for i in range(n):
        x = b.op("Relu", b.bn(b.conv(x, f"{i}.conv", inputs=8 if i else 3), f"{i}.bn"), name=f"{i}.relu", module=f"{i}")
    return b.graph(x)
