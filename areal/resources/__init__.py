"""The kinds: positioned YAML to typed resources, templating, JSON Schema. Pure: no state, no process, no network.

Light modules (standard library only, so that ``areal get`` and completion stay fast): ``kinds``, ``tree``, ``nodes``,
``backend``, ``paths``, ``addresses``, ``jsonpath``. Pydantic is imported by ``fields`` and ``specs``, on first use.
"""
