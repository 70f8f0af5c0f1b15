"""Which nodes an actor may run on: label selectors, as Ray reads them.

In: `node_labels` of a config's section, {label: selector}, and the labels of a cluster's nodes. Out: which nodes
satisfy it. Ray does the placing. This module tells before the run that nothing would be placed, since an actor whose
labels no node has waits forever without a word.

A selector is a value (`H100`), one of several (`in(A100, H100)`), or the opposite of either (`!H100`, `!in(A100,
H100)`), which a node without the label satisfies too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_WORD = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
LABEL = re.compile(rf"(?:{_WORD}/)?{_WORD}")
SELECTOR = re.compile(rf"(!?)(?:({_WORD})|in\(({_WORD}(?:, ?{_WORD})*)\))")


@dataclass(frozen=True)
class Node:
    """A node of the cluster: its CPUs, GPUs and labels."""

    cpus: float
    gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)

    def room(self, cpus: float, gpus: float) -> float:
        """Actors that fit on the node, each with `cpus` and `gpus`, which it cannot share between nodes."""
        return min(there // wanted for there, wanted in ((self.cpus, cpus), (self.gpus, gpus), (1e9, 1)) if wanted)


def check_labels(key: str, wanted: Mapping[str, str]) -> None:
    """Raises ValueError unless `wanted`, the value of the config's `key`, is what Ray takes for label selectors."""
    for label, selector in wanted.items():
        if not LABEL.fullmatch(label):
            raise ValueError(
                f"{key}: {label!r} is not a label; write letters, digits, - _ and ., e.g. pool or example.com/pool"
            )
        if not SELECTOR.fullmatch(selector):
            raise ValueError(
                f"{key}: {label}={selector!r} is not a selector; write a value such as H100, in(A100, H100), or one of "
                "them after ! for all other nodes"
            )


def for_ray(wanted: Mapping[str, str]) -> dict[str, str]:
    """`wanted` as Ray's label_selector, without the spaces that Ray accepts in a list and then takes for part of a
    value."""
    return {label: selector.replace(" ", "") for label, selector in wanted.items()}


def satisfies(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a node with `labels` is one that the selectors of `wanted` name."""
    for label, selector in wanted.items():
        found = SELECTOR.fullmatch(selector)
        assert found, f"{selector!r} has passed check_labels"
        values = re.split(", ?", found[2] or found[3])
        if (labels.get(label) in values) == bool(found[1]):
            return False
    return True
