"""What a data proxy counts of its journals. Gauges are read when they are scraped; nothing is counted twice."""

from __future__ import annotations

from areal.services.inference.recording.session import Phase
from areal.services.inference.recording.vault import Vault
from areal.services.web.metrics import Metrics

_COMMIT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)


def count_journals(metrics: Metrics, vault: Vault) -> None:
    commits = metrics.histogram(
        "areal_commit_seconds", "One group commit of the journal, until it is on disk.", _COMMIT_SECONDS, ()
    )
    for journal in vault:  # those that are adopted later get it from the own one
        journal.commits.observe = commits.observe
    metrics.gauge("areal_sessions_open", "Sessions that have not ended.").set_function(
        lambda: sum(journal.live_sessions() for journal in vault)
    )
    metrics.gauge("areal_trajectories_ready", "Trajectories that wait to be exported.").set_function(
        lambda: sum(journal.count_trajectories(Phase.READY) for journal in vault)
    )
    metrics.gauge("areal_journals", "Journals served: the own one and those adopted.").set_function(
        lambda: len(vault.journals)
    )
    metrics.gauge("areal_journal_failing", "1 while a journal cannot be written.").set_function(
        lambda: float(any(journal.commits.failing is not None for journal in vault))
    )
