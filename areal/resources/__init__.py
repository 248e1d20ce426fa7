"""The nouns: positioned YAML to typed resources, templating, JSON Schema. Pure: no state, no process, no network.

Light modules (standard library only, so that ``areal get`` and completion stay fast): ``kinds``, ``tree``,
``update``, ``suggest``, ``diagnostics``. Pydantic is imported by the model modules alone, which ``registry`` loads
on first use.
"""
