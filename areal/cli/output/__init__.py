"""How data reaches stdout: formats, tables, JSONPath."""
