"""Diagrams of models: their modules with sizes, descriptions of attention, residual connections and repeated layers."""

from regard.view.diagrams.diagram import diagram, save_diagram

__all__ = ["diagram", "save_diagram"]
