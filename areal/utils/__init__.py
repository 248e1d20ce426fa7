"""Import paths that drivers written for AReaL use. The implementations are in other packages."""
