"""Stands in for raypipe.adapters until that is there."""

import importlib
import importlib.util


def load_grader(path, kwargs):
    source, _, name = path.rpartition(":")
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location("grader_file", source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    return getattr(module, name)(**kwargs)
