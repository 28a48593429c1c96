"""Pretraining objectives."""
