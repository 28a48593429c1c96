"""Configuration: tables of components, the strict decoder, Hydra composition. Imports no torch."""
