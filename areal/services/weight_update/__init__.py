"""The weight-update service: what a trainer has learned goes into running inference workers, as one operation.

A pair is a training side and an inference side. An update pauses the inference workers, has the training side publish
its weights, has every worker take them, and lets generation go on: with the new version where all took it, with the old
one where any step failed. Its failure is the caller's error: nobody trains on against stale weights unknowingly.
"""
