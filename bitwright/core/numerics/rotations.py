"""Orthogonal matrices that spread outliers over channels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bitwright.errors import ConfigError

Array = NDArray[np.float64]


def hadamard(n: int) -> Array:
    """A matrix of signs with ``H @ H.T == n * I``.

    Built by doubling (Sylvester) from 1 or from Paley's constructions for a prime: ``q + 1`` for ``q = 3 mod 4`` gives
    12, 20, 24, 44, ..., ``2 (q + 1)`` for ``q = 1 mod 4`` gives 28, 36, 60, ...

    Returns:
        Float64 of 1 and -1, shape [n, n].

    Raises:
        ConfigError: no such construction has this size.

    Example:
        >>> hadamard(2)
        array([[ 1.,  1.],
               [ 1., -1.]])
    """
    doublings, core = 0, n
    while core > 2 and _paley(core) is None and core % 2 == 0:
        core, doublings = core // 2, doublings + 1
    base = np.array([[1.0, 1.0], [1.0, -1.0]])
    H = np.ones((1, 1)) if core == 1 else base if core == 2 else _paley(core)
    if H is None:
        raise ConfigError(
            "hadamard",
            f"no construction here gives a Hadamard matrix of size {n}",
            "sizes are 2**k times 1, 12, 20, 28, 36, 44 and the like; random_rotation takes any size",
        )
    for _ in range(doublings):
        H = np.kron(H, base)
    return H


def _paley(n: int) -> Array | None:
    """Paley's matrix of size ``n``, if a prime gives one."""
    if n % 4 or n < 4:
        return None
    if _is_prime(n - 1):  # n - 1 = 3 mod 4
        S = _skew(n - 1)
        S[1:, 0] = -1.0
        return S + np.eye(n)
    q = n // 2 - 1
    if q % 4 == 1 and _is_prime(q):
        S = _skew(q)
        S[1:, 0] = 1.0
        signs, diagonal = np.array([[1.0, 1.0], [1.0, -1.0]]), np.array([[1.0, -1.0], [-1.0, -1.0]])
        result: Array = np.kron(S, signs) + np.kron(np.eye(q + 1), diagonal)
        return result
    return None


def _skew(q: int) -> Array:
    """Bordered matrix of the quadratic characters of differences modulo ``q``, shape [q + 1, q + 1]."""
    character = -np.ones(q)
    character[np.unique(np.arange(1, q) ** 2 % q)] = 1.0
    character[0] = 0.0
    S = np.zeros((q + 1, q + 1))
    S[0, 1:] = 1.0
    S[1:, 1:] = character[(np.arange(q)[:, None] - np.arange(q)) % q]
    return S


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))


def random_rotation(n: int, seed: int = 0) -> Array:
    """An orthogonal matrix, float64 [n, n]: Hadamard with random signs where there is one of that size, else random.

    Example:
        >>> R = random_rotation(12)
        >>> bool(np.allclose(R @ R.T, np.eye(12)))
        True
    """
    random = np.random.default_rng(seed)
    try:
        H = hadamard(n) / np.sqrt(n)
    except ConfigError:
        Q, upper = np.linalg.qr(random.standard_normal((n, n)))
        result: Array = Q * np.sign(np.diag(upper))
        return result
    turned: Array = random.choice([-1.0, 1.0], n)[:, None] * H
    return turned


def is_hadamard(n: int) -> bool:
    """Whether a Hadamard matrix of this size is available; else :func:`random_rotation` returns a random orthogonal one."""
    try:
        hadamard(n)
    except ConfigError:
        return False
    return True
