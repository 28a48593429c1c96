"""A model learns from another, from several, or from itself, around any objective or task."""
