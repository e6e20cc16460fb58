"""Configuration: a typed schema, TOML files and overrides, cross-field checks, the quantisation plan."""

from tracekit.config.dump import to_dict, to_flat, to_json, to_toml
from tracekit.config.load import Loaded, load, load_with_sources, quickstart
from tracekit.config.plan import Site, guided_layers, guided_sites, plan
from tracekit.config.schema import Config
from tracekit.config.validate import validate

__all__ = [
    "Config",
    "Loaded",
    "Site",
    "guided_layers",
    "guided_sites",
    "load",
    "load_with_sources",
    "plan",
    "quickstart",
    "to_dict",
    "to_flat",
    "to_json",
    "to_toml",
    "validate",
]
