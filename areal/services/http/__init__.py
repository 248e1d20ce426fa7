"""The parts of every service process: access, errors, request bodies, probes, metrics, drain and the serve loop.

Nothing here knows about models, agents or weights. Imports stay few (httptools, orjson, prometheus_client): an idle
service is tens of megabytes, and its start is not felt.
"""
