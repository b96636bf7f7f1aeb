"""The view of a language model: the role of every parameter, and the contents of its caches.

Roles are found from the graph, see :mod:`bitwright.core.graph.roles`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bitwright.core.graph.attention import attention_products
from bitwright.core.graph.graph import Graph
from bitwright.core.graph.operators import TRAITS
from bitwright.core.graph.roles import ROLE, ROLES, UNREAD, check_role, roles_of
from bitwright.errors import ConfigError, ModelError, close_matches, some_of
from bitwright.tables import Tabular
from bitwright.torch.interception.record import record

#: roles of matrices that presets quantize; tables, the output layer and routers are left as they are unless a rule says more
QUANTIZED = frozenset(("q", "k", "v", "kv", "qkv", "o", "gate", "up", "gate_up", "down", "expert", "other"))
_REPEATS = frozenset((*TRAITS["identity"], *TRAITS["reshape"], "Transpose", "Expand", "Tile"))


@dataclass(frozen=True)
class Part:
    """One parameter.

    Attributes:
        name: in the model.
        role: see the table of :mod:`bitwright.core.graph.roles`.
        shape: of the parameter.
        block: index of the block that it belongs to; ``None`` outside of blocks.
        why: of ``other``, what it is instead.
        axis: of a matrix, or stack of matrices, that a product reads: the axis that is summed over; else ``None``.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    block: int | None = None
    why: str = ""
    axis: int | None = None

    def __str__(self) -> str:
        return f"{self.role:9} {self.name} {list(self.shape)}{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True)
class Cache:
    """The values that a cache of one attention holds: names of activations in the recorded graph.

    Attributes:
        attention: operator that multiplies queries with keys.
        key, value: what is kept of past tokens, before heads are repeated.
    """

    attention: str
    key: str
    value: str


@dataclass(frozen=True)
class Transformer(Tabular):
    """The view of a language model.

    Attributes:
        parts: every parameter, in the order of the model.
        cache: keys and values of every attention.
        stack: name of the list of blocks; empty where there is none.
    """

    _rows = "parts"

    parts: tuple[Part, ...]
    cache: tuple[Cache, ...] = ()
    stack: str = ""

    @property
    def unrecognised(self) -> tuple[Part, ...]:
        """The parameters of role ``other``."""
        return tuple(part for part in self.parts if part.role == "other")

    def role(self, name: str) -> str:
        """Role of the parameter ``name``.

        Raises:
            ConfigError: there is none of this name.
        """
        found = next((part.role for part in self.parts if part.name == name), None)
        if found is None:
            names = [part.name for part in self.parts]
            raise ConfigError(name, f"the model has no such parameter{close_matches(name, names)}", "see view.parts")
        return found

    def of(self, *roles: str) -> tuple[Part, ...]:
        """The parameters of these roles."""
        return tuple(part for part in self.parts if part.role in roles)

    def matching(self, pattern: str) -> tuple[Part, ...]:
        """Parameters that match a rule's pattern: ``role:down``, or a glob of names of parameters or modules.

        Raises:
            ConfigError: a role that does not exist.
        """
        if not pattern.startswith(ROLE):
            return tuple(
                part for part in self.parts
                if fnmatch.fnmatchcase(part.name, pattern) or fnmatch.fnmatchcase(part.name.rpartition(".")[0], pattern)
            )  # fmt: skip
        wanted = check_role(pattern)
        return tuple(part for part in self.parts if fnmatch.fnmatchcase(part.role, wanted))

    def __str__(self) -> str:
        counts: dict[str, list[Part]] = {}
        for part in self.parts:
            counts.setdefault(part.role, []).append(part)
        lines = [f"{len(self.parts)} parameters, {len(self.cache)} attentions, blocks in {self.stack or 'no list'}"]
        lines += [
            f"  {role:9} {len(counts[role]):4}  {some_of([part.name for part in counts[role]], 2)}"
            for role in ROLES if role in counts
        ]  # fmt: skip
        lines += [f"  not recognised: {part.name} ({part.why})" for part in self.unrecognised[:20]]
        return "\n".join(lines)


class _Logits(nn.Module):
    """A language model as a function from tokens to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Any:
        """``[N, T]`` to ``[N, T, V]``."""
        found = self.model(tokens, use_cache=False) if hasattr(self.model, "config") else self.model(tokens)
        return getattr(found, "logits", found)


def transformer(model: nn.Module, example: Any = None) -> Transformer:
    """Find the role of every parameter of a language model.

    Args:
        model: of ``transformers``, or any module that maps tokens ``[N, T]`` to logits.
        example: tokens ``[1, T]``, int64; a short row by default.

    Raises:
        ModelError: the model fails on the example.
    """
    tokens = torch.arange(1, 13)[None] % _vocabulary(model) if example is None else example
    graph = record(_Logits(model), [tokens]).graph()
    found = roles_of(graph)
    stack = find_stack(model)
    parts = []
    for name, parameter in model.named_parameters():
        seen = found.get(f"model.{name}", UNREAD)
        parts.append(Part(name, seen.role, tuple(parameter.shape), block_of(name, stack), seen.why, seen.axis))
    return Transformer(tuple(parts), tuple(_caches(graph)), stack)


def _vocabulary(model: nn.Module) -> int:
    ends = getattr(model, "get_input_embeddings", lambda: None)()
    return int(ends.weight.shape[0]) if ends is not None else 16


def find_stack(model: nn.Module) -> str:
    """Name of the list of blocks: of the outermost lists of modules the one with the most numbers; empty where there is none."""
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in sizes)
        if isinstance(module, nn.ModuleList) and not inside and any(True for _ in module.parameters()):
            sizes[name] = sum(parameter.numel() for parameter in module.parameters())
    return max(sizes, key=lambda name: sizes[name], default="")


def block_of(name: str, stack: str) -> int | None:
    """Index of the block whose parameter ``name`` is."""
    if not stack or not name.startswith(f"{stack}."):
        return None
    return int(name[len(stack) + 1 :].split(".")[0])


def _caches(graph: Graph) -> Iterator[Cache]:
    for scores, product in attention_products(graph):
        yield Cache(scores.name, _unrepeated(graph, scores.inputs[1]), _unrepeated(graph, product.inputs[1]))


def _unrepeated(graph: Graph, value: str | None) -> str:
    """The value that is repeated or transposed for a product."""
    assert value is not None
    while (maker := graph.producer(value)) is not None and maker.type in _REPEATS and maker.inputs[0] is not None:
        value = maker.inputs[0]
    return value


def refuse_unused(patterns: Mapping[str, Any], view: Transformer) -> None:
    """Refuse rules that match no parameter.

    Raises:
        ConfigError: with close names.
    """
    for pattern in patterns:
        if not view.matching(pattern):
            names = [part.name for part in view.parts] + [f"role:{part.role}" for part in view.parts]
            raise ConfigError(
                f"rule {pattern!r}", f"no parameter of the model matches it{close_matches(pattern, names)}",
                "see bitwright.llm.transformer(model) for names and roles",
            )  # fmt: skip


def require_stack(model: nn.Module) -> Sequence[nn.Module]:
    """The blocks of a model.

    Raises:
        ModelError: there is no list of modules.
    """
    name = find_stack(model)
    if not name:
        raise ModelError(
            type(model).__name__, "its blocks are in no nn.ModuleList, so that they cannot be treated one by one",
            "use bitwright.quantize, which treats the model as a whole",
        )  # fmt: skip
    found = model.get_submodule(name)
    assert isinstance(found, nn.ModuleList)
    return list(found)
