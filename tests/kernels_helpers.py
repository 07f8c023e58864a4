"""Cases of attention, and the comparison of a schedule with the plain path: output and all gradients.

Letters: B batch, T tokens, H query heads, G key/value heads, K key width, V value width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpt2jax.kernels.attention import Rule, attend_causally


@dataclasses.dataclass(frozen=True)
class Example:
    """Two rows of T tokens. packed: one row is three documents, then padding, the other padding, then two; else no segments at all."""

    T: int
    H: int
    G: int
    K: int
    V: int
    packed: bool = False
    sinks: bool = False
    rule: Rule = Rule()

    @functools.cached_property
    def inputs(self) -> dict[str, jax.Array]:
        B, T = 2, self.T
        shapes = dict(q=(B, T, self.H, self.K), k=(B, self.G, T, self.K), v=(B, self.G, T, self.V), weight=(B, T, self.H, self.V), sink=(self.H,))
        arrays = {name: jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(shapes.items())}
        return arrays if self.sinks else {name: x for name, x in arrays.items() if name != "sink"}

    @functools.cached_property
    def segment_BT(self) -> np.ndarray | None:
        """A document may have a number that one before it had: 7, 2, 7."""
        if not self.packed:
            return None
        part = np.arange(self.T) * 11 // self.T
        return np.stack([np.select([part < 3, part < 4, part < 10], [7, 2, 9], -1), np.select([part < 2, part < 7], [-3, 1], 0)]).astype(np.int32)

    def evaluate(self, attend: Callable[..., jax.Array]) -> dict[str, np.ndarray]:
        """Output and gradients of q, k, v and sink of `attend(q, k, v, segment, sink, rule=)`, in one program."""

        def loss(inputs: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            o = attend(inputs["q"], inputs["k"], inputs["v"], self.segment_BT, inputs.get("sink"), rule=self.rule)
            return (o * inputs["weight"]).sum(), o

        gradients, o = jax.jit(jax.grad(loss, has_aux=True))(self.inputs)
        return {name: np.asarray(x) for name, x in {**gradients, "o": o}.items() if name != "weight"}

    def check(self, attend: Callable[..., jax.Array], tolerance: float = 5e-6) -> dict[str, np.ndarray]:
        """`attend` against the plain path, and zeros at padding."""
        got, want = self.evaluate(attend), self.evaluate(attend_causally)
        assert got.keys() == want.keys()
        for name in want:
            # a softmax over one key has no gradient, and a sink's is a sum of thousands of terms near 1 that cancel
            scale = max(np.abs(want[name]).max(), 1.0)
            np.testing.assert_allclose(got[name], want[name], rtol=0, atol=tolerance * scale, err_msg=name)
        if self.packed:
            padding = self.segment_BT < 0
            assert padding.any() and not got["o"][padding].any() and not got["q"][padding].any()
            assert not got["k"].swapaxes(1, 2)[padding].any() and not got["v"].swapaxes(1, 2)[padding].any()
        return got


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of those inside it, a Pallas kernel's own left out."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "pallas_call":
            continue
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from equations(getattr(inner, "jaxpr", inner))


def operations(f: Callable[..., jax.Array], *args: Any) -> list[str]:
    """Names of the primitives in the gradient of f's sum."""
    gradient = jax.grad(lambda *args: f(*args).sum(), range(len(args)))
    return [equation.primitive.name for equation in equations(jax.make_jaxpr(gradient)(*args).jaxpr)]


def shapes(batch: int, T: int, heads: int, width: int, dtype: Any = jnp.float32) -> list[jax.ShapeDtypeStruct]:
    """Of q, k and v, as many key heads as query heads."""
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in [(batch, T, heads, width), (batch, heads, T, width), (batch, heads, T, width)]]
