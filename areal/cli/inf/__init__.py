"""``areal inf``: shortcuts that build the same resources and call the same reconciler as the declarative verbs."""
