"""The parts of every service process: access, errors, request bodies, probes, metrics, drain and the serve loop.

Nothing here depends on models, agents or weights. Imports are few (httptools, orjson, prometheus_client), so that a
service starts fast and uses tens of megabytes when idle.
"""
