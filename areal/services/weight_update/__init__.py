"""The weight-update service: transfers a trainer's weights to running inference workers, as one operation.

A pair is a training side and an inference side. In an update the training side publishes its weights, every worker
prepares them while it generates, and each worker then pauses to swap them in. If every worker took the new version,
generation continues with it; if a step failed, generation continues with the old version. The caller gets the failure
as an error, so that no trainer continues against stale weights without notice.
"""
