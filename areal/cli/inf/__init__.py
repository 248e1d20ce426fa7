"""``areal inf``: shortcuts that use the same resources and the same reconciler as the declarative commands."""
