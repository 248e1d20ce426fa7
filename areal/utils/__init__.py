"""The import paths that drivers written for AReaL use. Nothing lives here."""
