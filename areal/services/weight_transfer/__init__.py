"""The transport of weights from a trainer to inference engines: memory that several processes map, and process
groups."""
