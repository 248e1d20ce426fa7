"""Manifests: YAML with positions, templating, typed and validated resources, JSON Schemas. The package keeps no state,
starts no process and uses no network.

``kinds``, ``tree``, ``nodes``, ``backend``, ``paths``, ``addresses`` and ``jsonpath`` import only the standard library,
so that ``areal get`` and completion stay fast. ``fields`` imports pydantic; modules that need it are imported on use.
"""
