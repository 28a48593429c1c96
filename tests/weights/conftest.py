"""Runs of the tests of weights write their pages, without drawing the figures."""

from tests.figures import undrawn_figures as undrawn_figures
