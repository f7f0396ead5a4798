"""Who implements the hooks, checked, and the facade that calls them (docs/plugins.md)."""

from miles_ref.plugins.catalogue import Catalogue, Plugin
from miles_ref.plugins.pipeline import Assembly, Pipeline

__all__ = ["Assembly", "Catalogue", "Pipeline", "Plugin"]
