"""Memory and time of a training run before it starts, by formulas. Pure: shapes and layouts to numbers
(docs/estimate.md)."""
