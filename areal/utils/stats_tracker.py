"""AReaL's import path of the metrics tracker: ``stats_tracker.get("rollout").scalar(reward=1.0)``."""

from areal.api.stats import ReduceType, export_all, get, scope_func_wrapper
from areal.api.stats import StatsTracker as DistributedStatsTracker

DEFAULT_TRACKER = get()
scope = DEFAULT_TRACKER.scope
scalar = DEFAULT_TRACKER.scalar
denominator = DEFAULT_TRACKER.denominator
stat = DEFAULT_TRACKER.stat
record_timing = DEFAULT_TRACKER.record_timing
export = DEFAULT_TRACKER.export

__all__ = [
    "DEFAULT_TRACKER",
    "DistributedStatsTracker",
    "ReduceType",
    "denominator",
    "export",
    "export_all",
    "get",
    "record_timing",
    "scalar",
    "scope",
    "scope_func_wrapper",
    "stat",
]
