"""Runs of the tests of tasks write their pages, without drawing the figures."""

from tests.figures import undrawn_figures as undrawn_figures
