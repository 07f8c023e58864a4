"""What the description of a foreign format is made of; gpt2.py and llama.py are two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Source(NamedTuple):
    """Where a parameter comes from: a tensor's name ({i} is the layer) and shape: "V D" and the like, see each format.

    columns: its share of the last axis in units of D, if not all. parts: several tensors, {part} in the name, side by side before our last axes of output.
    turned: a weight is [out, in] there, as in torch's Linear; ours are [in, out].
    """

    name: str
    shape: str
    columns: tuple[int, int] | None = None
    parts: tuple[str, ...] = ("",)
    turned: bool = False

    def tensors(self, layers: int) -> list[list[str]]:
        """Tensor names: one list a layer, or one in all, of a name for each part."""
        return [[self.name.format(i=i, part=part) for part in self.parts] for i in range(layers if self.stacked else 1)]

    @property
    def stacked(self) -> bool:
        return "{i}" in self.name


@dataclasses.dataclass(frozen=True)
class Format:
    """A model_type of transformers: how its config.json and its tensors become ours.

    parameters: all that a model may have. table, head: names of the token table and of the head, also where both are one. prefix: what names of tensors may
    begin with. buffers: tensors that are no weights. defaults: by our names, for what config.json leaves out. names: what config.json calls a setting, where
    not as we do; the first name is the usual one. switches: settings that change the forward pass, with the values that are supported.
    more: (config.json, settings so far) -> settings that take more than another name; InputError for one that is not supported.
    """

    parameters: Mapping[str, Source]
    table: str
    head: str
    prefix: str
    buffers: tuple[str, ...]
    defaults: Mapping[str, Any]
    names: Mapping[str, tuple[str, ...]]
    switches: Mapping[str, tuple[Any, ...]]
    more: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
