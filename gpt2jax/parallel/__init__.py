"""Devices: the mesh, and where arrays lie on it."""
