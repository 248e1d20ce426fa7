"""The page of ``areal ui``: a server on the standard library that reads a home and writes nothing.

A view is a function of a module in ``views``, from a ``ViewContext`` to a JSON-able dict, and one ES module of
``static/views``. ``access`` decides who may ask, ``server`` speaks HTTP and tells a page what changed.
"""
