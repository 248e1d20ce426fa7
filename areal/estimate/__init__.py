"""Memory and time of a training run by formulas (docs/estimate.md). Pure: shapes and layouts to numbers."""
