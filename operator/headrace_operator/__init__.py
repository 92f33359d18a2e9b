"""The kopf operator that reconciles ModelService objects."""
