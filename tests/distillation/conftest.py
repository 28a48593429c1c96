"""The tests of distillation look at no report of a run, at no figure and at no exact interval."""

from tests.figures import quick_runs as quick_runs
