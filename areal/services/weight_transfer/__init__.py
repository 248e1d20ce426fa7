"""How weights travel between a trainer and inference engines: memory that several processes map, and process groups."""
