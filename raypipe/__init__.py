"""RL post-training of language models as one Ray Data streaming plan per PPO iteration.

`import raypipe` loads nothing heavy: what is named here comes from its module on first use.
"""

import importlib
from typing import Any

# Name -> the module that has it.
NAMES = {"Pipeline": "raypipe.interactive", "Config": "raypipe.config", "load_config": "raypipe.config_file"}
__all__ = ["Config", "Pipeline", "load_config"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name == "api":
        return importlib.import_module("raypipe.api")
    if name in NAMES:
        return getattr(importlib.import_module(NAMES[name]), name)
    raise AttributeError(f"module 'raypipe' has no attribute {name!r}")
